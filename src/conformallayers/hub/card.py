"""Model cards: what a reader of the Hub learns of a network, and how to load, fold and run it."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from .. import __version__
from ..errors import missing_extra, refusal, shape_text
from ..folding.folded import Folded
from ..nn.activations import RadialActivation
from ..nn.container import ConformalLayers

LIBRARY = "conformallayers"
TAGS = ("conformallayers", "geometric-algebra", "image-classification", "re-parameterisation")
_MIXIN_TAGS = ("model_hub_mixin", "pytorch_model_hub_mixin")
_TASK = "image-classification"
# The sets of the paper: their names, and where the Hub has them.
_DATASETS = {
    "mnist": ("MNIST", "ylecun/mnist"),
    "fashion-mnist": ("Fashion-MNIST", "zalando-datasets/fashion_mnist"),
    "cifar10": ("CIFAR-10", "uoft-cs/cifar10"),
}
# What of a row of a run is worth a line.
_TRAINING = (
    *("optimizer", "learning_rate", "batch_size", "epochs", "weight_decay", "momentum"),
    *("schedule", "seed", "accuracy_train", "paper_accuracy", "torch", "command"),
)
_TEXT = """
# {title}

{about}

| | |
|---|---|
{table}

## Use

```python
{code}
```

{inputs}

## Limits

{limits}
{training}
## Citation

```bibtex
@article{{sousa2023conformallayers,
  title = {{An analysis of {{ConformalLayers'}} robustness to corruptions in natural images}},
  author = {{Sousa, Eduardo Vera and Vasconcelos, Cristina Nader and Fernandes, Leandro A. F.}},
  journal = {{Pattern Recognition Letters}},
  volume = {{166}},
  pages = {{190--197}},
  year = {{2023}},
  doi = {{10.1016/j.patrec.2022.11.002}},
}}
@inproceedings{{sousa2021conformallayers,
  title = {{{{ConformalLayers}}: A non-linear sequential neural network with associative layers}},
  author = {{Sousa, Eduardo Vera and Fernandes, Leandro A. F. and Vasconcelos, Cristina Nader}},
  booktitle = {{34th SIBGRAPI Conference on Graphics, Patterns and Images}},
  year = {{2021}},
  doi = {{10.1109/SIBGRAPI54419.2021.00059}},
}}
```
"""
_LIMITS = """- The direction of the conformal part's output is linear in the input: its own non-linearity is one number per
  sample. What follows it (a bias, a head) makes decision boundaries of that.
- As published, the activation is not invariant to the scale of the input: keep to the range it was trained on.
  `projective=True` is invariant.
- A fold is made for one input shape, and for inference: train the layers and fold again."""
_BASELINE = "A network without ConformalLayers, for comparison: it does not fold."
_LOAD = """import torch
import conformallayers as cl

net = cl.networks.{name}.from_pretrained("FOLDER or USER/REPOSITORY")
folded = cl.fold(net, (3, 32, 32))
with torch.inference_mode():
    scores = folded(torch.rand(8, 3, 32, 32))
cl.save(folded, "net.safetensors")  # runs without torch: conformallayers.numpy.load"""
_LOAD_PLAIN = """import torch
import conformallayers as cl

net = cl.networks.{name}.from_pretrained("FOLDER or USER/REPOSITORY")
with torch.inference_mode():
    scores = net(torch.rand(8, 3, 32, 32))"""
_LOAD_FOLDED = """import torch
import conformallayers as cl

folded = cl.load("FOLDER/model.safetensors")
with torch.inference_mode():
    scores = folded(torch.rand({shape}{dtype}))

import conformallayers.numpy as cln  # the same without torch
net = cln.load("FOLDER/model.safetensors")"""
_IMAGES = (
    "Images are 3×32×32 with values in [0, 1]; grey ones of 28×28 are padded with zeros by 2 on each side and "
    "repeated to three channels."
)


def model_card(
    model: nn.Module, *, dataset: str | None = None, accuracy: float | None = None, **row: Any
) -> Any:
    """Return the ``huggingface_hub.ModelCard`` of a network, or of a fold of one.

    Args:
        model: a class of :mod:`conformallayers.networks`, or a :class:`Folded`.
        dataset: what it was trained on, ``"mnist"``, ``"fashion-mnist"``, ``"cifar10"`` or any other name.
        accuracy: on the test set, from 0 to 1; needs the data set.
        **row: more of the row that a run writes, such as ``epochs``, ``seed`` and ``command``; what
            the card has no place for is left out.

    Examples:
        >>> import conformallayers as cl
        >>> card = model_card(cl.networks.LeNetCL(), dataset="cifar10", accuracy=0.5028, epochs=200)
        >>> card.data.license, card.data.datasets
        ('apache-2.0', ['uoft-cs/cifar10'])
    """
    try:
        from huggingface_hub import EvalResult, ModelCard, ModelCardData
    except ImportError as error:
        raise missing_extra("huggingface_hub", "hub", "a model card") from error
    name = type(model).__name__
    folded = isinstance(model, Folded)
    if not folded and row.get("network", name) != name:
        remedy = "Give the row of this network's own run."
        raise refusal("model card", f"a row of {name}", repr(row["network"]), remedy)
    source = str(row.get("network", "")) if folded else name
    results = []
    shown, known = _DATASETS.get(dataset or "", (dataset or "", dataset or ""))
    if accuracy is not None:
        results = [
            EvalResult(
                task_type=_TASK,
                dataset_type=known,
                dataset_name=shown,
                dataset_split="test",
                metric_type="accuracy",
                metric_value=_checked_accuracy(accuracy, dataset),
            )
        ]
    data = ModelCardData(
        license="apache-2.0",
        library_name=LIBRARY,
        pipeline_tag=_TASK,
        tags=sorted({*TAGS, *(() if folded else _MIXIN_TAGS), *(("folded",) if folded else ())}),
        datasets=[known] if dataset in _DATASETS else None,
        metrics=["accuracy"] if results else None,
        model_name=f"{source} {name}".strip() if folded else name,
        eval_results=results or None,
    )
    facts = {**_facts(model), **({"Data set": shown} if shown else {})}
    if accuracy is not None:
        facts["Accuracy on its test images"] = f"{100 * accuracy:.2f} %"
    text = _TEXT.format(
        title=data.model_name,
        about=_about(model),
        table="\n".join(f"| {key} | {value} |" for key, value in facts.items()),
        code=_code(model),
        inputs=_IMAGES if not folded or model.input_shape == (3, 32, 32) else "",
        limits=_LIMITS if folded or _folds(model) else _BASELINE,
        training=_training(row),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}")


def _checked_accuracy(accuracy: Any, dataset: str | None) -> float:
    number = isinstance(accuracy, (int, float)) and not isinstance(accuracy, bool)
    if not number or not 0 <= accuracy <= 1 or dataset is None:
        got = repr(accuracy) if dataset is not None else "no data set with it"
        remedy = 'Give a share, such as dataset="mnist", accuracy=0.99.'
        raise refusal("model card: accuracy", "a number from 0 to 1 and its data set", got, remedy)
    return float(accuracy)


def _about(model: nn.Module) -> str:
    if isinstance(model, Folded):
        return (
            "A network of ConformalLayers, folded: its layers have become one linear map and quadratic forms. "
            "`model.safetensors` is a file of `cl.save`."
        )
    lines = (type(model).__doc__ or "").strip().splitlines()
    return f"{lines[0] if lines else ''} One of the networks of the paper."


def _facts(model: nn.Module) -> dict[str, str]:
    facts = {"Class": f"`{type(model).__name__}`"}
    if isinstance(model, Folded):
        facts["Strategy"] = f"`{model.strategy}`"
        facts["Shapes"] = f"{shape_text(model.input_shape)} → {shape_text(model.output_shape)}"
        facts["dtype"] = str(model.dtype).removeprefix("torch.")
        facts["Proof"] = "float-exact" if model.certificate is None else str(model.certificate)
        facts["Constants"] = f"{sum(t.numel() for t in model.buffers()):,}"
    else:
        facts["Parameters"] = f"{sum(p.numel() for p in model.parameters()):,}"
        facts["Activations"] = _activations(model)
    facts["Library"] = f"conformallayers {__version__}"
    return facts


def _activations(model: nn.Module) -> str:
    kinds = RadialActivation, nn.ReLU
    shown = [repr(module) for module in model.modules() if isinstance(module, kinds)]
    return ", ".join(f"`{text}`" for text in dict.fromkeys(shown)) or "none"


def _code(model: nn.Module) -> str:
    name = type(model).__name__
    if isinstance(model, Folded):
        dtype = "" if str(model.dtype) == "torch.float32" else f", dtype={model.dtype}"
        return _LOAD_FOLDED.format(shape=", ".join(map(str, (8, *model.input_shape))), dtype=dtype)
    return (_LOAD if _folds(model) else _LOAD_PLAIN).format(name=name)


def _folds(model: nn.Module) -> bool:
    return any(isinstance(module, ConformalLayers) for module in model.modules())


def _training(row: dict[str, Any]) -> str:
    kept = [(key, row[key]) for key in _TRAINING if row.get(key) is not None]
    if not kept:
        return ""
    lines = "\n".join(f"| {key.replace('_', ' ')} | {_cell(value)} |" for key, value in kept)
    return f"\n## Training\n\n| | |\n|---|---|\n{lines}\n"


def _cell(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return (
        f"`{value}`".replace("\n", " ").replace("|", "\\|")
        if isinstance(value, str)
        else str(value)
    )

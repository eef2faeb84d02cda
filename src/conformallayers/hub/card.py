"""Write model cards: what a network is, how to load, fold and run it, and its accuracy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import nn

from .. import __version__
from ..container import ConformalLayers
from ..errors import is_real, missing_extra, refusal, shape_text
from ..folding.folded import Folded
from ..nn.activations import RadialActivation

LIBRARY = "conformallayers"
TASK = "image-classification"
TAGS = ("conformallayers", "geometric-algebra", TASK, "re-parameterisation")
_MIXIN_TAGS = ("model_hub_mixin", "pytorch_model_hub_mixin")
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
# The paper's data sets: title and name on the Hub.
_DATASETS = {
    "mnist": ("MNIST", "ylecun/mnist"),
    "fashion-mnist": ("Fashion-MNIST", "zalando-datasets/fashion_mnist"),
    "cifar10": ("CIFAR-10", "uoft-cs/cifar10"),
}
# The entries of a run's row that the card shows.
_TRAINING = (
    *("optimizer", "learning_rate", "batch_size", "epochs", "weight_decay", "momentum"),
    *("schedule", "seed", "accuracy_train", "paper_accuracy", "torch", "command"),
)


def model_card(
    model: nn.Module, *, dataset: str | None = None, accuracy: float | None = None, **row: Any
) -> Any:
    """Return the ``huggingface_hub.ModelCard`` of a network or of its fold.

    Args:
        model: a class of :mod:`conformallayers.networks`, or a :class:`conformallayers.Folded`.
        dataset: the training set: ``"mnist"``, ``"fashion-mnist"``, ``"cifar10"`` or any other name.
        accuracy: on the test set, from 0 to 1; requires ``dataset``.
        **row: further entries of the row that a run writes, such as ``epochs``, ``seed`` and
            ``command``; entries that the card does not show are ignored.

    Examples:
        >>> import conformallayers as cl
        >>> card = model_card(cl.networks.LeNetCL(), dataset="cifar10", accuracy=0.5028, epochs=200)
        >>> card.data.license, card.data.datasets
        ('apache-2.0', ['uoft-cs/cifar10'])
    """
    try:
        from huggingface_hub import ModelCard
    except ImportError as error:
        raise missing_extra("huggingface_hub", "hub", "a model card") from error
    title = type(model).__name__
    folded = model if isinstance(model, Folded) else None
    if folded is not None:
        title = f"{row.get('network', '')} {title}".strip()
    elif row.get("network", title) != title:
        remedy = "Give the row of this network's own run."
        raise refusal("model card", f"a row of {title}", repr(row["network"]), remedy)
    if accuracy is not None:
        accuracy = _checked_accuracy(accuracy, dataset)
    return ModelCard.from_template(
        _card_data(title, dataset, accuracy, folded is not None),
        template_str=_TEMPLATE.read_text("utf-8"),
        title=title,
        folded=folded,
        dtype="" if folded is None else _dtype_name(folded),
        conformal=any(isinstance(m, (Folded, ConformalLayers)) for m in model.modules()),
        summary=(type(model).__doc__ or "").strip().partition("\n")[0],
        facts=_facts(model, dataset, accuracy),
        training={
            key.replace("_", " "): _cell(row[key]) for key in _TRAINING if row.get(key) is not None
        },
    )


def _card_data(title: str, dataset: str | None, accuracy: float | None, folded: bool) -> Any:
    """Return the metadata that the Hub reads from the top of a card."""
    from huggingface_hub import EvalResult, ModelCardData

    results = None
    shown, hub_name = _DATASETS.get(dataset or "", (dataset or "", dataset or ""))
    if accuracy is not None:
        results = [
            EvalResult(
                task_type=TASK,
                dataset_type=hub_name,
                dataset_name=shown,
                dataset_split="test",
                metric_type="accuracy",
                metric_value=accuracy,
            )
        ]
    return ModelCardData(
        license="apache-2.0",
        library_name=LIBRARY,
        pipeline_tag=TASK,
        tags=sorted({*TAGS, *(("folded",) if folded else _MIXIN_TAGS)}),
        datasets=[hub_name] if dataset in _DATASETS else None,
        metrics=["accuracy"] if results else None,
        model_name=title,
        eval_results=results,
    )


def _checked_accuracy(accuracy: Any, dataset: str | None) -> float:
    if not is_real(accuracy) or not 0 <= accuracy <= 1 or dataset is None:
        got = repr(accuracy) if dataset is not None else "no data set with it"
        remedy = 'Give a share, such as dataset="mnist", accuracy=0.99.'
        raise refusal("model card: accuracy", "a number from 0 to 1 and its data set", got, remedy)
    return float(accuracy)


def _facts(model: nn.Module, dataset: str | None, accuracy: float | None) -> dict[str, str]:
    """Return the first table of the card."""
    facts = {"Class": f"`{type(model).__name__}`"}
    if isinstance(model, Folded):
        facts["Strategy"] = f"`{model.strategy}`"
        facts["Shapes"] = f"{shape_text(model.input_shape)} → {shape_text(model.output_shape)}"
        facts["dtype"] = _dtype_name(model)
        facts["Constants"] = f"{sum(t.numel() for t in model.buffers()):,}"
    else:
        facts["Parameters"] = f"{sum(p.numel() for p in model.parameters()):,}"
        kinds = (RadialActivation, nn.ReLU)
        shown = [f"`{module!r}`" for module in model.modules() if isinstance(module, kinds)]
        facts["Activations"] = ", ".join(dict.fromkeys(shown)) or "none"
    facts["Library"] = f"conformallayers {__version__}"
    if dataset:
        facts["Data set"] = _escaped(_DATASETS.get(dataset, (dataset,))[0])
    if accuracy is not None:
        facts["Accuracy on its test images"] = f"{100 * accuracy:.2f} %"
    return facts


def _dtype_name(folded: Folded) -> str:
    return str(folded.dtype).removeprefix("torch.")


def _cell(value: Any) -> str:
    """Format a value for a table: six digits for a float, code for a string."""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return _escaped(f"`{value}`") if isinstance(value, str) else str(value)


def _escaped(text: str) -> str:
    """Keep a text within one cell of a Markdown table."""
    return text.replace("\n", " ").replace("|", "\\|")

"""Networks on the Hugging Face Hub: ``huggingface_hub``'s mixin with a model card of this library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import missing_extra

CARD = """---
{{ card_data }}
---

# {{ name }}

{{ summary }}

| | |
|---|---|
| Parameters | {{ parameters }} |
| Library | [conformallayers]({{ repo_url }}) {{ version }} |
{%- if dataset %}
| Data set | {{ dataset }} |
{%- endif %}
{%- if accuracy %}
| Accuracy on its test images | {{ "%.2f" | format(100 * accuracy) }} % |
{%- endif %}

```python
import torch
import conformallayers as cl

net = cl.networks.{{ name }}.from_pretrained("FOLDER or USER/REPOSITORY")
folded = cl.fold(net, (3, 32, 32))
with torch.inference_mode():
    scores = folded(torch.rand(8, 3, 32, 32))
cl.save(folded, "net.safetensors")  # runs without torch: conformallayers.numpy.load
```

Images are 3×32×32 with values in [0, 1]. A fold has one input shape and is for inference only: to train, train the
layers and fold again.

```bibtex
@article{sousa2023conformallayers,
  title = {An analysis of ConformalLayers' robustness to corruptions in natural images},
  author = {Sousa, Eduardo Vera and Vasconcelos, Cristina Nader and Fernandes, Leandro A. F.},
  journal = {Pattern Recognition Letters},
  volume = {166},
  pages = {190--197},
  year = {2023},
  doi = {10.1016/j.patrec.2022.11.002},
}
```
"""


def _missing(*args: Any, **kwargs: Any) -> Any:
    raise missing_extra("huggingface_hub", "hub", "the Hugging Face Hub")


class _NotInstalled:
    """Name the extra that is not installed."""

    save_pretrained = push_to_hub = from_pretrained = generate_model_card = staticmethod(_missing)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()


if TYPE_CHECKING:
    _Mixin = _NotInstalled
else:
    try:
        from huggingface_hub import PyTorchModelHubMixin as _Mixin
    except ImportError:
        _Mixin = _NotInstalled


class Published(
    _Mixin,
    model_card_template=CARD,
    library_name="conformallayers",
    license="apache-2.0",
    pipeline_tag="image-classification",
    tags=["geometric-algebra", "re-parameterisation"],
    repo_url="https://github.com/conformallayers/conformallayers",
):
    """Mix in ``save_pretrained``, ``push_to_hub`` and ``from_pretrained`` of ``huggingface_hub.PyTorchModelHubMixin``.

    ``model_card_kwargs={"dataset": "mnist", "accuracy": 0.99}`` adds rows to the card.
    """

    arguments: dict[str, Any]  # of the constructor
    _hub_mixin_config: dict[str, Any]  # what huggingface_hub writes to config.json

    def generate_model_card(self: Any, *args: Any, **options: Any) -> Any:
        """Return the model card; ``huggingface_hub`` calls it."""
        from .. import __version__

        facts = {
            "name": type(self).__name__,
            "summary": (type(self).__doc__ or "").strip().partition("\n")[0],
            "parameters": f"{sum(weight.numel() for weight in self.parameters()):,}",
            "version": __version__,
        }
        return super().generate_model_card(*args, **{**facts, **options})

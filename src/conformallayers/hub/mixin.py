"""Networks on the Hugging Face Hub: the mixin of ``huggingface_hub`` where it is, one line where not.

A folder has ``config.json``, the constructor's arguments, ``model.safetensors``, the weights, and ``README.md``,
a model card. The arguments are read from the network as it is, and checked by making it again. A
pickle is never opened.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ConformalError, missing_extra, refusal
from ..nn.activations import ReSPro
from ..nn.extra_layers import Scale
from ..registry.registry import has_hooks
from ..utils.files import replace_file
from .card import LIBRARY, TAGS, model_card

__all__ = ["Published", "config_of", "model_card"]

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DOWNLOAD = (
    *("revision", "cache_dir", "force_download", "local_files_only", "token"),
    *("proxies", "resume_download"),  # of older versions
)
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
N = TypeVar("N", bound="Published")


def _first(network: Any, kind: type[nn.Module]) -> Any:
    return next((m for m in network.features.modules() if isinstance(m, kind)), None)


def _linears(network: Any) -> list[nn.Linear]:
    return [module for module in network.head.modules() if isinstance(module, nn.Linear)]


def _gain(network: Any) -> float | None:
    scale = _first(network, Scale)
    return None if scale is None else scale.initial


def _dropout(network: Any) -> float:
    return next((m.p for m in network.head.modules() if isinstance(m, nn.Dropout)), 0.0)


# How an argument of a constructor is read from the network that it made.
ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "pool_stride": lambda network: _first(network, nn.AvgPool2d).stride,
    "hidden": lambda network: _linears(network)[0].out_features if _linears(network)[1:] else None,
    "alpha": lambda network: _first(network, ReSPro).alpha,
    "projective": lambda network: _first(network, ReSPro).projective,
    "gain": _gain,
    "dropout": _dropout,
    "depth": lambda network: sum(isinstance(m, nn.Conv2d) for m in network.features),
    "padding_mode": lambda network: _first(network, nn.Conv2d).padding_mode,
    "num_classes": lambda network: _linears(network)[-1].out_features,
}


def config_of(network: nn.Module) -> dict[str, Any]:
    """Return the arguments that make a network again, as JSON has them; refuse one that was changed.

    Examples:
        >>> import conformallayers as cl
        >>> config_of(cl.networks.DkNetCL(2, alpha="spectral", gain=3.0))["alpha"]
        'spectral'
    """
    where, kind = f"{type(network).__name__}.save_pretrained", type(network)
    names = [name for name in inspect.signature(kind).parameters if name in ARGUMENTS]
    try:
        arguments = {name: ARGUMENTS[name](network) for name in names}
        dtype = next(network.parameters()).dtype
        with torch.device("meta"):
            again = kind(**arguments, dtype=dtype)
        same = repr(again) == repr(network) and _kinds(again) == _kinds(network)
    except Exception:
        same = False
    if not same or any(has_hooks(module) for module in network.modules()):
        remedy = "A network that was changed goes into a file by cl.save(network, path)."
        raise refusal(where, "the layers that its constructor makes", "others", remedy)
    return {"network": kind.__name__, "dtype": str(dtype).removeprefix("torch."), **arguments}


def _kinds(network: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in network.state_dict().items()}


def _made(kind: type[nn.Module], where: str, config: dict[str, Any]) -> nn.Module:
    """Return a network without memory, or refuse arguments that make none."""
    network, dtype = config.pop("network", None), config.pop("dtype", "float32")
    if network != kind.__name__:
        got = f"one of {network}" if isinstance(network, str) else "none"
        remedy = "Use the class that it names."
        raise refusal(where, f"a {CONFIG} of {kind.__name__}", got, remedy)
    accepted = set(inspect.signature(kind).parameters) & set(ARGUMENTS)
    unknown = sorted(set(config) - accepted)
    if unknown or not (isinstance(dtype, torch.dtype) or dtype in _DTYPES):
        got = f"{unknown[0]}={config[unknown[0]]!r}" if unknown else f"dtype={dtype!r}"
        remedy = f"Save it again with save_pretrained, or mend {CONFIG}."
        raise refusal(where, f"arguments of {kind.__name__}", got, remedy)
    try:
        with torch.device("meta"):
            return kind(**config, dtype=_DTYPES.get(dtype, dtype))
    except Exception as error:
        got = f"some that fail ({str(error).splitlines()[0]})"
        remedy = f"Save it again with save_pretrained, or mend {CONFIG}."
        raise refusal(where, f"arguments of {kind.__name__}", got, remedy) from error


def _load(network: nn.Module, path: str, where: str, device: str, cast: bool) -> None:
    """Give a network without memory its weights, if they are what it expects."""
    from safetensors import safe_open

    expected = _kinds(network)
    remedy = f"Save it again with save_pretrained, or copy {WEIGHTS} again."
    try:
        with safe_open(path, "pt", device=device) as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            if shapes != {name: tuple(shape) for name, (shape, _) in expected.items()}:
                raise refusal(where, "the weights of its arguments", "others", remedy)
            state: dict[str, Tensor] = {name: file.get_tensor(name) for name in shapes}
    except ConformalError:
        raise
    except Exception as error:
        got = f"a file that fails ({error})"
        raise refusal(where, f"weights in {WEIGHTS}", got, remedy) from error
    for name, (_, dtype) in expected.items():
        if state[name].dtype != dtype:
            if not cast:
                got = f"{name} of {state[name].dtype}"
                raise refusal(where, f"weights of {dtype}", got, remedy)
            state[name] = state[name].to(dtype)
    network.load_state_dict(state, assign=True)


def _check_folder(folder: str, where: str) -> None:
    """Refuse a folder without weights or arguments, in one sentence."""
    names = sorted(os.listdir(folder))
    if WEIGHTS not in names:
        pickles = [name for name in names if name.endswith(_PICKLES)]
        got = f"{pickles[0]}, a pickle, which is never opened" if pickles else "none"
        remedy = "Save the network with save_pretrained."
        raise refusal(where, f"weights in {WEIGHTS}", got, remedy)
    if CONFIG not in names:
        remedy = f'A fold or a model of cl.save loads with cl.load("{folder}/{WEIGHTS}").'
        raise refusal(where, f"arguments in {CONFIG}", "none", remedy)
    with open(os.path.join(folder, CONFIG), "rb") as file:
        _parsed(file.read(), where)


def _parsed(text: bytes, where: str) -> None:
    """Refuse arguments that the mixin could not even read."""
    try:
        fits = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        fits = False
    if not fits:
        remedy = "Save the network again with save_pretrained."
        raise refusal(where, f"arguments in {CONFIG}", "no JSON object", remedy)


class _Absent:
    """What stands in the place of the mixin where ``huggingface_hub`` is not."""

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        raise missing_extra("huggingface_hub", "hub", "save_pretrained")

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        raise missing_extra("huggingface_hub", "hub", "push_to_hub")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Any:
        raise missing_extra("huggingface_hub", "hub", "from_pretrained")


def _mixin() -> type[Any]:
    try:
        from huggingface_hub import PyTorchModelHubMixin
    except Exception:  # not there, or broken: networks work without it
        return _Absent

    class Hub(
        PyTorchModelHubMixin,
        library_name=LIBRARY,
        license="apache-2.0",
        pipeline_tag="image-classification",
        tags=list(TAGS),
    ):
        """The mixin with what the Hub should know of this library."""

    return Hub


if TYPE_CHECKING:
    _Mixin = _Absent
else:
    _Mixin = _mixin()


class Published(_Mixin):
    """What lets a network be saved to a folder or to the Hub, and loaded again, by its class.

    Where ``huggingface_hub`` is installed this is a ``PyTorchModelHubMixin``, with its methods and arguments.
    """

    _hub_mixin_config: Any = {}  # noqa: RUF012 - read from the network as it is, see config_of

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        config: dict[str, Any] | None = None,
        model_card_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> str | None:
        """Write ``config.json``, ``model.safetensors`` and, unless there is one, ``README.md``.

        Args:
            save_directory: the folder.
            config: nothing: the arguments are read from the network.
            model_card_kwargs: for :func:`conformallayers.hub.model_card`, such as the row of a run.
            **options: ``push_to_hub=True`` and ``repo_id`` of the mixin.
        """
        known = config_of(self) if isinstance(self, nn.Module) and _Mixin is not _Absent else None
        if known is not None and config not in (None, known):
            where, remedy = f"{type(self).__name__}.save_pretrained(config=...)", "Leave it out."
            raise refusal(where, "nothing: it is read from the network", "another one", remedy)
        more = {"config": known, "model_card_kwargs": model_card_kwargs}
        return super().save_pretrained(save_directory, **more, **options)

    @classmethod
    def from_pretrained(
        cls: type[N], pretrained_model_name_or_path: str | Path, **options: Any
    ) -> N:
        """Make the network of a folder or a repository, in evaluation mode; a pickle is never opened.

        Args:
            pretrained_model_name_or_path: a folder of :meth:`save_pretrained`, or a name on the Hub.
            **options: those of the mixin, such as ``revision``; ``map_location``, the device; ``dtype``, to
                convert the weights.
        """
        name = os.fspath(pretrained_model_name_or_path)
        where = f"{cls.__name__}.from_pretrained({name})"
        if _Mixin is not _Absent:
            if os.path.isdir(name):
                _check_folder(name, where)
            elif isinstance(pretrained_model_name_or_path, Path) or not _is_repository(name):
                raise refusal(where, "a folder", "none", "Give a folder, or USER/REPOSITORY.")
        made: N = super().from_pretrained(name, **options)
        vars(made).pop("_hub_mixin_config", None)
        return made

    def generate_model_card(self, *arguments: Any, **row: Any) -> Any:
        """Return the model card; see :func:`conformallayers.hub.model_card`."""
        return model_card(_module(self), **row)

    def _save_pretrained(self, save_directory: Path) -> None:
        from safetensors.torch import save

        state = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in _module(self).state_dict().items()
        }
        replace_file(save_directory / WEIGHTS, [save(state, {"format": "pt"})])

    @classmethod
    def _from_pretrained(
        cls: type[N], *, model_id: str, map_location: Any = "cpu", **options: Any
    ) -> N:
        where = f"{cls.__name__}.from_pretrained({model_id})"
        download = {key: options.pop(key) for key in _DOWNLOAD if key in options}
        cast = isinstance(options.get("dtype"), torch.dtype)
        network: Any = _made(cls, where, options)  # type: ignore[arg-type]
        path = os.path.join(model_id, WEIGHTS)
        if not os.path.isdir(model_id):
            path = _downloaded(model_id, where, download)
        _load(network, path, where, str(map_location), cast)
        made: N = network.eval()
        return made


def _is_repository(name: str) -> bool:
    """Tell whether the Hub may know a name; it is slow to say that it does not."""
    return not name.startswith((".", os.sep)) and name.count("/") == 1


def _module(published: Any) -> nn.Module:
    module: nn.Module = published
    return module


def _downloaded(model_id: str, where: str, options: dict[str, Any]) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        path: str = hf_hub_download(model_id, WEIGHTS, **options)
    except EntryNotFoundError as error:
        remedy = "Save the network with save_pretrained; pickles are never opened."
        raise refusal(where, f"weights in {WEIGHTS}", "none", remedy) from error
    return path

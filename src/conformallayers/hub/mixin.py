"""Save networks to a folder or to the Hugging Face Hub, and load them by their class.

A folder has ``config.json``, the constructor's arguments, ``model.safetensors``, the weights, and
``README.md``, a model card. Pickles are neither written nor opened.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..errors import ConformalError, missing_extra, refusal
from ..registry.registry import has_hooks
from ..utils.files import replace_file
from .card import LIBRARY, TAGS, TASK, model_card

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DOWNLOAD_OPTIONS = (
    *("revision", "cache_dir", "force_download", "local_files_only", "token"),
    *("proxies", "resume_download"),  # of older versions
)
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
_SAVE_AGAIN = f"Save it again with save_pretrained, or correct {CONFIG}."
N = TypeVar("N", bound="Published")


class _Unavailable:
    """Take the mixin's place where ``huggingface_hub`` is not installed."""

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
    except Exception:  # not installed, or broken: networks work without it
        return _Unavailable

    class Hub(
        PyTorchModelHubMixin,
        library_name=LIBRARY,
        license="apache-2.0",
        pipeline_tag=TASK,
        tags=list(TAGS),
    ):
        """The mixin with this library's metadata."""

    return Hub


if TYPE_CHECKING:
    _Mixin = _Unavailable
else:
    _Mixin = _mixin()


class Published(_Mixin):
    """Mix in ``save_pretrained``, ``push_to_hub`` and ``from_pretrained``.

    Where ``huggingface_hub`` is installed this is a ``PyTorchModelHubMixin``, with its methods and
    options. The class that mixes it in is an ``nn.Module`` that stores the arguments of its
    constructor, without ``device`` and ``dtype``, in ``arguments``.
    """

    arguments: dict[str, Any]
    # Not None, so that the mixin does not collect arguments itself; config_of returns the config.
    _hub_mixin_config: Any = {}  # noqa: RUF012

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        config: dict[str, Any] | None = None,
        model_card_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> str | None:
        """Write ``config.json``, ``model.safetensors`` and, unless it exists, ``README.md``.

        Args:
            save_directory: the folder.
            config: None; the network knows its arguments.
            model_card_kwargs: for :func:`conformallayers.hub.model_card`, such as the row of a run.
            **options: ``push_to_hub=True`` and ``repo_id`` of the mixin.
        """
        known = None if _Mixin is _Unavailable else config_of(self)
        if known is not None and config not in (None, known):
            where, remedy = f"{type(self).__name__}.save_pretrained(config=...)", "Leave it out."
            raise refusal(where, "None: it is read from the network", "another one", remedy)
        more = {"config": known, "model_card_kwargs": model_card_kwargs}
        return super().save_pretrained(save_directory, **more, **options)

    @classmethod
    def from_pretrained(
        cls: type[N], pretrained_model_name_or_path: str | Path, **options: Any
    ) -> N:
        """Load a network from a folder or a repository, in evaluation mode; never open a pickle.

        Args:
            pretrained_model_name_or_path: a folder of :meth:`save_pretrained`, or a name on the Hub.
            **options: options of the mixin, such as ``revision``; ``map_location``, the device;
                ``dtype``, to convert the weights.
        """
        name = os.fspath(pretrained_model_name_or_path)
        where = f"{cls.__name__}.from_pretrained({name})"
        if _Mixin is not _Unavailable:
            if os.path.isdir(name):
                _check_folder(name, where)
            elif isinstance(pretrained_model_name_or_path, Path) or not _is_repository(name):
                raise refusal(where, "a folder", "none", "Give a folder, or USER/REPOSITORY.")
        network: N = super().from_pretrained(name, **options)
        vars(network).pop("_hub_mixin_config", None)  # the mixin leaves its own copy
        return network

    def generate_model_card(self: Any, *arguments: Any, **row: Any) -> Any:
        """Return the model card; see :func:`conformallayers.hub.model_card`."""
        return model_card(self, **row)

    def _save_pretrained(self: Any, save_directory: Path) -> None:
        from safetensors.torch import save

        state = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()
        }
        replace_file(save_directory / WEIGHTS, [save(state, {"format": "pt"})])

    @classmethod
    def _from_pretrained(
        cls: type[N], *, model_id: str, map_location: Any = "cpu", **options: Any
    ) -> N:
        where = f"{cls.__name__}.from_pretrained({model_id})"
        download = {key: options.pop(key) for key in _DOWNLOAD_OPTIONS if key in options}
        convert = isinstance(options.get("dtype"), torch.dtype)
        network: Any = _build(cls, options, where)
        if os.path.isdir(model_id):
            path = os.path.join(model_id, WEIGHTS)
        else:
            path = _download_weights(model_id, where, download)
        _load_weights(network, path, where, str(map_location), convert)
        loaded: N = network.eval()
        return loaded


def config_of(network: Any) -> dict[str, Any]:
    """Return the arguments that rebuild a network, as JSON stores them.

    A network that its constructor would not rebuild is refused. Only the number of classes may
    differ from the constructor's: replacing the last layer to train on other classes is common.

    Examples:
        >>> import conformallayers as cl
        >>> config_of(cl.networks.DkNetCL(2, alpha="spectral", gain=3.0))["alpha"]
        'spectral'
    """
    kind = type(network)
    try:
        *_, last = (m for m in network.head.modules() if isinstance(m, nn.Linear))
        arguments = {**network.arguments, "num_classes": last.out_features}
        dtype = next(network.parameters()).dtype
        with torch.device("meta"):
            twin = kind(**arguments, dtype=dtype)
        same = _tensor_types(twin) == _tensor_types(network) and _same_modules(twin, network)
    except Exception:
        same = False
    if not same or any(has_hooks(module) for module in network.modules()):
        remedy = (
            "Save it with cl.save(network, path), or build it again with its arguments and load "
            "its state_dict."
        )
        where = f"{kind.__name__}.save_pretrained"
        raise refusal(where, "the layers that its constructor makes", "others", remedy)
    return {"network": kind.__name__, "dtype": str(dtype).removeprefix("torch."), **arguments}


def _tensor_types(network: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in network.state_dict().items()}


def _same_modules(twin: nn.Module, network: nn.Module) -> bool:
    """Compare the types and settings of all modules; repr would round numbers.

    Attributes that the twin lacks are the user's own and may have any value.
    """
    expected, found = dict(twin.named_modules()), dict(network.named_modules())
    return expected.keys() == found.keys() and all(
        type(module) is type(found[path]) and _settings(module).items() <= vars(found[path]).items()
        for path, module in expected.items()
    )


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the public plain attributes of a module, such as strides; not its mode."""
    plain = (bool, int, float, str, tuple, type(None))
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, plain) and not name.startswith("_") and name != "training"
    }


def _build(kind: type[Any], config: dict[str, Any], where: str) -> nn.Module:
    """Build a network on the meta device; refuse arguments that do not build one."""
    network, dtype = config.pop("network", None), config.pop("dtype", "float32")
    if network != kind.__name__:
        got = f"one of {network}" if isinstance(network, str) else "none"
        raise refusal(where, f"a {CONFIG} of {kind.__name__}", got, "Use the class that it names.")
    parameters = inspect.signature(kind.__init__).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD}
    unknown = sorted(set(config) - known)
    expected = f"arguments of {kind.__name__}"
    resolved = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(str(dtype))
    if unknown or resolved is None:
        got = f"{unknown[0]}={config[unknown[0]]!r}" if unknown else f"dtype={dtype!r}"
        raise refusal(where, expected, got, _SAVE_AGAIN)
    try:
        with torch.device("meta"):
            built: nn.Module = kind(**config, dtype=resolved)
    except Exception as error:
        got = f"some that fail ({str(error).splitlines()[0]})"
        raise refusal(where, expected, got, _SAVE_AGAIN) from error
    return built


def _load_weights(network: nn.Module, path: str, where: str, device: str, convert: bool) -> None:
    """Load a file into a network on the meta device; check names, shapes and dtypes first."""
    from safetensors import safe_open

    expected = _tensor_types(network)
    remedy = f"Save it again with save_pretrained, or copy {WEIGHTS} again."
    try:
        with safe_open(path, "pt", device=device) as file:
            shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            if shapes != {name: shape for name, (shape, _) in expected.items()}:
                raise refusal(where, "the weights of its arguments", "others", remedy)
            state = {name: file.get_tensor(name) for name in shapes}
    except ConformalError:
        raise
    except Exception as error:
        got = f"a file that fails ({error})"
        raise refusal(where, f"weights in {WEIGHTS}", got, remedy) from error
    for name, (_, dtype) in expected.items():
        if state[name].dtype != dtype and not convert:
            got = f"{name} of {state[name].dtype}"
            raise refusal(where, f"weights of {dtype}", got, remedy)
        state[name] = state[name].to(dtype)
    network.load_state_dict(state, assign=True)


def _download_weights(model_id: str, where: str, options: dict[str, Any]) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        path: str = hf_hub_download(model_id, WEIGHTS, **options)
    except EntryNotFoundError as error:
        remedy = "Save the network with save_pretrained; pickles are never opened."
        raise refusal(where, f"weights in {WEIGHTS}", "none", remedy) from error
    return path


def _check_folder(folder: str, where: str) -> None:
    """Refuse a folder without weights, or without a config that the mixin can read."""
    names = sorted(os.listdir(folder))
    if WEIGHTS not in names:
        pickles = [name for name in names if name.endswith(_PICKLES)]
        got = f"{pickles[0]}, a pickle, which is never opened" if pickles else "none"
        remedy = "Save the network with save_pretrained."
        raise refusal(where, f"weights in {WEIGHTS}", got, remedy)
    expected = f"arguments in {CONFIG}"
    if CONFIG not in names:
        remedy = f'A fold or a model of cl.save loads with cl.load("{folder}/{WEIGHTS}").'
        raise refusal(where, expected, "none", remedy)
    try:
        config = json.loads(Path(folder, CONFIG).read_bytes())
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        remedy = "Save the network again with save_pretrained."
        raise refusal(where, expected, "no JSON object", remedy)


def _is_repository(name: str) -> bool:
    """Tell whether a name has the form USER/REPOSITORY; asking the Hub for others is slow."""
    return not name.startswith((".", os.sep)) and name.count("/") == 1

"""Save networks to a folder or to the Hugging Face Hub, and load them by their class.

A folder has ``config.json``, the constructor's arguments, ``model.safetensors``, the weights, and
``README.md``, a model card. Pickles are neither written nor opened.
"""

from __future__ import annotations

import inspect
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..errors import first_line, missing_extra, refusal
from ..nn.registry import has_hooks
from ..utils.files import kind_of_file, replace_files
from .card import model_card

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
_LONGEST = 2**20  # bytes of a config
_DOWNLOAD_OPTIONS = ("revision", "cache_dir", "force_download", "local_files_only", "token")
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
_SAVE_AGAIN = "Save it again with save_pretrained."
N = TypeVar("N", bound="Published")


class _Unavailable:
    """Replace ``PyTorchModelHubMixin`` if ``huggingface_hub`` is not installed."""

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        raise missing_extra("huggingface_hub", "hub", "push_to_hub")


if TYPE_CHECKING:
    _Mixin = _Unavailable
else:
    try:
        from huggingface_hub import PyTorchModelHubMixin as _Mixin
    except Exception:  # not installed, or broken: networks work without it
        _Mixin = _Unavailable


class Published(_Mixin):
    """Mix in ``save_pretrained``, ``push_to_hub`` and ``from_pretrained``.

    Where ``huggingface_hub`` is installed this is a ``PyTorchModelHubMixin``, with its options. The
    class that mixes it in is an ``nn.Module`` that stores the arguments of its constructor, without
    ``device`` and ``dtype``, in ``arguments``.
    """

    arguments: dict[str, Any]
    # Not None, so that the mixin does not collect arguments itself; config_of returns the config.
    _hub_mixin_config: Any = {}  # noqa: RUF012

    def save_pretrained(
        self: Any,
        save_directory: str | Path,
        *,
        config: dict[str, Any] | None = None,
        model_card_kwargs: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **options: Any,
    ) -> str | None:
        """Write ``config.json``, ``model.safetensors`` and, unless it exists, ``README.md``.

        Args:
            save_directory: the folder.
            config: None; the network knows its arguments.
            model_card_kwargs: for :func:`conformallayers.hub.model_card`, such as the row of a run.
            push_to_hub: upload the files as well.
            repo_id: the repository; None means the name of the folder.
            **options: of the mixin's ``push_to_hub``.
        """
        _require_hub("save_pretrained")
        from safetensors.torch import save

        known, folder = config_of(self), Path(save_directory)
        if config not in (None, known):
            where, remedy = f"{type(self).__name__}.save_pretrained(config=...)", "Leave it out."
            raise refusal(where, "None: it is read from the network", "another one", remedy)
        state = {name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}
        files = {
            folder / WEIGHTS: [save(state, {"format": "pt"})],
            folder / CONFIG: [json.dumps(known, sort_keys=True, indent=2).encode()],
        }
        if not (folder / CARD).exists():
            files[folder / CARD] = [str(model_card(self, **(model_card_kwargs or {}))).encode()]
        folder.mkdir(parents=True, exist_ok=True)
        replace_files(files)
        if not push_to_hub:
            return None
        name = repo_id or folder.name
        url: str = self.push_to_hub(name, model_card_kwargs=model_card_kwargs, **options)
        return url

    @classmethod
    def from_pretrained(
        cls: type[N],
        pretrained_model_name_or_path: str | Path,
        *,
        map_location: Any = "cpu",
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> N:
        """Load a network from a folder or a repository, in evaluation mode; never open a pickle.

        Args:
            pretrained_model_name_or_path: a folder of :meth:`save_pretrained`, or a name on the Hub.
            map_location: the device.
            dtype: to convert the weights to; None means that of the file.
            **options: of the download, such as ``revision``; others override arguments of the config.
        """
        _require_hub("from_pretrained")
        name = os.fspath(pretrained_model_name_or_path)
        where = f"{cls.__name__}.from_pretrained({name})"
        download = {key: options.pop(key) for key in _DOWNLOAD_OPTIONS if key in options}
        if os.path.isdir(name):
            paths = [os.path.join(name, file) for file in (CONFIG, WEIGHTS)]
        elif isinstance(pretrained_model_name_or_path, Path) or not _is_repository(name):
            raise refusal(where, "a folder", "none", "Give a folder, or USER/REPOSITORY.")
        else:
            paths = _downloaded(name, where, download)
        config, weights = paths
        _check_file(weights, f"weights in {WEIGHTS}", where)
        network: Any = _build(cls, {**_read_config(config, where), **options}, dtype, where)
        _load_weights(network, weights, where, str(map_location), dtype is not None)
        loaded: N = network.eval()
        return loaded

    def generate_model_card(self: Any, *arguments: Any, **row: Any) -> Any:
        """Return the model card; see :func:`conformallayers.hub.model_card`."""
        return model_card(self, **row)


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


def _require_hub(purpose: str) -> None:
    if _Mixin is _Unavailable:
        raise missing_extra("huggingface_hub", "hub", purpose)


def _downloaded(name: str, where: str, options: dict[str, Any]) -> list[str]:
    """Return the paths of the config and the weights of a repository."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return [hf_hub_download(name, file, **options) for file in (CONFIG, WEIGHTS)]
    except EntryNotFoundError as error:
        remedy = "Save the network with save_pretrained; pickles are never opened."
        raise refusal(where, f"{CONFIG} and {WEIGHTS}", "not both", remedy) from error


def _is_repository(name: str) -> bool:
    """Check for a name of the form USER/REPOSITORY; asking the Hub for others is slow."""
    return not name.startswith((".", os.sep)) and name.count("/") == 1


def _check_file(path: str, expected: str, where: str) -> int:
    """Return the size of a file; refuse devices and pipes, which may block a read."""
    try:
        status = os.stat(path)
    except OSError as error:
        folder = os.path.dirname(path)
        remedy = "Save the network with save_pretrained; pickles are never opened."
        if os.path.basename(path) == CONFIG:
            remedy = f'A fold or a model of cl.save loads with cl.load("{folder}/{WEIGHTS}").'
        raise refusal(where, expected, "none", remedy) from error
    if not stat.S_ISREG(status.st_mode):
        raise refusal(where, expected, kind_of_file(status.st_mode), _SAVE_AGAIN)
    return status.st_size


def _read_config(path: str, where: str) -> dict[str, Any]:
    expected = f"arguments in {CONFIG}"
    size = _check_file(path, expected, where)
    if size > _LONGEST:
        raise refusal(where, expected, f"{size} bytes", _SAVE_AGAIN)
    try:
        config = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise refusal(where, expected, "no JSON object", _SAVE_AGAIN)
    return config


def _build(
    kind: type[Any], config: dict[str, Any], asked: torch.dtype | None, where: str
) -> nn.Module:
    """Build a network on the meta device; refuse arguments that do not build one."""
    network, stored = config.pop("network", None), config.pop("dtype", "float32")
    if network != kind.__name__:
        got = f"one of {network}" if isinstance(network, str) else "none"
        raise refusal(where, f"a {CONFIG} of {kind.__name__}", got, "Use the class that it names.")
    known = [p.name for p in inspect.signature(kind).parameters.values() if p.kind != p.VAR_KEYWORD]
    unknown = [f"{name}={value!r}" for name, value in config.items() if name not in known]
    dtype = asked or _DTYPES.get(str(stored))
    if dtype not in _DTYPES.values():
        unknown.append(f"dtype={asked or stored!r}")
    expected, remedy = f"arguments of {kind.__name__}", f"{_SAVE_AGAIN[:-1]}, or correct {CONFIG}."
    if unknown:
        raise refusal(where, expected, unknown[0], remedy)
    try:
        with torch.device("meta"):
            built: nn.Module = kind(**config, dtype=dtype)
    except Exception as error:
        got = f"some that fail ({first_line(error)})"
        raise refusal(where, expected, got, remedy) from error
    return built


def _load_weights(network: nn.Module, path: str, where: str, device: str, convert: bool) -> None:
    """Load a file into a network on the meta device; check names, shapes and dtypes first."""
    from safetensors.torch import load_file

    expected = _tensor_types(network)
    remedy = f"Save it again with save_pretrained, or copy {WEIGHTS} again."
    try:
        state = load_file(path, device)
    except Exception as error:
        got = f"a file that fails ({error})"
        raise refusal(where, f"weights in {WEIGHTS}", got, remedy) from error
    shapes = {name: tensor.shape for name, tensor in state.items()}
    if shapes != {name: shape for name, (shape, _) in expected.items()}:
        raise refusal(where, "the weights of its arguments", "others", remedy)
    for name, (_, dtype) in expected.items():
        if state[name].dtype != dtype and not convert:
            got = f"{name} of {state[name].dtype}"
            raise refusal(where, f"weights of {dtype}", got, remedy)
        state[name] = state[name].to(dtype)
    network.load_state_dict(state, assign=True)

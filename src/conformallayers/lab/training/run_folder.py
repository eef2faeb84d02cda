"""The folder of a training run: options, metrics, checkpoint and result, written so that the run can be resumed.

A checkpoint is one safetensors file: the state_dicts of model and optimizer, with options and history as JSON in its header.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...errors import ConformalError, cause_line, first_line, refusal
from ...utils.files import is_unfinished, staged_files, write_json
from ..checks import require_same
from .config import TrainConfig

CONFIG, METRICS, RESULT = "config.json", "metrics.csv", "result.json"
_REMEDY = "Name a folder or checkpoint that conformallayers train has written."
# Derived options, and what has changed if they differ.
_UNCHANGED = {"pictures": "the folder of pictures", "source": "the file of the network"}


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint: tensors by flat name, the options of the run, and the row of each epoch."""

    path: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    history: list[dict[str, Any]]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load the weights into a model, and the optimizer's state into its optimizer if one is given."""
        try:
            model.load_state_dict(self._with_prefix("model."))
            device = next(model.parameters()).device
            for name, buffer in self._with_prefix("buffer.").items():
                parent, _, leaf = name.rpartition(".")
                model.get_submodule(parent)._buffers[leaf] = buffer.to(device)
            if optimizer is not None:
                entries: dict[int, dict[str, Tensor]] = {}
                for name, value in self._with_prefix("optimizer.").items():
                    index, _, key = name.partition(".")
                    entries.setdefault(int(index), {})[key] = value
                optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
        except (RuntimeError, AttributeError, KeyError, ValueError) as error:
            expected = f"weights of {type(model).__name__}"
            got = f"{' '.join(str(error).split()):.400}".rstrip(".")
            raise refusal(self.path, expected, got, _REMEDY) from error

    def _with_prefix(self, prefix: str) -> dict[str, Tensor]:
        found = self.tensors.items()
        return {name.removeprefix(prefix): t for name, t in found if name.startswith(prefix)}


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    history: list[dict[str, Any]],
) -> None:
    """Write a checkpoint."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, buffer in model.named_buffers():  # non-persistent: the vectors of spectral norms
        if f"model.{name}" not in tensors:
            tensors[f"buffer.{name}"] = buffer
    for index, entries in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in entries.items()}
    # Copies, because safetensors refuses tensors that share memory.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    with staged_files(path) as (staged,):
        save_file(copies, staged, {"state": json.dumps({"config": config, "history": history})})


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint; refuse a file that is damaged or something else."""
    where = os.fspath(path)
    try:
        with safe_open(where, "pt") as file:
            state = json.loads((file.metadata() or {})["state"])
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            return Checkpoint(where, tensors, state["config"], state["history"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        got = f"another file ({first_line(error)})"
        raise refusal(where, "a training checkpoint", got, _REMEDY) from error


def prepare_folder(folder: Path, config: TrainConfig, resume: bool) -> None:
    """Create the folder with its config.json, or check that its run can be resumed."""
    path, options = folder / CONFIG, config.model_dump()
    # A killed process may have left temporary files, and nothing else.
    if folder.is_dir() and not all(is_unfinished(path.name) for path in folder.iterdir()):
        if not resume:
            remedy = "Resume that run with --resume, or name another folder with --out."
            raise refusal("train --out", "an empty folder", f"{folder} with files", remedy)
        if not path.is_file():
            remedy = "Name the folder of a run with --out."
            raise refusal("train --resume", f"a run with {path}", "none", remedy)
        before = read_record(path, "train --resume")
        for name, meant in _UNCHANGED.items():
            if before.get(name) != options[name]:
                remedy = "Restore it, or start another run with --out."
                raise refusal("train --resume", f"{meant} as before", "a changed one", remedy)
        remedy = f"Give the options of the run in {folder}, or start another one with --out."
        require_same("train --resume,", before, options, remedy)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, options)


def read_record(path: Path, where: str) -> dict[str, Any]:
    """Read a JSON object, or refuse the file."""
    with readable(where, path):
        return {**json.loads(path.read_text("utf-8"))}


@contextmanager
def readable(where: str, path: Path) -> Iterator[None]:
    """Refuse files of a run or an experiment that are damaged."""
    try:
        yield
    except ConformalError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        expected, got = "a file of conformallayers", f"a damaged one ({cause_line(error)})"
        raise refusal(f"{where}, {path}", expected, got, "Restore or remove it.") from error


def commit() -> str | None:
    """Return the git commit of the package, marked if files have changed; None outside a checkout."""
    # A package that is installed below another repository is no part of it.
    if not _git("ls-files", "__init__.py"):
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no", ".")
    return f"{_git('rev-parse', 'HEAD')}{'-changed' if changed else ''}"


def _git(*arguments: str) -> str:
    """Return the output of a git command in the folder of the package; empty if it fails."""
    command = ["git", "-C", str(Path(__file__).parents[2]), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""

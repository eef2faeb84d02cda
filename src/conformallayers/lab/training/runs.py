"""Create and resume run folders."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from ...errors import refusal
from ...utils.files import is_unfinished, write_csv, write_json
from ..checks import require_folder, require_same
from .config import DEFAULTS, TrainConfig

CONFIG, METRICS, RESULT = "config.json", "metrics.csv", "result.json"
# Derived options, and what has changed if they differ.
_UNCHANGED = {
    "pictures": "the folder of pictures",
    "source": "the file of the network",
}
_PACKAGE = Path(__file__).parents[1]


def prepare_folder(folder: Path, config: TrainConfig, resume: bool) -> None:
    """Create the folder with its config.json, or check that its run can be resumed."""
    require_folder("train --out", folder)
    # A killed process may have left temporary files, and nothing else.
    if folder.is_dir() and not all(is_unfinished(path.name) for path in folder.iterdir()):
        if not resume:
            remedy = "Resume that run with --resume, or name another folder with --out."
            raise refusal("train --out", "an empty folder", f"{folder} with files", remedy)
        _check_same_options(folder, config)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, config.model_dump())


def write_metrics(folder: Path, history: list[dict[str, Any]]) -> None:
    """Write one row for each epoch."""
    write_csv(folder / METRICS, history)


def commit() -> str | None:
    """Return the git commit of the package, marked if files have changed; None outside a checkout."""
    tracked = git(_PACKAGE, "ls-files", "--error-unmatch", "__init__.py")
    head = git(_PACKAGE, "rev-parse", "HEAD") if tracked else None
    if head is None:
        return None
    changed = git(_PACKAGE, "status", "--porcelain", "--untracked-files=no", ".")
    return head + ("-changed" if changed else "")


def _check_same_options(folder: Path, config: TrainConfig) -> None:
    path = folder / CONFIG
    try:
        before = {**DEFAULTS, **json.loads(path.read_text("utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        remedy = "Name the folder of a run with --out."
        raise refusal("train --resume", f"a run with {path}", "none", remedy) from error
    options = config.model_dump()
    # A constant learning rate does not depend on the number of epochs.
    if config.schedule == "constant" and before.get("epochs", 0) < config.epochs:
        del options["epochs"]
    for name, meant in _UNCHANGED.items():
        if before[name] not in (None, options.pop(name)):
            remedy = "Restore it, or start another run with --out."
            raise refusal("train --resume", f"{meant} as before", "a changed one", remedy)
    remedy = f"Give the options of the run in {folder}, or start another one with --out."
    require_same("train --resume,", before, options, remedy)


def git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command in a folder; None if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

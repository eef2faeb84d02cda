"""Join all results with the paper's numbers into one HTML page."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import refusal
from ...utils.files import replace_file
from ..training.runs import commit
from .page import Markup, page, tag
from .parts import CELL, accuracies, batches, benchmarks, depths, short, sweeps, training_steps

_TITLE = "ConformalLayers: measured beside the paper"


def write_report(results: Path = Path("results"), out: Path | None = None) -> Path:
    """Write the page and return its path.

    Args:
        results: the folder that the experiments have written to; a part that it has not is named
            on the page with the command that makes it.
        out: the file; None takes ``report.html`` in that folder.
    """
    if not results.is_dir():
        remedy = "Run an experiment first, or name the folder it has written to."
        raise refusal("report --results", "a folder with results", f"{results}, no folder", remedy)
    out = out or results / "report.html"
    if out.is_dir():
        raise refusal(
            "report --out", "a file", f"the folder {out}", "Name one such as report.html."
        )
    text = page(_TITLE, _body(results))
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, [text.encode()])
    return out


def _body(results: Path) -> list[object]:
    sections: dict[str, tuple[str, Callable[[Path], Markup]]] = {
        "accuracy": (
            "Accuracy: Tables I and II",
            lambda root: accuracies(_rows(root / "accuracy")),
        ),
        "depth": ("Time against depth: experiment 3", _one("experiment3/times.json", depths)),
        "batch": ("Time and memory: experiment 4", _one("experiment4/batches.json", batches)),
        "sweep": ("Hyperparameters: the sweep", lambda root: sweeps(_studies(root))),
        "bench": ("Against other engines", _one("benchmarks/bench.json", benchmarks)),
        "steps": ("Training steps", _one("benchmarks/train_step.json", training_steps)),
    }
    links = [tag("a", title, href=f"#{key}") for key, (title, _) in sections.items()]
    parts: list[object] = [
        tag("h1", _TITLE),
        tag(
            "p",
            "What the paper on ConformalLayers reports, and what this library measures. Every "
            "figure stands beside the command that makes it and the commit it was made with.",
        ),
        tag(
            "p",
            f"Version {__version__}, page made at commit {short(commit())}.",
            kind="source",
        ),
        tag("nav", *links),
    ]
    for key, (title, build) in sections.items():
        try:
            built = build(results)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            expected, got = "records of this version", f"another ({type(error).__name__}: {error})"
            remedy = "Measure it again, or move the file away."
            raise refusal(f"report, {title}", expected, got, remedy) from error
        parts.append(tag("section", tag("h2", title), built, id=key))
    return parts


def _one(name: str, build: Callable[[dict[str, Any] | None, Path], Markup]) -> Any:
    """Return a function of the results folder that builds a part from one file."""

    def section(results: Path) -> Markup:
        path = results / name
        return build(read(path) if path.exists() else None, path.parent)

    return section


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [read(path, *CELL) for path in sorted(folder.glob("*.json"))]


def _studies(results: Path) -> list[tuple[dict[str, Any], Path]]:
    found = [
        path for folder in sorted(results.glob("sweep*")) for path in folder.rglob("study.json")
    ]
    return [(read(path), path.parent) for path in sorted(found)]


def read(path: Path, *needed: str) -> dict[str, Any]:
    """Read a record with the keys it needs; where it does not say its commit, take the file's."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except ValueError as error:  # no JSON, or no text
        record = error
    absent = [key for key in needed if key not in record] if isinstance(record, dict) else needed
    if absent or not isinstance(record, dict):
        expected = " with ".join(["a record in JSON", *([", ".join(absent)] if absent else [])])
        remedy = "Measure it again, or move the file away."
        raise refusal(f"report, {path}", expected, "another file", remedy)
    if "commit" not in record:
        record["commit"] = _commit_of(path)
    return record


def _commit_of(path: Path) -> str | None:
    command = ["git", "-C", str(path.parent), "log", "-1", "--format=%H", "--", path.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

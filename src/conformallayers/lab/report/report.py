"""Write all results beside the paper's numbers as one HTML page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from ... import __version__
from ...errors import refusal
from ...utils.files import replace_file
from ...utils.text import is_number
from ..experiments import paper
from ..experiments.records import read_record
from ..training.runs import commit, git
from . import sections
from .sections import Context, Record

_TITLE = "ConformalLayers: measured beside the paper"
# The sections by their names in the template.
_HEADINGS = {
    "accuracy": "Accuracy: Tables I and II",
    "depth": "Time against depth: experiment 3",
    "batch": "Time and memory: experiment 4",
    "cost": "Accuracy against cost: experiment 5",
    "robustness": "Corrupted images: experiment 6",
    "sweep": "Hyperparameters: the sweep",
    "bench": "Against other engines",
    "steps": "Training steps",
}
# The sections of one record each: its file, and the function that lays it out.
_RECORDS: dict[str, tuple[str, Callable[[Record, Path], Context]]] = {
    "depth": ("experiment3/times.json", sections.depth_section),
    "batch": ("experiment4/batches.json", sections.batch_section),
    "cost": ("experiment5/cifar10.json", sections.cost_section),
    "robustness": ("experiment6/cifar10.json", sections.robustness_section),
    "bench": ("benchmarks/bench.json", sections.bench_section),
    "steps": ("benchmarks/train_step.json", sections.steps_section),
}
_REMEDY = "Measure it again, or move the file away."


def write_report(results: Path = Path("results"), out: Path | None = None) -> Path:
    """Write the page and return its path.

    Args:
        results: the folder of the experiments' results; a section without results names the
            command that measures them.
        out: the file; None means ``report.html`` in that folder.
    """
    if not results.is_dir():
        remedy = "Run an experiment first, or give the folder that it wrote."
        raise refusal("report --results", "a folder with results", f"{results}, no folder", remedy)
    return write_page(out or results / "report.html", "report.html.jinja", _context(results))


def write_page(out: Path, template: str, values: Context) -> Path:
    """Render a template into a file, and return its path."""
    if out.is_dir():
        remedy = "Give a file name such as report.html."
        raise refusal("report --out", "a file", f"the folder {out}", remedy)
    text = template_environment().get_template(template).render(values)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, [text.encode()])
    return out


def template_environment() -> jinja2.Environment:
    """Return the environment of the report's templates: every value is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("conformallayers.lab.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Columns whose every cell is a number or empty are right-aligned.
    environment.globals["numeric_columns"] = lambda rows: [
        all(is_number(str(cell)) for cell in column) for column in zip(*rows, strict=True)
    ]
    return environment


def _context(results: Path) -> Context:
    cells = sorted((results / "accuracy").glob("*.json"))
    studies = [path for folder in results.glob("sweep*") for path in folder.rglob("study.json")]
    contexts: dict[str, Callable[[], Any]] = {
        name: partial(_measured, results / file, build) for name, (file, build) in _RECORDS.items()
    }
    contexts["accuracy"] = lambda: sections.accuracy_section(
        [read(path, *sections.CELL_KEYS) for path in cells]
    )
    contexts["sweep"] = lambda: [
        sections.study_section(read(path), path.parent) for path in sorted(studies)
    ]
    return {
        "title": _TITLE,
        "version": __version__,
        "commit": sections.short_commit(commit()),
        "headings": _HEADINGS,
        "paper": paper,
        **{name: _checked(_HEADINGS[name], build) for name, build in contexts.items()},
    }


def _checked(heading: str, build: Callable[[], Any]) -> Any:
    """Build the context of a section; refuse records of another form."""
    try:
        return build()
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        expected, got = "records of this version", f"another ({type(error).__name__}: {error})"
        raise refusal(f"report, {heading}", expected, got, _REMEDY) from error


def _measured(path: Path, build: Callable[[Record, Path], Context]) -> Context | None:
    """Build a section from one file; None if there is no such file, or it has no rows."""
    record = read(path) if path.exists() else {}
    return build(record, path.parent) if record.get("rows") else None


def read(path: Path, *required: str) -> Record:
    """Read a record and check its keys; if it names no commit, take the file's own."""
    record = read_record(path, "report", *required, remedy=_REMEDY)
    if "commit" not in record:
        last = git(path.parent, "log", "-1", "--format=%H", "--", path.name)
        record["commit"] = last or None
    return record

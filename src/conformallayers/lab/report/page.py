"""Write reports as one self-contained HTML page: about a training run, or all results beside the paper's numbers."""

from __future__ import annotations

import base64
import csv
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

from ... import __version__
from ...errors import refusal
from ...utils.files import replace_file
from ...utils.text import Table, html
from ..experiments import accuracy, bench, cost, paper, robustness, speed
from ..experiments.records import Cells, Row
from ..training.run_folder import RESULT, read_record, readable
from ..training.train import CONFUSION, TRAINING

Block = str | Table | Path  # a paragraph, a table, or a picture
_STYLE = Path(__file__).with_name("style.css")


def write_page(out: Path, heading: str, sections: dict[str, list[Block]]) -> Path:
    """Write the sections, by their headings, into a file, and return its path."""
    head = f"<title>{escape(heading)}</title><style>{_STYLE.read_text('utf-8')}</style>"
    body = "\n".join(
        f"<h2>{escape(name)}</h2>\n" + "\n".join(map(_block, blocks))
        for name, blocks in sections.items()
    )
    made = f'<p class="source">Made by conformallayers {__version__}.</p>'
    page = f"<main><h1>{escape(heading)}</h1>{made}\n{body}</main>"
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    text = f'<!DOCTYPE html>\n<html lang="en"><head>{meta}{head}</head><body>{page}</body></html>\n'
    replace_file(out, [text.encode()])
    return out


def _block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    if isinstance(block, Path):
        if not block.exists():
            return ""
        data = base64.b64encode(block.read_bytes()).decode("ascii")
        return f'<img src="data:image/png;base64,{data}" alt="{escape(block.stem)}">'
    return f'<div class="scroll">{html([block])}</div>'


def _source(record: Row) -> str:
    """Return the command, commit and machine of a record."""
    machine = record.get("machine", {})
    details = [f"{key} {machine[key]}" for key in ("threads", "torch", "python") if key in machine]
    return " · ".join([record["command"], f"commit {record['commit']}", *details])


# -- a training run ---------------------------------------------------------------------------------


def write_run_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of a finished run: ``out``, or ``report.html`` in its folder; return its path."""
    if not (run / RESULT).is_file():
        remedy = "Check the path, or finish the run: conformallayers train with --resume."
        raise refusal(
            "report RUN", "the folder of a finished run", f"{run} without {RESULT}", remedy
        )
    result = read_record(run / RESULT, "report")
    with readable("report", run):
        samples = result["samples"]
        accuracies = [
            [key.removeprefix("accuracy_"), f"{100 * share:.2f} %"]
            for key, share in result.items()
            if key.startswith("accuracy_") and share is not None
        ]
        about = f"{samples['train']} training images, {samples['test']} test images."
        sections: dict[str, list[Block]] = {
            "Accuracy": [about, Table(["measured", "accuracy"], accuracies), _source(result)],
            "Curves": [run / f"{TRAINING}.png"],
        }
        if (run / CONFUSION).is_file():
            with (run / CONFUSION).open(newline="", encoding="utf-8") as stream:
                header, *rows = csv.reader(stream)
            sections["Confusion matrix"] = [Table(header, rows)]
        heading = f"{result['network'].rpartition(':')[2]}, {Path(result['dataset']).name}"
    return write_page(out or run / "report.html", heading, sections)


# -- all results ------------------------------------------------------------------------------------


# Headings: the command that makes a record, its path below the results, and its table.
_SECTIONS: dict[str, tuple[str, str, Callable[[list[Row]], Cells]]] = {
    "Accuracy: Tables I and II": ("experiment 1", "accuracy/accuracy.json", accuracy.cells),
    "Time against depth": ("experiment 3", "experiment3/times.json", speed.depth_cells),
    "Time and memory": ("experiment 4", "experiment4/batches.json", speed.batch_cells),
    "Accuracy against cost": ("experiment 5", "experiment5/cifar10.json", cost.cells),
    "Times in ONNX Runtime": (
        *("experiment 5 --measure", "experiment5/cifar10-times.json", cost.time_cells),
    ),
    "Corrupted images": ("experiment 6", "experiment6/cifar10.json", robustness.cells),
    "Against other engines": ("bench", "benchmarks/bench.json", bench.cells),
}


def write_report(results: Path = Path("results"), out: Path | None = None) -> Path:
    """Write all results beside the paper's numbers, and return the path of the page."""
    if not results.is_dir():
        remedy = "Run an experiment first, or give the folder that it wrote."
        raise refusal("report --results", "a folder with results", f"{results}, no folder", remedy)
    sections = {
        f"{heading}: {row[0]}": _measured(results, *row) for heading, row in _SECTIONS.items()
    }
    with readable("report", results / "sweep"):
        sections["Hyperparameters: the sweep"] = list(_studies(results))
    title = "ConformalLayers: measured beside the paper"
    return write_page(out or results / "report.html", title, sections)


def _measured(
    results: Path, command: str, path: str, cells: Callable[[list[Row]], Cells]
) -> list[Block]:
    """Return claim, figure, table and source of a record; without it the command that measures it."""
    if not (results / path).exists():
        return [f"Not measured yet: conformallayers {command}"]
    record = read_record(results / path, "report")
    claims = [f"The paper: {paper.CLAIMS[command]}"] if command in paper.CLAIMS else []
    with readable("report", results / path):
        figure, table = (results / path).with_suffix(".png"), Table(*cells(record["rows"]))
        return [*claims, figure, table, _source(record)]


def _studies(results: Path) -> Iterator[Block]:
    """Yield the best trial of each study beside the supplement's choice."""
    yield "Accuracy here is that of held-out training images; the supplement's is from Tables I and II."
    paths = sorted(results.glob("sweep/*/study.json"))
    if not paths:
        yield "Not measured yet: conformallayers sweep LeNetCL mnist"
    for path in paths:
        record = read_record(path, "report")
        names, best = (record["network"], record["dataset"]), record["best"]
        choices = [("best here", best, best["validation_accuracy"])] if best else []
        choices += [
            ("the supplement's", cell.setting, cell.accuracy)
            for cell in paper.CELLS
            if (cell.network, cell.dataset) == names
        ]
        lines = [
            [name, *(str(setting.get(key, "")) for key in paper.SETTING), f"{100 * share:.2f} %"]
            for name, setting, share in choices
        ]
        count = record["images"]["train"]
        yield f"{', '.join(names)}: {len(record['trials'])} trials, {count} training images."
        yield Table(["", *paper.SETTING, "accuracy"], lines)
        yield path.with_suffix(".png")
        yield _source(record)

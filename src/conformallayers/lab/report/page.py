"""Write reports as one self-contained HTML page: about a training run, or all results beside the paper's numbers."""

from __future__ import annotations

import base64
import csv
from collections.abc import Callable, Iterator
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ... import __version__
from ...errors import refusal
from ...utils.files import replace_file
from ...utils.html import Table, html
from ..experiments import accuracy, batchsize, bench, cost, depth, paper, robustness
from ..experiments.records import Cells, Row, read_record, read_rows
from ..training.run_folder import CONFIG, METRICS, RESULT
from ..training.train import CONFUSION, MISTAKES, TRAINING

Block = str | Table | Path  # a paragraph, a table, or a picture
_LONG = 20  # lines of a table that is collapsed
_STYLE = Path(__file__).with_name("style.css")
_SETTING = ("batch_size", "epochs", "learning_rate", "optimizer")


def write_page(out: Path, heading: str, sections: dict[str, list[Block]]) -> Path:
    """Write the sections, by their headings, into a file, and return its path."""
    if out.is_dir():
        remedy = "Give a file name such as report.html."
        raise refusal("report --out", "a file", f"the folder {out}", remedy)
    head = f"<title>{escape(heading)}</title><style>{_STYLE.read_text('utf-8')}</style>"
    body = "\n".join(
        f"<h2>{escape(name)}</h2>\n" + "\n".join(map(_block, blocks))
        for name, blocks in sections.items()
    )
    made = f'<p class="source">Made by conformallayers {__version__}.</p>'
    page = f"<main><h1>{escape(heading)}</h1>{made}\n{body}</main>"
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    text = f'<!DOCTYPE html>\n<html lang="en"><head>{meta}{head}</head><body>{page}</body></html>\n'
    out.parent.mkdir(parents=True, exist_ok=True)
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
    table = f'<div class="scroll">{html([block])}</div>'
    if len(block.rows) <= _LONG:
        return table
    return f"<details><summary>{len(block.rows)} rows</summary>{table}</details>"


def _source(record: Row) -> str:
    """Return the command, commit and machine of a record."""
    machine = record.get("machine", {})
    details = [f"{key} {machine[key]}" for key in ("threads", "torch", "python") if key in machine]
    commits = [one[:10] for one in (record.get("commit") or "unknown").split(", ")]
    return " · ".join([record.get("command", "unknown"), f"commit {', '.join(commits)}", *details])


# -- a training run ---------------------------------------------------------------------------------


def write_run_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of a finished run: ``out``, or ``report.html`` in its folder; return its path."""
    if not (run / RESULT).is_file():
        got, remedy = f"{run}, no folder", "Check the path: --out of conformallayers train."
        if run.is_dir():
            got = f"{run} without {RESULT}"
            remedy = "Finish the run: conformallayers train with --resume."
        raise refusal("report RUN", "the folder of a finished run", got, remedy)
    result = read_record(run / RESULT, "report", "network", "dataset", "command", "samples")
    config = read_record(run / CONFIG, "report", "network", "dataset")
    options = [[key, str(value)] for key, value in config.items() if value not in (None, [], False)]
    network, dataset, samples = config["network"], config["dataset"], result["samples"]
    accuracies = [
        [key.removeprefix("accuracy_"), f"{100 * result[key]:.2f} %"]
        for key in ("accuracy_folded", "accuracy_layers", "accuracy_validation", "accuracy_train")
        if result.get(key) is not None
    ]
    about = f"{samples['train']} training images, {samples['test']} test images."
    pictures = [run / f"{name}.png" for name in (TRAINING, CONFUSION, MISTAKES)]
    sections: dict[str, list[Block]] = {
        "Accuracy": [about, Table(["measured", "accuracy"], accuracies), _source(result)],
        "Curves, confusion matrix, surest mistakes": [*pictures],
        "Confusion matrix": [*_csv_table(run / f"{CONFUSION}.csv")],
        "Epochs": [*_csv_table(run / METRICS)],
        "Options": [Table(["option", "value"], options)],
    }
    heading = f"{network.rpartition(':')[2]}, {Path(dataset).name}"
    return write_page(out or run / "report.html", heading, sections)


def _csv_table(path: Path) -> Iterator[Table]:
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as stream:
            header, *rows = csv.reader(stream)
        yield Table(header, rows)


# -- all results ------------------------------------------------------------------------------------


class _Section(NamedTuple):
    """A record below the folder of the results, the command that makes it, its tables and its figure."""

    heading: str
    about: str
    path: str
    command: str
    cells: Callable[[list[Row]], Cells]
    figure: str = ""


_SECTIONS = (
    _Section(
        heading="Accuracy: Tables I and II",
        about="On the test images after the last epoch, with the paper's, and the difference in points.",
        path="accuracy/accuracy.json",
        command="experiment 1, conformallayers experiment 2",
        cells=accuracy.cells,
    ),
    _Section(
        heading="Time against depth: experiment 3",
        about=f"The paper: {paper.DEPTH_CLAIM}",
        path="experiment3/times.json",
        command="experiment 3",
        cells=depth.cells,
        figure="figure.png",
    ),
    _Section(
        heading="Time and memory: experiment 4",
        about=f"The paper: {paper.BATCH_CLAIM}",
        path="experiment4/batches.json",
        command="experiment 4",
        cells=batchsize.cells,
        figure="figure.png",
    ),
    _Section(
        heading="Largest batches: experiment 4",
        about="Within a memory budget.",
        path="experiment4/limits.json",
        command="experiment 4 --memory 4GiB",
        cells=batchsize.limit_cells,
    ),
    _Section(
        heading="Accuracy against cost: experiment 5",
        about="CIFAR-10, one budget for all; times in ONNX Runtime with one thread, over LeNet's.",
        path="experiment5/cifar10.json",
        command="experiment 5",
        cells=cost.cells,
        figure="cifar10.png",
    ),
    _Section(
        heading="Corrupted images: experiment 6",
        about="Accuracy in per cent on corrupted test images of CIFAR-10, mean over the strengths.",
        path="experiment6/cifar10.json",
        command="experiment 6",
        cells=robustness.cells,
        figure="cifar10.png",
    ),
    _Section(
        heading="Against other engines",
        about="Milliseconds per batch; the fastest ReLU counterpart over the fastest fold.",
        path="benchmarks/bench.json",
        command="bench",
        cells=bench.cells,
    ),
)


def write_report(results: Path = Path("results"), out: Path | None = None) -> Path:
    """Write all results beside the paper's numbers, and return the path of the page.

    Args:
        results: the folder of the experiments' results; a section without results names the
            command that measures them.
        out: the file; None means ``report.html`` in that folder.
    """
    if not results.is_dir():
        remedy = "Run an experiment first, or give the folder that it wrote."
        raise refusal("report --results", "a folder with results", f"{results}, no folder", remedy)
    sections = {
        one.heading: _checked(one.heading, partial(_measured, results, one)) for one in _SECTIONS
    }
    sweeps = "Hyperparameters: the sweep"
    sections[sweeps] = _checked(sweeps, lambda: list(_studies(results)))
    title = "ConformalLayers: measured beside the paper"
    return write_page(out or results / "report.html", title, sections)


def _checked(heading: str, lay_out: Callable[[], list[Block]]) -> list[Block]:
    """Lay out a section; refuse records of another form."""
    try:
        return lay_out()
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        expected, got = "records of this version", f"another ({type(error).__name__}: {error})"
        remedy = "Measure it again, or move the file away."
        raise refusal(f"report, {heading}", expected, got, remedy) from error


def _measured(results: Path, section: _Section) -> list[Block]:
    """Return text, figure, table and source of a record; without it the command that measures it."""
    path = results / section.path
    if not path.exists():
        return [section.about, f"Not measured yet: conformallayers {section.command}"]
    record = read_record(path, "report", "rows")
    options: Any = {}
    if section.cells is cost.cells:
        options["times"] = read_rows(path.with_name("cifar10-times.json"), "report")
    blocks: list[Block] = [section.about, Table(*section.cells(record["rows"], **options))]
    if section.figure:
        blocks.insert(1, path.with_name(section.figure))
    return [*blocks, _source(record)]


def _studies(results: Path) -> Iterator[Block]:
    """Yield the best trial of each study beside the supplement's choice."""
    yield "Accuracy here is that of held-out training images; the supplement's is from Tables I and II."
    paths = sorted(results.glob("sweep/*/study.json"))
    if not paths:
        yield "Not measured yet: conformallayers sweep LeNetCL mnist"
    for path in paths:
        record = read_record(path, "report", "network", "dataset", "trials", "best")
        names, best = (record["network"], record["dataset"]), record["best"]
        choices = [("best here", best, best["validation_accuracy"])] if best else []
        choices += [
            ("the supplement's", cell.setting, cell.accuracy)
            for cell in paper.CELLS
            if (cell.network, cell.dataset) == names
        ]
        lines = [
            [name, *(str(setting.get(key, "")) for key in _SETTING), f"{100 * share:.2f} %"]
            for name, setting, share in choices
        ]
        count = record["images"]["train"]
        yield f"{', '.join(names)}: {len(record['trials'])} trials, {count} training images."
        yield Table(["", *_SETTING, "accuracy"], lines)
        yield path.with_name("figure.png")
        yield _source(record)

"""Write all results beside the paper's numbers as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from ...errors import refusal
from ...utils.text import size
from ..experiments import bench, cost, paper, robustness
from ..experiments.records import Row, mean_and_spread, read_record, read_rows
from .page import Block, missing, picture, short_commit, source, table, text, title, write_page

_TITLE = "ConformalLayers: measured beside the paper"
_TABLE_TITLES = {1: "Table I: one convolution", 2: "Table II: LeNet"}
_HYPERPARAMETERS = ("batch_size", "epochs", "learning_rate", "optimizer")
_CELL_KEYS = ("network", "dataset", "accuracy", *_HYPERPARAMETERS, "seed", "seconds", "command")
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
    sections = {heading: _checked(heading, lay_out, results) for heading, lay_out in _SECTIONS}
    return write_page(out or results / "report.html", _TITLE, sections)


def _checked(heading: str, lay_out: Callable[[Path], list[Block]], results: Path) -> list[Block]:
    """Lay out a section; refuse records of another form."""
    try:
        return lay_out(results)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        expected, got = "records of this version", f"another ({type(error).__name__}: {error})"
        raise refusal(f"report, {heading}", expected, got, _REMEDY) from error


def _read(path: Path, *required: str) -> Row:
    """Return a record, empty if there is no such file."""
    return read_record(path, "report", *required, remedy=_REMEDY) if path.exists() else {}


# -- Tables I and II --------------------------------------------------------------------------------


def _accuracy(results: Path) -> list[Block]:
    records = [_read(path, *_CELL_KEYS) for path in sorted((results / "accuracy").glob("*.json"))]
    blocks = [
        text(
            "Accuracy on the test images after the last epoch, with the paper's and the difference in percentage points. "
            "Conformal networks are measured folded. Several seeds give mean ± standard deviation."
        )
    ]
    for number in paper.NETWORKS:
        blocks += [title(_TABLE_TITLES[number]), *_accuracy_table(number, records)]
    header = [*(key.replace("_", " ") for key in _CELL_KEYS), "commit"]
    lines = [
        [*(_number(r[key]) for key in _CELL_KEYS), short_commit(r.get("commit"))] for r in records
    ]
    return [*blocks, table(header, lines, f"Settings, commands and commits of {len(lines)} cells")]


def _accuracy_table(number: int, records: Sequence[Row]) -> list[Block]:
    """Lay out one table of the paper: a line for each network and variant, a column for each set."""
    lines = []
    for network in paper.NETWORKS[number]:
        found = {record.get("variant") or "" for record in records if record["network"] == network}
        for variant in sorted(found | {""}):
            cells = [cell for cell in paper.CELLS if cell.network == network]
            shown = [_accuracy_cell(_matching(records, cell.name, variant), cell) for cell in cells]
            lines.append([network, variant or "paper's", *shown])
    header = ["network", "setting", *paper.TITLES.values()]
    cells = [cell for cell in paper.CELLS if cell.experiment == number]
    if all(_matching(records, cell.name) for cell in cells):
        return [table(header, lines)]
    command = f"conformallayers experiment {number}"
    return [table(header, lines), missing(command, "Cells are missing")]


def _accuracy_cell(records: Sequence[Row], cell: paper.Cell) -> str:
    published = f"paper {100 * cell.accuracy:.2f}"
    if not records:
        return f"– ({published})"
    shares = [record["accuracy"] for record in records]
    note = f"{published}, {100 * (fmean(shares) - cell.accuracy):+.2f}"
    return f"{mean_and_spread(shares)} ({note})"


def _matching(records: Sequence[Row], cell: str, variant: str = "") -> list[Row]:
    """Return the records of a cell, one for each seed."""
    return [
        record
        for record in records
        if f"{record['network']}-{record['dataset']}" == cell
        and (record.get("variant") or "") == variant
    ]


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- the other experiments --------------------------------------------------------------------------


def _measured(
    path: Path, command: str, about: str, figure: str, tables: Callable[[Row], list[Block]]
) -> list[Block]:
    """Lay out one record: text, figure, tables and where it comes from; without it the command that measures it."""
    record = _read(path)
    if not record.get("rows"):
        return [text(about), missing(command)]
    return [text(about), picture(path.parent, figure, about), *tables(record), source(record)]


def _depth(results: Path) -> list[Block]:
    def tables(record: Row) -> list[Block]:
        rows = sorted(record["rows"], key=lambda row: int(row["depth"]))
        names = list(rows[0]["milliseconds"])
        medians = [[row["milliseconds"][name]["median"] for name in names] for row in rows]
        lines = [
            [row["depth"], *(f"{time:.2f}" for time in (*times, times[0] / times[-1]))]
            for row, times in zip(rows, medians, strict=True)
        ]
        faster = sum(times[0] > times[-1] for times in medians)
        header = ["k", *(f"{name}, ms" for name in names), f"{names[0]} / folded"]
        here = text(f"Here the fold is faster at {faster} of {len(rows)} depths.")
        return [here, table(header, lines, "All depths")]

    about = f"The paper: {' '.join(paper.DEPTH_CLAIMS.values())}"
    path = results / "experiment3" / "times.json"
    return _measured(path, "conformallayers experiment 3", about, "figure", tables)


def _batch_size(results: Path) -> list[Block]:
    def tables(record: Row) -> list[Block]:
        lines = [
            [row["path"], row["batch"], row["failed"], ""]
            if "failed" in row
            else [
                *(row["path"], row["batch"], f"{row['milliseconds']['median']:.2f}"),
                size(max(0, row["peak_bytes"])),
            ]
            for row in record["rows"]
        ]
        limits = [
            [row["path"], row["largest_batch"], size(row["budget_bytes"])]
            for row in record.get("limits", [])
        ]
        shown = table(["path", "batch", "ms a batch", "memory"], lines, "All sizes")
        return [table(["path", "largest batch", "budget"], limits), shown]

    about = f"The paper: {' '.join(paper.BATCH_CLAIMS.values())}"
    path, command = results / "experiment4" / "batches.json", "experiment 4 --memory 4GiB"
    return _measured(path, f"conformallayers {command}", about, "figure", tables)


def _cost(results: Path) -> list[Block]:
    folder = results / "experiment5"

    def tables(record: Row) -> list[Block]:
        times = read_rows(folder / "cifar10-times.json", "report")
        parts = [[row for row in record["rows"] if row["ablation"] == one] for one in (False, True)]
        return [table(*cost.cells(rows, times)) for rows in parts if rows]

    about = "CIFAR-10, one budget for all; times in ONNX Runtime with one thread, over LeNet's."
    path = folder / "cifar10.json"
    return _measured(path, "conformallayers experiment 5", about, "cifar10", tables)


def _robustness(results: Path) -> list[Block]:
    about = "Accuracy in per cent on corrupted test images of CIFAR-10, mean over the strengths."
    path = results / "experiment6" / "cifar10.json"
    return _measured(
        path,
        "conformallayers experiment 6",
        about,
        "cifar10",
        lambda record: [table(*robustness.cells(record["rows"]))],
    )


def _bench(results: Path) -> list[Block]:
    about = "Milliseconds per batch. The speed-up divides the fastest ReLU counterpart (eager, compile, onnx, openvino) by the fastest fold."
    path = results / "benchmarks" / "bench.json"
    return _measured(
        path,
        "conformallayers bench",
        about,
        "bench",
        lambda record: [table(*bench.cells(record["rows"]))],
    )


def _sweep(results: Path) -> list[Block]:
    about = "Accuracy here is that of held-out training images; the supplement's is from Tables I and II."
    blocks = [text(about)]
    for path in sorted(results.glob("sweep*/*/study.json")):
        blocks += _study(_read(path, "network", "dataset", "trials"), path.parent)
    return blocks if len(blocks) > 1 else [*blocks, missing("conformallayers sweep LeNetCL mnist")]


def _study(record: Row, folder: Path) -> list[Block]:
    """Set the best trial of a study beside the supplement's choice."""
    network, dataset, best = record["network"], record["dataset"], record["best"]
    choices = [("best here", best, best["validation_accuracy"])] if best else []
    choices += [
        ("the supplement's", cell.setting, cell.accuracy)
        for cell in paper.CELLS
        if (cell.network, cell.dataset) == (network, dataset)
    ]
    lines = [
        [name, *(_number(setting.get(key, "")) for key in _HYPERPARAMETERS), f"{100 * share:.2f} %"]
        for name, setting, share in choices
    ]
    about = f"{len(record['trials'])} trials, {record['images']['train']} training images."
    return [
        title(f"{network}, {paper.TITLES.get(dataset, dataset)}"),
        text(about),
        table(["", *(key.replace("_", " ") for key in _HYPERPARAMETERS), "accuracy"], lines),
        picture(folder, "figure", "The best trials; colour is validation accuracy."),
        source(record),
    ]


_SECTIONS: tuple[tuple[str, Callable[[Path], list[Block]]], ...] = (
    ("Accuracy: Tables I and II", _accuracy),
    ("Time against depth: experiment 3", _depth),
    ("Time and memory: experiment 4", _batch_size),
    ("Accuracy against cost: experiment 5", _cost),
    ("Corrupted images: experiment 6", _robustness),
    ("Hyperparameters: the sweep", _sweep),
    ("Against other engines", _bench),
)

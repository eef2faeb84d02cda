"""Turn the records of experiments into the values that the report's template prints."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from ...utils.text import size
from ..experiments import bench, cost, paper, robustness
from ..experiments.records import mean_and_spread, read_rows

Record = dict[str, Any]
# The values of one section in the template.
Context = dict[str, Any]
# The keys that an accuracy record must have.
CELL_KEYS = (
    *("network", "dataset", "accuracy", "epochs", "batch_size", "learning_rate", "optimizer"),
    *("alpha", "projective", "seed", "seconds", "command"),
)
_TABLE_TITLES = {1: "Table I: one convolution", 2: "Table II: LeNet"}
_HYPERPARAMETERS = ("batch_size", "epochs", "learning_rate", "optimizer")
_STEP_COLUMNS = {
    "ReLU, ms": "relu_ms",
    "Young, ms": "young_ms",
    "ratio": "young_time_ratio",
    "spectral, ms": "spectral_ms",
    "spectral ratio": "spectral_time_ratio",
    "α = 1, ms": "one_ms",
    "α = 1 ratio": "one_time_ratio",
    "ReLU, MiB": "relu_mib",
    "Young, MiB": "young_mib",
}
_MEDIA_TYPES = {"svg": "image/svg+xml", "png": "image/png"}


def accuracy_section(records: Sequence[Record]) -> Context:
    """Lay out Tables I and II, the ablation, and the settings of every record."""
    return {
        "tables": [_accuracy_table(number, records) for number in paper.NETWORKS],
        "ablation": _ablation_lines(records),
        "settings_header": list(_SETTINGS),
        "settings": [[value(record) for value in _SETTINGS.values()] for record in records],
    }


def depth_section(record: Record, folder: Path) -> Context:
    """Compare the times of experiment 3 by depth."""
    rows = record["rows"]
    names = list(rows[0]["milliseconds"])
    relu, folded = names[0], names[-1]
    lines: list[list[object]] = []
    faster = []
    for row in rows:
        times = {name: row["milliseconds"][name]["median"] for name in names}
        ratio = times[relu] / times[folded]
        shown = [f"{time:.2f}" for time in times.values()]
        lines.append([row["depth"], *shown, f"{ratio:.2f}", row["strategy"]])
        if ratio > 1:
            faster.append(row["depth"])
    return {
        "relu": relu,
        "folded": folded,
        "faster": faster,
        "batch": record.get("options", {}).get("batch", 64),
        "header": ["k", *(f"{name}, ms" for name in names), f"{relu} / folded", "strategy"],
        "lines": lines,
        **_source(record, folder),
    }


def batch_section(record: Record, folder: Path) -> Context:
    """List the times, memory and limits of experiment 4."""
    lines, failed = [], []
    for row in record["rows"]:
        if "failed" in row:
            failed.append({key: row[key] for key in ("path", "batch", "failed")})
            continue
        time = row["milliseconds"]["median"]
        each = [f"{time:.2f}", f"{1e3 * time / row['batch']:.1f}", size(max(0, row["peak_bytes"]))]
        lines.append([row["path"], row["batch"], *each])
    limits = [
        [row["path"], row["largest_batch"], size(row["budget_bytes"])]
        for row in record.get("limits", [])
    ]
    return {"lines": lines, "failed": failed, "limits": limits, **_source(record, folder)}


def study_section(record: Record, folder: Path) -> Context:
    """Set the best trial of a study beside the supplement's choice."""
    network, dataset = record["network"], record["dataset"]
    lines: list[list[str]] = []
    if record["best"]:
        accuracy = record["best"]["validation_accuracy"]
        lines.append(_hyperparameter_line("best here", record["best"], accuracy))
    for cell in paper.CELLS:
        if (cell.network, cell.dataset) == (network, dataset):
            lines.append(_hyperparameter_line("the supplement's", cell.setting, cell.accuracy))
    states = [row["state"] for row in record["trials"]]
    return {
        "network": network,
        "dataset": _title(dataset),
        "trials": len(states),
        "states": ", ".join(f"{states.count(s)} {s.lower()}" for s in dict.fromkeys(states)),
        "images": record["images"]["train"],
        "subset": bool(record["options"].get("subset")),
        "lines": lines,
        **_source(record, folder),
    }


def cost_section(record: Record, folder: Path) -> Context:
    """List accuracies and costs of experiment 5, and the ablation."""
    times = read_rows(folder / "cifar10-times.json", "report")
    parts = [[row for row in record["rows"] if row["ablation"] == one] for one in (False, True)]
    tables = [cost.cells(rows, times) if rows else None for rows in parts]
    return {"tables": tables, **_source(record, folder, "cifar10")}


def robustness_section(record: Record, folder: Path) -> Context:
    """List the accuracies of experiment 6 by corruption."""
    return {"table": robustness.cells(record["rows"]), **_source(record, folder, "cifar10")}


def bench_section(record: Record, folder: Path) -> Context:
    """Compare engines."""
    source = _source(record, folder, "bench", "conformallayers bench")
    return {"table": bench.cells(record["rows"]), **source}


def steps_section(record: Record, folder: Path) -> Context:
    """List the time and memory of training steps."""
    lines = [
        [row["network"], row["batch"], *(row.get(key, "") for key in _STEP_COLUMNS.values())]
        for row in record["rows"]
    ]
    return {
        "header": ["network", "batch", *_STEP_COLUMNS],
        "lines": lines,
        **_source(record, folder, command="python benchmarks/train_step.py"),
    }


def short_commit(commit: str | None) -> str:
    """Shorten one or several commits, and mark those with uncommitted changes.

    Examples:
        >>> short_commit("0123456789abcdef-changed, fedcba9876543210")
        '0123456789 (changed), fedcba9876'
    """
    return ", ".join(
        one[:10] + (" (changed)" if one.endswith("-changed") else "")
        for one in (commit or "unknown").split(", ")
    )


def _accuracy_table(number: int, records: Sequence[Record]) -> Context:
    """Lay out one table of the paper: a line for each network and variant, a column for each set."""
    networks = paper.NETWORKS[number]
    lines: list[list[Context]] = []
    for network in networks:
        found = {record.get("variant") or "" for record in records if record["network"] == network}
        for variant in sorted((found | {""}) - set(paper.ABLATION.values())):
            cells = [
                _accuracy_cell(_matching(records, cell.name, variant), cell)
                for cell in paper.CELLS
                if cell.network == network
            ]
            lines.append([{"network": network, "variant": variant}, *cells])
    cells_of_table = [cell.name for cell in paper.CELLS if cell.experiment == number]
    absent = [name for name in cells_of_table if not _matching(records, name)]
    command = f"conformallayers experiment {number}"
    if absent != cells_of_table:
        command += " --cells " + " ".join(absent)
    return {
        "title": _TABLE_TITLES[number],
        "header": ["network", *(_title(dataset) for dataset in paper.DATASETS)],
        "lines": lines,
        "missing": command if absent else None,
    }


def _accuracy_cell(records: Sequence[Record], cell: paper.Cell) -> Context:
    note = f"paper {100 * cell.accuracy:.2f}"
    if not records:
        return {"measured": None, "note": note}
    shares, seeds = [r["accuracy"] for r in records], [r["seed"] for r in records]
    note += f", {100 * (fmean(shares) - cell.accuracy):+.2f}"
    if not all(record.get("checked", True) for record in records):
        note += ", data not checked"
    if seeds != [0]:
        note += f", {len(seeds)} seeds" if len(seeds) > 1 else f", seed {seeds[0]}"
    return {"measured": mean_and_spread(shares), "note": note}


def _ablation_lines(records: Sequence[Record]) -> list[list[str]]:
    """Return form, α, and accuracy without and with gain; empty without measurements."""
    lines: dict[tuple[str, str], list[str]] = {}
    for (form, alpha, _), variant in paper.ABLATION.items():  # without gain, then with it
        found = _matching(records, paper.ABLATION_CELL, variant)
        shown = mean_and_spread([record["accuracy"] for record in found]) if found else "–"
        lines.setdefault((form, alpha), [form, alpha]).append(shown)
    measured = any(line[2:] != ["–", "–"] for line in lines.values())
    return list(lines.values()) if measured else []


def _hyperparameter_line(name: str, setting: Record, accuracy: float) -> list[str]:
    return [name, *(_number(setting[key]) for key in _HYPERPARAMETERS), percent(accuracy)]


def _matching(records: Sequence[Record], cell: str, variant: str = "") -> list[Record]:
    """Return the records of a cell, one for each seed."""
    return [
        record
        for record in records
        if f"{record['network']}-{record['dataset']}" == cell
        and (record.get("variant") or "") == variant
    ]


def _source(
    record: Record, folder: Path, picture: str = "figure", command: str = "unknown"
) -> Context:
    """Return the picture beside a record, and the record's command, commit and machine."""
    machine = record.get("machine", {})
    details = [f"{key} {machine[key]}" for key in ("threads", "torch", "python") if key in machine]
    source = {
        "command": record.get("command") or command,
        "details": [f"commit {short_commit(record.get('commit'))}", *details],
    }
    return {"picture": embedded_picture(folder, picture), "source": source}


def embedded_picture(folder: Path, name: str) -> str | None:
    """Return a picture as a data URI, SVG before PNG; None if there is no such file."""
    for suffix, media_type in _MEDIA_TYPES.items():
        path = folder / f"{name}.{suffix}"
        if path.exists():
            data = base64.b64encode(path.read_bytes()).decode("ascii")
            return f"data:{media_type};base64,{data}"
    return None


def _title(dataset: str) -> str:
    return paper.TITLES.get(dataset, dataset)


def percent(share: float) -> str:
    """Write a share in percent."""
    return f"{100 * share:.2f} %"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# The columns of the settings: each title with the value of a record.
_SETTINGS: dict[str, Callable[[Record], object]] = {
    "network": itemgetter("network"),
    "set": lambda record: _title(record["dataset"]),
    "accuracy": lambda record: percent(record["accuracy"]),
    "epochs": itemgetter("epochs"),
    "batch": itemgetter("batch_size"),
    "rate": lambda record: _number(record["learning_rate"]),
    "optimiser": itemgetter("optimizer"),
    "schedule": lambda record: record.get("schedule", ""),
    "α": lambda record: f"{record['alpha'] or ''}{' projective' * record['projective']}",
    "stride": lambda record: record.get("pool_stride") or "",
    "seed": itemgetter("seed"),
    "seconds": lambda record: f"{record['seconds']:.0f}",
    "commit": lambda record: short_commit(record.get("commit")),
    "command": itemgetter("command"),
}

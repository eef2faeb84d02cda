"""The parts of the report: each takes what was measured, or None, and returns HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ...utils.text import size
from ..experiments import paper
from ..experiments.records import mean_and_spread
from .page import Markup, join, markup, picture, table, tag

Record = dict[str, Any]
# What the row of a cell must have.
CELL = (
    *("network", "dataset", "accuracy", "epochs", "batch_size", "learning_rate", "optimizer"),
    *("alpha", "projective", "seed", "seconds", "command"),
)
_TITLES = {1: "Table I: one convolution", 2: "Table II: LeNet"}


def missing(command: str, what: str = "Not measured yet") -> Markup:
    """Say that a part is missing, and what makes it."""
    return tag("p", f"{what}. To measure: ", tag("code", command), kind="missing")


def source(record: Record, command: str | None = None) -> Markup:
    """Name the command, the commit and the machine of a record."""
    machine = record.get("machine", {})
    words = [f"{key} {machine[key]}" for key in ("threads", "torch", "python") if key in machine]
    shown = record.get("command") or command or "unknown"
    text = f" · commit {short(record.get('commit'))}" + "".join(f" · {word}" for word in words)
    return tag("p", tag("code", shown), text, kind="source")


def accuracies(rows: Sequence[Record]) -> Markup:
    """Return Tables I and II with the measured accuracies beside the paper's."""
    parts: list[object] = [
        tag(
            "p",
            "Accuracy on the test images after the last epoch; below each the paper's figure and the "
            "difference in points. Conformal networks are measured folded. Rows named after a "
            "setting were trained with another one than the paper's. Of several seeds: mean ± "
            "standard deviation.",
        )
    ]
    for number, networks in paper.NETWORKS.items():
        parts += [tag("h3", _TITLES[number]), _accuracy_table(networks, rows)]
        absent = [
            cell.name
            for cell in paper.CELLS
            if cell.experiment == number and not _rows_of(rows, cell.name)
        ]
        if absent:
            every = len(absent) == 3 * len(networks)
            cells = "" if every else " --cells " + " ".join(absent)
            parts.append(
                missing(f"conformallayers experiment {number}{cells}", "Cells are missing")
            )
    parts += _ablation(rows)
    if rows:
        parts.append(_settings(rows))
    return join(parts)


def depths(record: Record | None, folder: Path) -> Markup:
    """Return experiment 3."""
    claims = _claims(paper.DEPTH_CLAIMS)
    if not record or not record.get("rows"):
        return join([claims, missing("conformallayers experiment 3")])
    rows = record["rows"]
    names = list(rows[0]["milliseconds"])
    relu, folded = names[0], names[-1]
    lines: list[list[object]] = []
    faster = []
    for row in rows:
        times = {name: row["milliseconds"][name]["median"] for name in names}
        ratio = times[relu] / times[folded]
        lines.append(
            [row["depth"], *(f"{t:.2f}" for t in times.values()), f"{ratio:.2f}", row["strategy"]]
        )
        faster += [row["depth"]] if ratio > 1 else []
    said = f"{folded.replace(',', '')} is faster than {relu} at {len(faster)} of {len(rows)} depths"
    said += f", first at k = {faster[0]}." if faster else "."
    header = ["k", *(f"{name}, ms" for name in names), f"{relu} / folded", "strategy"]
    batch = record.get("options", {}).get("batch", 64)
    return join(
        [
            claims,
            tag("p", f"Here: {said} Medians for batches of {batch}."),
            _figure(folder, "figure", "Time of a batch against depth; bands are quartiles."),
            source(record),
            _folded_away("All depths", table(header, lines)),
        ]
    )


def batches(record: Record | None, folder: Path) -> Markup:
    """Return experiment 4."""
    claims = _claims(paper.BATCH_CLAIMS)
    if not record or not record.get("rows"):
        return join([claims, missing("conformallayers experiment 4 --memory 4GiB")])
    rows = [row for row in record["rows"] if "failed" not in row]
    failed = [
        tag("p", f"{row['path']}, batch {row['batch']}, could not be run: {row['failed']}")
        for row in record["rows"]
        if "failed" in row
    ]
    lines = [
        [
            row["path"],
            row["batch"],
            f"{row['milliseconds']['median']:.2f}",
            f"{1e3 * row['milliseconds']['median'] / row['batch']:.1f}",
            size(max(0, row["peak_bytes"])),
        ]
        for row in rows
    ]
    header = ["path", "batch", "ms a batch", "µs an image", "memory"]
    parts = [
        claims,
        tag("p", "Memory is what a process of its own grows by, beyond the network and its fold."),
        _figure(folder, "figure", "Time and memory of a batch against its size.", wide=True),
        *failed,
    ]
    limits = [[r["path"], r["largest_batch"], size(r["budget_bytes"])] for r in record["limits"]]
    if limits:
        parts += [tag("h3", "Largest batch within a budget")]
        parts += [table(["path", "images", "budget"], limits)]
    else:
        parts.append(
            missing("conformallayers experiment 4 --memory 4GiB --resume", "No budget yet")
        )
    return join([*parts, source(record), _folded_away("All sizes", table(header, lines))])


def sweeps(studies: Sequence[tuple[Record, Path]]) -> Markup:
    """Return every study with its best trial and the supplement's choice."""
    low, high = paper.LEARNING_RATES
    space = f"batch size {_range(paper.BATCH_SIZES)}, epochs {_range(paper.EPOCHS)}, learning rate "
    space += f"{low:g}–{high:g}, {' or '.join(paper.OPTIMIZERS)}"
    parts: list[object] = [
        tag(
            "p",
            f"The supplement's space: {space}. Accuracy here is that of training images set aside; "
            "the supplement's choice stands with its figure of Tables I and II.",
        )
    ]
    for record, folder in studies:
        cell = next(
            (
                c
                for c in paper.CELLS
                if (c.network, c.dataset) == (record["network"], record["dataset"])
            ),
            None,
        )
        names = ("batch_size", "epochs", "learning_rate", "optimizer")
        lines: list[list[object]] = []
        if record["best"]:
            best = record["best"]
            shown = [_plain(best[name]) for name in names]
            lines.append(["best here", *shown, _percent(best["validation_accuracy"])])
        if cell is not None:
            shown = [_plain(cell.setting[name]) for name in names]
            lines.append(["the supplement's", *shown, _percent(cell.accuracy)])
        states = [row["state"] for row in record["trials"]]
        counts = ", ".join(f"{states.count(s)} {s.lower()}" for s in dict.fromkeys(states))
        subset = record["options"].get("subset")
        trained = f"Trained on {record['images']['train']} images"
        parts += [
            tag("h3", f"{record['network']}, {_title(record['dataset'])}"),
            tag(
                "p", f"{len(states)} trials: {counts}. {trained}{' (a subset)' if subset else ''}."
            ),
            table(["", *(name.replace("_", " ") for name in names), "accuracy"], lines),
            _figure(folder, "figure", "The best trials; colour is validation accuracy.", wide=True),
            source(record),
        ]
    if not studies:
        parts.append(missing("conformallayers sweep LeNetCL mnist"))
    return join(parts)


def benchmarks(record: Record | None, folder: Path) -> Markup:
    """Return the comparison of engines."""
    if not record or not record.get("rows"):
        return missing("conformallayers bench")
    names = list(dict.fromkeys(name for row in record["rows"] for name in row["times"]))
    ours = ("layers", "folded", "tolerance")
    lines: list[list[object]] = []
    for row in record["rows"]:
        times = {name: entry[0] for name, entry in row["times"].items()}
        others = [time for name, time in times.items() if name not in ours]
        shown = [f"{times[name]:.2f}" if name in times else "" for name in names]
        ratio = f"{min(others) / times['folded']:.2f}" if others and "folded" in times else ""
        lines.append([row["network"], row["batch"], *shown, row["strategy"], ratio])
    return join(
        [
            tag(
                "p",
                "Milliseconds of a batch. Eager, compile, onnx and openvino run the ReLU counterpart; "
                "the last column is the fastest of those over the folded network.",
            ),
            table(["network", "batch", *names, "strategy", "times as fast"], lines),
            _figure(folder, "bench", "Time of a batch against depth, engine by engine."),
            source(record, "conformallayers bench"),
        ]
    )


def training_steps(record: Record | None, folder: Path) -> Markup:
    """Return time and memory of training steps."""
    command = "python benchmarks/train_step.py"
    if not record or not record.get("rows"):
        return missing(command)
    columns = {
        "ReLU, ms": "relu_ms",
        "Young, ms": "young_ms",
        "ratio": "young_time_ratio",
        "spectral, ms": "spectral_ms",
        "spectral ratio": "spectral_time_ratio",
        "ReLU, MiB": "relu_mib",
        "Young, MiB": "young_mib",
    }
    lines = [
        [row["network"], row["batch"], *(row.get(key, "") for key in columns.values())]
        for row in record["rows"]
    ]
    about = "One step, forwards and backwards, of conformal networks and their ReLU counterparts."
    parts = [tag("p", about), table(["network", "batch", *columns], lines)]
    return join([*parts, source(record, command)])


def _accuracy_table(networks: Sequence[str], rows: Sequence[Record]) -> Markup:
    lines: list[list[object]] = []
    for network in networks:
        found = {row.get("variant") or "" for row in rows if row["network"] == network}
        shown_below = set(paper.ABLATION.values())
        for variant in sorted((found | {""}) - shown_below):
            name: list[object] = [network]
            if variant:
                name += [Markup("<br>"), tag("small", variant)]
            cells = [
                _accuracy(_rows_of(rows, cell.name, variant), cell)
                for cell in paper.CELLS
                if cell.network == network
            ]
            lines.append([Markup("".join(markup(part) for part in name)), *cells])
    return table(["network", *(_title(dataset) for dataset in paper.DATASETS)], lines)


def _accuracy(rows: Sequence[Record], cell: paper.Cell) -> Markup:
    figure = f"paper {100 * cell.accuracy:.2f}"
    if not rows:
        return Markup(f"–<br>{tag('small', figure)}")
    shares, seeds = [row["accuracy"] for row in rows], [row["seed"] for row in rows]
    figure += f", {100 * (fmean(shares) - cell.accuracy):+.2f}"
    if not all(row.get("checked", True) for row in rows):
        figure += ", data not checked"
    if seeds != [0]:
        figure += f", {len(seeds)} seeds" if len(seeds) > 1 else f", seed {seeds[0]}"
    return Markup(f"{tag('strong', mean_and_spread(shares))}<br>{tag('small', figure)}")


def _ablation(rows: Sequence[Record]) -> list[object]:
    """Return the table of forms, radii and gains."""
    found = {
        parts: [row["accuracy"] for row in _rows_of(rows, paper.ABLATION_CELL, variant)]
        for parts, variant in paper.ABLATION.items()
    }
    if not any(found.values()):
        return [missing("conformallayers experiment ablation", "No ablation yet")]
    shown = {parts: mean_and_spread(shares) if shares else "–" for parts, shares in found.items()}
    lines = [
        [form, alpha, shown[form, alpha, False], shown[form, alpha, True]]
        for form, alpha, gain in shown
        if gain
    ]
    about = "The modern recipe with fewer epochs and other parts of the activation, "
    return [
        tag("h3", "Ablation: " + paper.ABLATION_CELL.replace("-", ", ", 1)),
        tag("p", about + "mean ± standard deviation where there are several seeds."),
        table(["form", "α", "without gain", "with gain"], lines),
    ]


def _rows_of(rows: Sequence[Record], cell: str, variant: str = "") -> list[Record]:
    """Return the rows of a cell, one for each seed."""
    wanted = (cell, variant)
    return [r for r in rows if (f"{r['network']}-{r['dataset']}", r.get("variant") or "") == wanted]


def _settings(rows: Sequence[Record]) -> Markup:
    header = ["network", "set", "accuracy", "epochs", "batch", "rate", "optimiser", "schedule"]
    header += ["α", "stride", "seed", "seconds", "commit", "command"]
    lines = [
        [
            row["network"],
            _title(row["dataset"]),
            _percent(row["accuracy"]),
            row["epochs"],
            row["batch_size"],
            _plain(row["learning_rate"]),
            row["optimizer"],
            row.get("schedule", ""),
            f"{row['alpha'] or ''}{' projective' if row['projective'] else ''}",
            row.get("pool_stride") or "",
            row["seed"],
            f"{row['seconds']:.0f}",
            short(row.get("commit")),
            tag("code", row["command"]),
        ]
        for row in rows
    ]
    return _folded_away(
        f"Settings, commands and commits of {len(rows)} cells", table(header, lines)
    )


def _claims(claims: dict[str, str]) -> Markup:
    return tag("p", "The paper: ", " ".join(claims.values()))


def _folded_away(summary: str, content: Markup) -> Markup:
    return tag("details", tag("summary", summary), content)


def _figure(folder: Path, name: str, caption: str, wide: bool = False) -> Markup:
    for suffix in ("svg", "png"):
        if (path := folder / f"{name}.{suffix}").exists():
            return picture(path, caption, wide)
    return Markup("")


def _title(dataset: str) -> str:
    return paper.TITLES.get(dataset, dataset)


def short(commit: str | None) -> str:
    """Return the first letters of commits, and whether files had changed."""
    return ", ".join(
        one[:10] + (" (changed)" if one.endswith("-changed") else "")
        for one in (commit or "unknown").split(", ")
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _plain(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}–{bounds[1]}"

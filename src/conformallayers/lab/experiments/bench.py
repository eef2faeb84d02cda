"""Time folded networks against their layers, in sessions, and against ReLU networks in other engines."""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConformalError
from ...folding.fold import fold
from ...folding.folded import Folded
from ...session import ENGINES
from ...testing import fold_error
from ...utils.files import replace_file, write_json
from ...utils.quiet import ignored_warnings
from ...utils.text import markdown
from ...utils.timing import interleave
from ...zoo.catalogue import network_files
from ..checks import command_line, make_folder, require_choice, require_positive
from ..report import figures
from ..training.runs import commit
from .engines import (
    AGAINST,
    FOLDED,
    LAYERS,
    TOLERANCE,
    OnnxFile,
    fastest,
    fold_engines,
    open_sessions,
    relu_engines,
    skipped,
)
from .options import BenchOptions
from .records import Row, earlier_record, provenance
from .subjects import FOLD, RELU, Subject, chosen_subjects

_BUDGET = 40.0  # seconds of timing for one network and batch size; slow ones are called less often
_NOTE = """Times are medians in milliseconds (ms) per batch. The speed-up is the time of the fastest other over that
of the fastest fold without a tolerance. Accuracies are those of the recipe of experiment 5 on
CIFAR-10, for files those of their notes.

"""


def measure(subject: Subject, options: BenchOptions, against: OnnxFile | None = None) -> list[Row]:
    """Time one network at several batch sizes; it has random weights unless it comes from a file.

    The times of a row are milliseconds per batch: the median and the quartiles.
    """
    torch.manual_seed(0)
    relu = None if subject.relu is None else subject.relu().eval()
    conformal = None if subject.conformal is None else subject.conformal().eval()
    folded, loose, reasons = _folds(subject, conformal, options.tolerance)
    sessions, unopened = ({}, {}) if folded is None else open_sessions(folded, options.sessions)
    named = {LAYERS: conformal, FOLDED: folded, TOLERANCE: loose}
    modules = {name: module for name, module in named.items() if module is not None}
    rows = []
    for batch in options.batch:
        x = _images(batch, subject, folded or relu)
        engines, notes = ({}, {}) if relu is None else relu_engines(relu, x)
        if against is not None:
            engines[AGAINST] = against.engine(x)
        engines |= fold_engines(modules, sessions, x)
        seconds = interleave(engines, options.executions, budget=_BUDGET)
        error = None
        if conformal is not None and folded is not None:
            error = fold_error(conformal, folded, x[:8])
        rows.append(
            {
                "network": subject.name,
                "batch": batch,
                "strategy": "" if folded is None else folded.strategy,
                "error": error,
                "accuracy": None if subject.accuracy is None else dict(subject.accuracy),
                "times": {key: list(found.milliseconds.values()) for key, found in seconds.items()},
                "notes": notes | reasons | unopened,
                # With --keep a file holds rows of several runs.
                "command": _command([subject.name], options, batch=(batch,), keep=False),
                "commit": commit(),
            }
        )
    return rows


def _folds(
    subject: Subject, conformal: nn.Module | None, tolerance: float | None
) -> tuple[Folded | None, Folded | None, dict[str, str]]:
    """Return the exact fold, the fold with a tolerance, and why there is none."""
    if conformal is None:
        wanted = tolerance is not None and subject.folded is not None
        reason = "skipped: the file of a fold has no layers that could be folded again"
        return subject.folded, None, {TOLERANCE: reason} if wanted else {}
    folded = fold(conformal, subject.shape)
    if tolerance is None:
        return folded, None, {}
    white = math.sqrt(math.prod(subject.shape))  # the norm of a white image
    try:
        return folded, fold(conformal, subject.shape, tolerance=tolerance, max_norm=white), {}
    except ConformalError as error:  # such as of homogeneous maps
        return folded, None, {TOLERANCE: skipped(error)}


def _images(batch: int, subject: Subject, network: nn.Module | None) -> Tensor:
    """Return random images in the dtype of a network."""
    tensors = [] if network is None else [*network.parameters(), *network.buffers()]
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    dtype = network.dtype if isinstance(network, Folded) else next(iter(dtypes), torch.float32)
    x = torch.rand(batch, *subject.shape, generator=torch.Generator().manual_seed(batch))
    return x.to(dtype)


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the lines of the table."""
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    header = ["network", "batch", *(f"{name} (ms)" for name in names)]
    header += ["strategy", "fastest fold", "fastest other", "speed-up", "error", "accuracy"]
    lines = []
    for row in rows:
        medians = {name: times[0] for name, times in row["times"].items()}
        ours, other = fastest(medians)
        line = [row["network"], str(row["batch"])]
        line += [f"{medians[name]:.3f}" if name in medians else "" for name in names]
        line += [row["strategy"], ours or "", other or ""]
        line.append(f"{medians[other] / medians[ours]:.2f}" if ours and other else "")
        line.append("" if row["error"] is None else f"{row['error']:.1e}")
        lines.append([*line, _accuracy(row)])
    return header, lines


def _accuracy(row: Row) -> str:
    """Return the accuracies of the fold and the ReLU network; earlier records have none."""
    if "accuracy" not in row:
        return ""
    known = row["accuracy"]
    if known is None:
        return "not known"
    shares = [f"{100 * known[FOLD]:.2f} %"] if FOLD in known else []
    shares += [f"ReLU {100 * known[RELU]:.2f} %"] if RELU in known else []
    return ", ".join(shares) or "untrained"


def _command(names: Sequence[str], options: BenchOptions, **changed: Any) -> str:
    """Return a command line, without the folders."""
    return command_line(["bench", *names], _shown(options) | changed)


def _shown(options: BenchOptions) -> dict[str, Any]:
    shown = {key: value for key, value in vars(options).items() if key not in ("out", "results")}
    return shown | {"against": None if options.against is None else str(options.against)}


def save(rows: Sequence[Row], names: Sequence[str], options: BenchOptions) -> None:
    """Write bench.json and bench.md."""
    source = {**provenance(_command(names, options)), "options": _shown(options)}
    write_json(options.out / "bench.json", {**source, "rows": rows})
    replace_file(options.out / "bench.md", [f"{_NOTE}{markdown(*cells(rows))}".encode()])


def run_bench(names: Sequence[str] = (), **options: Any) -> list[Row]:
    """Measure networks and write bench.json, bench.md and the figure.

    Args:
        names: of networks, such as ``"LeNet"``, ``"DkNet 9"`` or ``"StageNet-micro"``, and paths of folds, models and
            training runs; all networks if empty.
        **options: fields of :class:`conformallayers.lab.experiments.options.BenchOptions`.
    """
    chosen = BenchOptions(**options)
    shipped = network_files()
    if chosen.out == BenchOptions.out and any(n in shipped or os.path.exists(n) for n in names):
        chosen = replace(chosen, out=Path("bench"))  # not among the results of the networks
    require_positive("bench", chosen, "batch", "depths", "executions", "threads")
    for engine in chosen.sessions:
        require_choice("bench --sessions", engine, ENGINES, "Name engines of cl.Session.")
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    subjects = chosen_subjects(names, chosen.depths, chosen.results, chosen.input_shape)
    against = None if chosen.against is None else OnnxFile.open(chosen.against)
    for subject in subjects:
        if against is not None:
            against.check(subject.name, subject.shape, chosen.batch)
    logging.getLogger("torch").setLevel(logging.ERROR)
    make_folder("bench --out", chosen.out)
    before = earlier_record(chosen.out / "bench.json", {}, chosen.keep, "bench --keep")
    rows: list[Row] = before.get("rows", [])
    with ignored_warnings():  # exporters warn of their own deprecations
        for subject in subjects:
            found = measure(subject, chosen, against)
            print(markdown(*cells(found)), flush=True)
            again = [_order(row) for row in found]
            rows = [row for row in rows if _order(row) not in again] + found
            rows.sort(key=_order)
            save(rows, names, chosen)  # after every network, so that a stop loses only one
    speedup_figure(rows, chosen.out)
    return rows


def _order(row: Row) -> tuple[str, bool, int, int]:
    """Return the sort key of a row: network, padding mode, depth, batch size."""
    deep = re.fullmatch(r"(DkNet) (\d+)( circular)?", row["network"])
    if deep is None:
        return row["network"], False, 0, row["batch"]
    return deep[1], deep[3] is not None, int(deep[2]), row["batch"]


_ENGINES = {  # as figures name them
    "eager": "PyTorch, ReLU",
    "compile": "torch.compile, ReLU",
    "onnx": "ONNX Runtime, ReLU",
    "openvino": "OpenVINO, ReLU",
    LAYERS: "layer by layer",
    TOLERANCE: "folded, with a tolerance",
}


def speedup_figure(rows: list[Row], folder: Path) -> None:
    """Plot the time per batch against depth, one line per engine.

    The batch size is the one with the most depths; there is no figure of a single depth.
    """
    deep = [row for row in rows if _order(row)[:2] == ("DkNet", False)]
    counts = Counter(row["batch"] for row in deep)
    batch, depth_count = counts.most_common(1)[0] if counts else (0, 0)
    if depth_count < 2:
        return
    chosen = {_order(row)[2]: row["times"] for row in deep if row["batch"] == batch}
    engines = dict.fromkeys(name for times in chosen.values() for name in times)
    styles = {}
    for name, colour in zip(engines, cycle(figures.COLOURS), strict=False):
        line = {"linewidth": 2.5} if name in (FOLDED, TOLERANCE) else {"linestyle": "--"}
        shown = {"marker": "o", "color": colour, "label": _ENGINES.get(name, name)}
        styles[name] = {"linewidth": 1, **shown, **line}
    figures.save(figures.depth_figure(chosen, batch, styles), folder, "bench")

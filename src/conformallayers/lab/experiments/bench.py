"""Time folded networks against their layers, in ONNX Runtime, and against ReLU networks in other engines."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import networks
from ...errors import ConformalError, cause_line, ignored_warnings
from ...folding.fold import fold
from ...folding.folded import Folded
from ...networks.stages import PRESETS
from ...session import Session
from ...testing import fold_error
from ...zoo.catalogue import network_files
from ..checks import require_choice, require_positive, torch_settings
from ..measure import interleave
from ..options import BenchOptions
from ..training.saved_models import load_model
from .engines import deployed_relu, relu_engines, run_module
from .records import Cells, Records, Row

LAYERS, FOLDED, SESSION = "layers", "folded", "session-onnxruntime"
_BUDGET = 40.0  # seconds of timing for one network and batch size; slow ones are called less often


class Subject(NamedTuple):
    """A network to measure: builders of the conformal network and its ReLU counterpart, or the fold of a file."""

    conformal: Callable[[], nn.Module] | None = None
    relu: Callable[[], nn.Module] | None = None
    folded: Folded | None = None


def run_bench(
    names: Sequence[str] = (), *, say: Callable[[str], object] = print, **options: Any
) -> Row:
    """Measure networks and write bench.json and bench.md.

    Args:
        names: of networks, such as ``"LeNet"``, ``"DkNet 9"`` or ``"StageNet-micro"``, of the zoo, and paths of folds
            and training runs; all networks if empty.
        say: receives a line for each row.
        **options: fields of :class:`conformallayers.lab.options.BenchOptions`.
    """
    chosen = BenchOptions(**options)
    require_positive("bench", chosen, "batch", "depths", "executions", "threads")
    subjects = chosen_subjects(names, chosen.depths)
    command = shlex.join(["bench", *names])
    records = Records(command, chosen, "bench", ("network", "batch"), cells=cells, say=say)
    logging.getLogger("torch").setLevel(logging.ERROR)
    # Exporters warn of their own deprecations.
    with ignored_warnings(), torch_settings(chosen.threads), records:
        for name, subject in subjects.items():
            for row in measure(name, subject, chosen):
                records.add(row)
    return records.record


def chosen_subjects(names: Sequence[str], depths: Sequence[int]) -> dict[str, Subject]:
    """Return networks, files and networks of the zoo by their names; all networks if there are none."""
    known = {
        "Base": Subject(networks.BaseReSProNet, networks.BaseReLUNet),
        "LeNet": Subject(networks.LeNetCL, networks.LeNet),
        "D3ModNet": Subject(networks.D3ModNetCL, networks.D3ModNet),
    }
    for k in depths:
        known[f"DkNet {k}"] = Subject(partial(networks.DkNetCL, k), partial(networks.DkNet, k))
    for preset in PRESETS:
        stage, twin = networks.StageNet, networks.StageReLUNet
        known[f"StageNet-{preset}"] = Subject(partial(stage, preset), partial(twin, preset))
    known["ResNet8"] = Subject(relu=networks.ResNet8)
    choices = (*known, *sorted(network_files()))
    for name in names:
        if name not in known and not Path(name).exists():
            require_choice("bench", name, choices, "Name a network; --depths adds depths of DkNet.")
    return {
        name: known.get(name) or Subject(folded=load_model(name, "bench").fold("bench"))
        for name in names or known
    }


def measure(name: str, subject: Subject, options: BenchOptions) -> list[Row]:
    """Time one network at several batch sizes; it has random weights unless it comes from a file."""
    torch.manual_seed(0)
    relu = None if subject.relu is None else deployed_relu(subject.relu().eval())
    conformal = None if subject.conformal is None else subject.conformal().eval()
    folded = subject.folded
    if conformal is not None:
        folded = fold(conformal, networks.IMAGE_SHAPE)
    rows = []
    for batch in options.batch:
        shape = networks.IMAGE_SHAPE if folded is None else folded.input_shape
        x = torch.rand(batch, *shape, generator=torch.Generator().manual_seed(batch))
        x = x if folded is None else x.to(folded.dtype)
        engines, notes = ({}, {}) if relu is None else relu_engines(relu, x)
        for key, module in ((LAYERS, conformal), (FOLDED, folded)):
            if module is not None:
                engines[key] = partial(run_module, module, x)
        if folded is not None:
            try:
                # Arrays, as ONNX Runtime gets for the plain network.
                engines[SESSION] = partial(Session(folded, engine="onnxruntime"), x.numpy())
            except ConformalError as refused:
                notes[SESSION] = f"skipped: {cause_line(refused)}"
        times = interleave(engines, options.executions, budget=_BUDGET)
        error = None
        if conformal is not None and folded is not None:
            error = fold_error(conformal, folded, x[:8])
        rows.append(
            {
                "network": name,
                "batch": batch,
                "strategy": "" if folded is None else folded.strategy,
                "error": error,
                "times": {key: found.milliseconds for key, found in times.items()},
                "notes": notes,
            }
        )
    return rows


def fastest(times: Mapping[str, float]) -> tuple[str | None, str | None]:
    """Return the fastest engine of the fold, and of the ReLU network; None if there is none.

    Examples:
        >>> fastest({"eager": 2.0, "onnx": 1.0, "folded": 0.5, "session-onnxruntime": 0.4})
        ('session-onnxruntime', 'onnx')
    """
    order = sorted(times, key=lambda name: times[name])
    folds = [name for name in order if name in (FOLDED, SESSION)]
    others = [name for name in order if name not in (FOLDED, SESSION, LAYERS)]
    return next(iter(folds), None), next(iter(others), None)


def cells(rows: Sequence[Row]) -> Cells:
    """Return a table of medians; the speed-up divides the fastest other engine by the fastest fold."""
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    header = ["network", "batch", *(f"{name} (ms)" for name in names)]
    header += ["strategy", "fastest fold", "fastest other", "speed-up", "error"]
    lines = []
    for row in rows:
        medians = {name: times["median"] for name, times in row["times"].items()}
        ours, other = fastest(medians)
        line = [row["network"], str(row["batch"])]
        line += [f"{medians[name]:.3f}" if name in medians else "" for name in names]
        line += [row["strategy"], ours or "", other or ""]
        line.append(f"{medians[other] / medians[ours]:.2f}" if ours and other else "")
        lines.append([*line, "" if row["error"] is None else f"{row['error']:.1e}"])
    return header, lines

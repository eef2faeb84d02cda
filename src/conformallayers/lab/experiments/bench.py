"""Time folded networks against their layers, in sessions, and against ReLU networks in other engines."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import networks
from ...errors import ConformalError
from ...folding.fold import fold
from ...folding.folded import Folded
from ...networks.stages import PRESETS
from ...session import ENGINES, Session
from ...testing import fold_error
from ...utils.files import replace_file
from ...utils.quiet import ignored_warnings
from ...utils.text import markdown
from ...utils.timing import interleave
from ...zoo.catalogue import network_files
from ..checks import require_choice, require_positive
from ..settings import torch_settings
from ..training.saved_models import load_model
from .deployed import merged
from .engines import Engine, relu_engines, run_module, skipped
from .options import BenchOptions
from .records import Measurements, Row

NAME = "bench"
LAYERS, FOLDED, SESSION = "layers", "folded", "session-"  # the engine of a session follows
_BUDGET = 40.0  # seconds of timing for one network and batch size; slow ones are called less often
_NOTE = "Median times in milliseconds (ms) per batch. The speed-up is the time of the fastest other over that of the fastest fold.\n\n"
Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Subject:
    """A network to measure: builders of the conformal network and its ReLU counterpart, or the fold of a file."""

    conformal: Build | None = None
    relu: Build | None = None
    folded: Folded | None = None


def run_bench(
    names: Sequence[str] = (), *, say: Callable[[str], object] = print, **options: Any
) -> Row:
    """Measure networks and write bench.json and bench.md.

    Args:
        names: of networks, such as ``"LeNet"``, ``"DkNet 9"`` or ``"StageNet-micro"``, of the zoo, and paths of folds
            and training runs; all networks if empty.
        say: receives the table of each row.
        **options: fields of :class:`conformallayers.lab.experiments.options.BenchOptions`.
    """
    chosen = BenchOptions(**options)
    require_positive("bench", chosen, "batch", "depths", "executions", "threads")
    for engine in chosen.sessions:
        require_choice("bench --sessions", engine, ENGINES, "Name engines of cl.Session.")
    subjects = chosen_subjects(names, chosen.depths)
    measurements = Measurements(
        shlex.join(["bench", *names]),
        chosen,
        settings=(),
        name=NAME,
        key=("network", "batch"),
        say=say,
    )

    def summarise(rows: list[Row]) -> None:
        replace_file(chosen.out / "bench.md", [f"{_NOTE}{markdown(*cells(rows))}".encode()])

    logging.getLogger("torch").setLevel(logging.ERROR)
    # Exporters warn of their own deprecations.
    with ignored_warnings(), torch_settings(chosen.threads), measurements.drawing(summarise):
        for name, subject in subjects.items():
            for row in measure(name, subject, chosen):
                measurements.add(row)
    return measurements.record


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
        twin = partial(lambda preset: merged(networks.StageReLUNet(preset)), preset)
        known[f"StageNet-{preset}"] = Subject(partial(networks.StageNet, preset), twin)
    known["ResNet8"] = Subject(relu=lambda: merged(networks.ResNet8()))
    choices = (*known, *sorted(network_files()))
    found = {}
    for name in names or known:
        if name not in known and not Path(name).exists():
            require_choice("bench", name, choices, "Name a network; --depths adds depths of DkNet.")
        found[name] = known.get(name) or Subject(folded=load_model(name, "bench").fold("bench"))
    return found


def measure(name: str, subject: Subject, options: BenchOptions) -> list[Row]:
    """Time one network at several batch sizes; it has random weights unless it comes from a file."""
    torch.manual_seed(0)
    relu = None if subject.relu is None else subject.relu().eval()
    conformal = None if subject.conformal is None else subject.conformal().eval()
    folded = subject.folded
    if conformal is not None:
        folded = fold(conformal, networks.IMAGE_SHAPE)
    sessions, unopened = {}, {}
    for engine in options.sessions:
        if folded is None:
            break
        try:
            sessions[SESSION + engine] = Session(folded, engine=engine)
        except ConformalError as refused:
            unopened[SESSION + engine] = skipped(refused)
    rows = []
    for batch in options.batch:
        shape = networks.IMAGE_SHAPE if folded is None else folded.input_shape
        x = torch.rand(batch, *shape, generator=torch.Generator().manual_seed(batch))
        x = x if folded is None else x.to(folded.dtype)
        engines, notes = ({}, {}) if relu is None else relu_engines(relu, x)
        engines |= _fold_engines({LAYERS: conformal, FOLDED: folded}, sessions, x)
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
                "times": {key: list(found.milliseconds.values()) for key, found in times.items()},
                "notes": notes | unopened,
            }
        )
    return rows


def _fold_engines(
    modules: Mapping[str, nn.Module | None], sessions: Mapping[str, Session], x: torch.Tensor
) -> dict[str, Engine]:
    engines: dict[str, Engine] = {
        key: partial(run_module, one, x) for key, one in modules.items() if one is not None
    }
    # Arrays, as ONNX Runtime gets for the plain network.
    return engines | {key: partial(session, x.numpy()) for key, session in sessions.items()}


def fastest(times: Mapping[str, float]) -> tuple[str | None, str | None]:
    """Return the fastest engine of the fold, and of the ReLU network; None if there is none.

    Examples:
        >>> fastest({"eager": 2.0, "onnx": 1.0, "folded": 0.5, "session-onnxruntime": 0.4})
        ('session-onnxruntime', 'onnx')
    """
    order = sorted(times, key=lambda name: times[name])
    folds = [name for name in order if name == FOLDED or name.startswith(SESSION)]
    others = [name for name in order if name not in (*folds, LAYERS)]
    return next(iter(folds), None), next(iter(others), None)


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the lines of the table."""
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    header = ["network", "batch", *(f"{name} (ms)" for name in names)]
    header += ["strategy", "fastest fold", "fastest other", "speed-up", "error"]
    lines = []
    for row in rows:
        medians = {name: times[0] for name, times in row["times"].items()}
        ours, other = fastest(medians)
        line = [row["network"], str(row["batch"])]
        line += [f"{medians[name]:.3f}" if name in medians else "" for name in names]
        line += [row["strategy"], ours or "", other or ""]
        line.append(f"{medians[other] / medians[ours]:.2f}" if ours and other else "")
        lines.append([*line, "" if row["error"] is None else f"{row['error']:.1e}"])
    return header, lines

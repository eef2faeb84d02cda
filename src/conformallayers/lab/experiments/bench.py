"""Time folded networks against their layers, in ONNX Runtime, and against ReLU networks in other engines."""

from __future__ import annotations

import logging
import shlex
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ... import networks
from ...container import layer_by_layer
from ...errors import ConformalError, cause_line, ignored_warnings
from ...folding.fold import fold
from ...folding.folded import Folded
from ...networks import IMAGE_SHAPE
from ...networks.stages import PRESETS
from ...recipe.onnx.export import inference_session
from ...session import Session
from ...testing import fold_error
from ...zoo.catalogue import network_files
from ..checks import require_choice, torch_settings
from ..measure import interleave
from ..options import BenchOptions
from ..training.saved_models import load_model
from .records import Cells, Records, Row

Engine = Callable[[], object]
LAYERS, FOLDED, SESSION = "layers", "folded", "session-onnxruntime"
_DEPTHS = (1, 3, 9, 13, 30)  # of DkNet
_BUDGET = 40.0  # seconds of timing for one network and batch size; slow ones are called less often


class Subject(NamedTuple):
    """A network to measure: builders of the conformal network and its ReLU counterpart, or the fold of a file."""

    conformal: Callable[[], nn.Module] | None = None
    relu: Callable[[], nn.Module] | None = None
    folded: Folded | None = None


def run_bench(names: Sequence[str], options: BenchOptions) -> Row:
    """Measure networks by their names, all if there are none, and return the record."""
    subjects = chosen_subjects(names)
    command = shlex.join(["bench", *names])
    records = Records(command, options, "bench", ("network", "batch"), cells)
    logging.getLogger("torch").setLevel(logging.ERROR)
    # Exporters warn of their own deprecations.
    with ignored_warnings(), torch_settings(options.threads), records:
        for name, subject in subjects.items():
            for row in measure(name, subject, options):
                records.add(row)
    return records.record


def chosen_subjects(names: Sequence[str]) -> dict[str, Subject]:
    """Return networks, files and networks of the zoo by their names; all networks if there are none."""
    known = {
        "Base": Subject(networks.BaseReSProNet, networks.BaseReLUNet),
        "LeNet": Subject(networks.LeNetCL, networks.LeNet),
        "D3ModNet": Subject(networks.D3ModNetCL, networks.D3ModNet),
        "ResNet8": Subject(relu=networks.ResNet8),
    }
    for k in _DEPTHS:
        known[f"DkNet {k}"] = Subject(partial(networks.DkNetCL, k), partial(networks.DkNet, k))
    for preset in PRESETS:
        stage, twin = networks.StageNet, networks.StageReLUNet
        known[f"StageNet-{preset}"] = Subject(partial(stage, preset), partial(twin, preset))
    choices = (*known, *sorted(network_files()))
    for name in names:
        if name not in known and not Path(name).exists():
            require_choice("bench", name, choices, "Name a network.")
    return {
        name: known.get(name) or Subject(folded=load_model(name, "bench").fold("bench"))
        for name in names or known
    }


def measure(name: str, subject: Subject, options: BenchOptions) -> list[Row]:
    """Time one network at several batch sizes; it has random weights unless it comes from a file."""
    torch.manual_seed(0)
    relu = None if subject.relu is None else subject.relu().eval()
    if relu is not None and any(isinstance(part, nn.BatchNorm2d) for part in relu.modules()):
        relu = fold(relu, IMAGE_SHAPE)  # as it is deployed
    conformal = None if subject.conformal is None else subject.conformal().eval()
    folded = subject.folded if conformal is None else fold(conformal, IMAGE_SHAPE)
    rows = []
    for batch in options.batch:
        shape = IMAGE_SHAPE if folded is None else folded.input_shape
        x = torch.rand(batch, *shape, generator=torch.Generator().manual_seed(batch))
        engines, notes = ({}, {}) if relu is None else relu_engines(relu, x)
        error = None
        if conformal is not None and folded is not None:
            engines[LAYERS] = partial(run_module, conformal, x)
            error = fold_error(conformal, folded, x[:8])
        if folded is not None:
            x = x.to(folded.dtype)
            engines[FOLDED] = partial(run_module, folded, x)
            try:
                engines[SESSION] = partial(Session(folded, engine="onnxruntime"), x.numpy())
            except ConformalError as refused:
                notes[SESSION] = f"skipped: {cause_line(refused)}"
        rows.append(
            {
                "network": name,
                "batch": batch,
                "strategy": "" if folded is None else folded.strategy,
                "error": error,
                "times": interleave(engines, options.executions, budget=_BUDGET),
                "notes": notes,
            }
        )
    return rows


def cells(rows: Sequence[Row]) -> Cells:
    """Return a table of medians; the speed-up divides the fastest other engine by the fastest fold."""
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    header = ["network", "batch", *(f"{name} (ms)" for name in names)]
    header += ["strategy", "fastest fold", "fastest other", "speed-up", "error"]
    lines = []
    for row in rows:
        medians = {name: times["median"] for name, times in row["times"].items()}
        fastest = sorted(medians, key=medians.__getitem__)
        ours = next((name for name in fastest if name in (FOLDED, SESSION)), "")
        other = next((name for name in fastest if name not in (FOLDED, SESSION, LAYERS)), "")
        line = [row["network"], str(row["batch"])]
        line += [f"{medians[name]:.3f}" if name in medians else "" for name in names]
        line += [row["strategy"], ours, other]
        line.append(f"{medians[other] / medians[ours]:.2f}" if ours and other else "")
        lines.append([*line, "" if row["error"] is None else f"{row['error']:.1e}"])
    return header, lines


# -- engines: functions without arguments that run one batch; and the costs of a fold ---------------


def run_module(model: nn.Module, x: Tensor) -> Tensor:
    """Run a model for a timing; a ConformalLayers that is not folded runs layer by layer."""
    with torch.inference_mode(), layer_by_layer():
        y: Tensor = model(x)
    return y


def multiply_adds(folded: Folded) -> int:
    """Return the multiply-adds of one image, half the operations that torch's FlopCounterMode counts."""
    x = torch.zeros(1, *folded.input_shape, dtype=folded.dtype)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        folded(x)
    return int(counter.get_total_flops()) // 2


def weights(folded: Folded) -> int:
    """Return the number of stored constants."""
    return sum(array.numel() for array in folded.recipe.constants.values())


def relu_engines(model: nn.Module, x: Tensor) -> tuple[dict[str, Engine], dict[str, str]]:
    """Return the engines of a plain network that are installed and agree, and why others are skipped."""
    engines: dict[str, Engine] = {}
    notes: dict[str, str] = {}
    expected = run_module(model, x)
    for name, build in BUILDERS.items():
        try:
            run = build(model, x)
            torch.testing.assert_close(torch.as_tensor(run()), expected, rtol=1e-3, atol=1e-4)
            engines[name] = run
        except Exception as error:  # one broken engine must not stop the comparison
            notes[name] = f"skipped: {cause_line(error)}"
    return engines, notes


def _compiled(model: nn.Module, x: Tensor) -> Engine:
    torch._dynamo.reset()  # or else many networks exceed the limit of recompilations
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=False)
    return partial(run_module, compiled, x)


def _onnxruntime(model: nn.Module, x: Tensor) -> Engine:
    import onnxruntime

    # The other exporter, which torch prefers and warns for, needs onnxscript.
    with ignored_warnings(), tempfile.TemporaryDirectory(prefix="conformallayers-") as folder:
        path = f"{folder}/relu.onnx"
        torch.onnx.export(model, (x,), path, dynamo=False)
        session = inference_session(onnxruntime, path)
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)[0]


def _openvino(model: nn.Module, x: Tensor) -> Engine:
    import openvino

    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",  # the default may be bfloat16
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    converted = openvino.convert_model(model, example_input=x, input=[tuple(x.shape)])
    request = openvino.Core().compile_model(converted, "CPU", settings).create_infer_request()
    return lambda: request.infer([x.numpy()])[0]


BUILDERS: dict[str, Callable[[nn.Module, Tensor], Engine]] = {
    "eager": lambda model, x: partial(run_module, model, x),
    "compile": _compiled,
    "onnx": _onnxruntime,
    "openvino": _openvino,
}

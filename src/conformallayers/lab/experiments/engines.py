"""Engines of the benchmark: a plain network in torch and other runtimes, a fold in sessions, and an ONNX file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConformalError, cause_line, missing_extra, refusal
from ...folding.folded import Folded
from ...nn.container import layer_by_layer
from ...recipe.onnx.export import inference_session
from ...session import Session
from ...utils.quiet import ignored_warnings

LAYERS, FOLDED = "layers", "folded"  # the engines of a model and of its fold in torch
TOLERANCE = "tolerance"  # the engine of a fold with a tolerance
AGAINST = "against"  # the engine of an ONNX file
SESSION = "session-"  # followed by the engine of a session
SESSIONS = ("onnxruntime",)  # unless others are named
_ONNX_DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(double)": torch.float64,
    "tensor(float16)": torch.float16,
}
# A function without arguments that runs one batch.
Engine = Callable[[], object]


def fastest(times: Mapping[str, float]) -> tuple[str | None, str | None]:
    """Return the fastest engine of the exact fold, and of the ReLU network or the ONNX file; None if there is none.

    Examples:
        >>> fastest({"eager": 2.0, "onnx": 1.0, "folded": 0.5, "session-numpy": 0.4, "tolerance": 0.3})
        ('session-numpy', 'onnx')
    """
    order = sorted(times, key=lambda name: times[name])
    folds = [name for name in order if name == FOLDED or name.startswith(SESSION)]
    others = [name for name in order if name not in (*folds, LAYERS, TOLERANCE)]
    return next(iter(folds), None), next(iter(others), None)


def skipped(error: Exception) -> str:
    """Return the note of an engine that does not run."""
    return f"skipped: {cause_line(error)}"


# -- a plain network --------------------------------------------------------------------------------


def relu_engines(
    model: nn.Module, x: Tensor, names: Sequence[str] = ("eager", "compile", "onnx", "openvino")
) -> tuple[dict[str, Engine], dict[str, str]]:
    """Return the engines that are installed and agree, and the reasons why others are skipped.

    All use the same number of threads.
    """
    builders: dict[str, Callable[[nn.Module, Tensor], Engine]] = {
        "eager": lambda net, x: torch.inference_mode()(lambda: net(x).clone()),
        "compile": _compiled,
        "onnx": _onnxruntime,
        "openvino": _openvino,
    }
    engines: dict[str, Engine] = {}
    notes: dict[str, str] = {}
    with torch.no_grad():
        expected = model(x)
        for name in names:
            try:
                run = builders[name](model, x)
                actual = torch.as_tensor(run())
            except Exception as error:  # one broken engine must not stop the comparison
                notes[name] = skipped(error)
                continue
            if not torch.allclose(actual, expected, rtol=1e-3, atol=1e-4):
                notes[name] = "skipped: its output differs"
                continue
            engines[name] = run
    return engines, notes


def _compiled(model: nn.Module, x: Tensor) -> Engine:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    run: Engine = torch.no_grad()(lambda: compiled(x))
    run()
    return run


def _onnxruntime(model: nn.Module, x: Tensor) -> Engine:
    # The other exporter, which torch prefers and warns for, needs onnxscript.
    with ignored_warnings(), tempfile.TemporaryDirectory(prefix="conformallayers-") as folder:
        path = f"{folder}/relu.onnx"
        torch.onnx.export(model, (x,), path, dynamo=False)
        return _fed(_opened(path, "bench"), x)


def _openvino(model: nn.Module, x: Tensor) -> Engine:
    import openvino

    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",  # the default may be bfloat16
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(
        openvino.convert_model(model, example_input=x, input=[tuple(x.shape)]), "CPU", settings
    )
    request = compiled.create_infer_request()
    array = x.numpy()
    return lambda: request.infer([array])[0]


# -- a fold -----------------------------------------------------------------------------------------


def open_sessions(
    folded: Folded, names: Sequence[str]
) -> tuple[dict[str, Session], dict[str, str]]:
    """Return sessions of a fold that are installed and agree with torch, and why others are skipped."""
    sessions: dict[str, Session] = {}
    notes: dict[str, str] = {}
    for name in names or SESSIONS:
        try:
            sessions[SESSION + name] = Session(folded, engine=name)
        except ConformalError as error:
            notes[SESSION + name] = skipped(error)
    return sessions, notes


def run_module(model: nn.Module, x: Tensor) -> Tensor:
    """Run a model for a timing; a ConformalLayers that is not folded runs layer by layer."""
    with torch.inference_mode(), layer_by_layer():
        y: Tensor = model(x)
    return y


def fold_engines(
    modules: Mapping[str, nn.Module], sessions: Mapping[str, Session], x: Tensor
) -> dict[str, Engine]:
    """Return the engines of a conformal network: modules in torch, layer by layer unless folded, and sessions."""
    engines: dict[str, Engine] = {key: partial(run_module, one, x) for key, one in modules.items()}
    # Arrays, as ONNX Runtime gets for the plain network.
    return engines | {key: partial(session, x.numpy()) for key, session in sessions.items()}


# -- an ONNX file -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX model of one input in ONNX Runtime, with as many threads as torch has."""

    where: str
    session: Any

    @classmethod
    def open(cls, path: Path) -> OnnxFile:
        """Open a file, or say what is wrong with it."""
        where, remedy = f"bench --against {path}", "Write one with torch.onnx.export."
        if not path.is_file():
            raise refusal(where, "an ONNX file", "no such file", "Check the path.")
        session = _opened(str(path), where)
        inputs = session.get_inputs()
        if len(inputs) != 1:
            raise refusal(where, "a model of one input", f"one of {len(inputs)}", remedy)
        if inputs[0].type not in _ONNX_DTYPES:
            expected = f"an input of {', '.join(_ONNX_DTYPES)}"
            raise refusal(where, expected, inputs[0].type, remedy)
        return cls(where, session)

    def check(self, name: str, shape: Sequence[int], batches: Iterable[int]) -> None:
        """Refuse a network of another input shape, and batches that the file does not take."""
        sizes = [s if isinstance(s, int) else None for s in self.session.get_inputs()[0].shape]
        fits = len(sizes) == 1 + len(shape) and all(
            size in (None, wanted) for size, wanted in zip(sizes[1:], shape, strict=True)
        )
        if not fits:
            got = f"({', '.join('any' if size is None else str(size) for size in sizes)})"
            expected = f"an input (batch, {', '.join(map(str, shape))}) as {name} has"
            raise refusal(self.where, expected, got, "Name a network of the same input.")
        for batch in batches:
            if sizes[0] not in (None, batch):
                remedy = f"Give --batch {sizes[0]}, or export it for batches of any size."
                got = f"one of {sizes[0]}"
                raise refusal(self.where, f"a model of batches of {batch}", got, remedy)

    def engine(self, x: Tensor) -> Engine:
        """Return a function that runs a batch, after one trial."""
        run = _fed(self.session, x)
        try:
            run()
        except Exception as error:
            expected, remedy = f"a model that runs batches of {len(x)}", "Export it for any batch."
            raise refusal(self.where, expected, cause_line(error), remedy) from error
        return run


def _opened(path: str, where: str) -> Any:
    """Open a model in ONNX Runtime on the CPU."""
    try:
        import onnxruntime
    except ImportError as error:
        raise missing_extra("onnxruntime", "onnx", where) from error
    try:
        return inference_session(onnxruntime, path)
    except Exception as error:
        expected = f"a model that ONNX Runtime {onnxruntime.__version__} runs"
        remedy = "Write one with torch.onnx.export."
        raise refusal(where, expected, cause_line(error), remedy) from error


def _fed(session: Any, x: Tensor) -> Engine:
    (given,) = session.get_inputs()
    feed = {given.name: x.to(_ONNX_DTYPES[given.type]).numpy()}
    return lambda: session.run(None, feed)[0]

"""Inference engines that run the ReLU counterpart of a network, for comparison.

An engine is a function without arguments that runs one batch. Engines that are not installed are
skipped with a note. All use the same number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Engine = Callable[[], object]


def relu_engines(
    model: nn.Module, x: Tensor, names: tuple[str, ...] = ("eager", "compile", "onnx", "openvino")
) -> tuple[dict[str, Engine], dict[str, str]]:
    """Return the available engines, and the reasons why others are skipped.

    Args:
        model: an ordinary module.
        x: the batch to time.
        names: of the engines.
    """
    builders = {
        "eager": _eager,
        "compile": _compiled,
        "onnx": _onnxruntime,
        "openvino": _openvino,
    }
    model = model.eval()
    engines: dict[str, Engine] = {}
    notes: dict[str, str] = {}
    with torch.no_grad():
        expected = model(x)
        for name in names:
            try:
                run = builders[name](model, x)
                actual = torch.as_tensor(run())
            except Exception as error:  # one broken engine must not stop the comparison
                notes[name] = f"skipped: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
                continue
            if not torch.allclose(actual, expected, rtol=1e-3, atol=1e-4):
                notes[name] = "skipped: its output differs"
                continue
            engines[name] = run
    return engines, notes


def _eager(model: nn.Module, x: Tensor) -> Engine:
    def run() -> object:
        with torch.inference_mode():
            return model(x).clone()

    return run


def _compiled(model: nn.Module, x: Tensor) -> Engine:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)

    def run() -> object:
        with torch.no_grad():
            return compiled(x)

    run()
    return run


def _onnx_bytes(model: nn.Module, x: Tensor) -> bytes:
    program: Any = torch.onnx.export(
        model, (x,), dynamo=True, verbose=False, external_data=False, optimize=True
    )
    serialised: bytes = program.model_proto.SerializeToString()
    return serialised


def _onnxruntime(model: nn.Module, x: Tensor) -> Engine:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        _onnx_bytes(model, x), options, providers=["CPUExecutionProvider"]
    )
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)[0]


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

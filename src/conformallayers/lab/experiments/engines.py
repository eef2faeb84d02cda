"""Engines of the benchmarks: functions without arguments that run one batch; and the costs of a fold."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ...container import ConformalLayers, layer_by_layer
from ...errors import cause_line, ignored_warnings
from ...folding.fold import fold
from ...folding.folded import Folded
from ...networks import IMAGE_SHAPE
from ...recipe.onnx.export import inference_session

Engine = Callable[[], object]


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


def has_conformal_layers(network: nn.Module) -> bool:
    """Tell whether a network has ConformalLayers to fold."""
    return any(isinstance(module, ConformalLayers) for module in network.modules())


def deployed_relu(network: nn.Module) -> nn.Module:
    """Return a plain network as it is deployed: with a BatchNorm, its fold, which merges linear layers."""
    norms = (isinstance(module, nn.BatchNorm2d) for module in network.modules())
    return fold(network, IMAGE_SHAPE) if any(norms) else network


def relu_engines(
    model: nn.Module, x: Tensor, names: Sequence[str] = ("eager", "compile", "onnx", "openvino")
) -> tuple[dict[str, Engine], dict[str, str]]:
    """Return the engines of a plain network that are installed and agree, and why others are skipped.

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
                notes[name] = f"skipped: {cause_line(error)}"
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
    compiled = openvino.Core().compile_model(
        openvino.convert_model(model, example_input=x, input=[tuple(x.shape)]), "CPU", settings
    )
    request = compiled.create_infer_request()
    array = x.numpy()
    return lambda: request.infer([array])[0]

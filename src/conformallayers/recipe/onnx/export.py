"""Write a folded network as one ONNX file, after checking it and comparing it with torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ... import __version__
from ...errors import ConformalError, cause_line, missing_extra, refusal
from ...functional import full_precision, relative_error
from ...utils.files import Path, replace_file
from ..integer_operations import integer_values
from ..point_operations import Advance
from ..recipe import INPUT, Recipe
from ..simplify import simplified
from ..torch.module import RecipeModule
from .graph import BATCH, OUTPUT, OnnxGraph
from .integers import RUN
from .layers import merged_pools

OPSETS = 18, 25  # versions of the operators that the nodes are written for
_WITHOUT_RUNTIME = 20  # the opset where there is no ONNX Runtime to ask
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-11}  # relative errors of engines
BATCHES = 1, 4, 64  # sizes that a file is run on
_SLOW = 1, 5  # sizes for the reference evaluator of onnx
_ELEMENTS = 2**27  # of all values of a batch that a file is run on
_LARGEST = 2**31 - 2**20  # bytes of one file
_WHERE = "export_onnx(folded)"
_REMEDY = "Leave it out of the model, or run the fold in torch."


def export_onnx(folded: RecipeModule, path: Path, *, opset: int | None = None) -> None:
    """Write a folded network as one ONNX file, for batches of any size.

    The input ``x`` is (batch, *input_shape), the output ``y`` (batch, *output_shape), both in float32. Before the file
    appears, onnx checks it, and ONNX Runtime runs it on batches of 1, 4 and 64 samples (fewer where maps are
    large), tiny, huge, zero and NaN ones among them: the relative error against torch must be below 1e-5, or below
    what noise of 1e-5 in the input changes. Without ONNX Runtime the reference evaluator of onnx runs batches of 1
    and 5, which takes a while. A failed export leaves no file.

    Needs the extra ``onnx``.

    Args:
        folded: from :func:`conformallayers.fold`, in float32.
        path: of the file.
        opset: version of the operators, 18 to 25. None: the newest that the installed ONNX Runtime has.

    Examples:
        >>> import conformallayers as cl, onnxruntime, tempfile
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten())
        >>> folded = cl.fold(model, (1, 8, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cl.export_onnx(folded, f"{folder}/net.onnx")
        ...     session = onnxruntime.InferenceSession(f"{folder}/net.onnx")
        >>> x = torch.rand(5, 1, 8, 8)
        >>> (y,) = session.run(["y"], {"x": x.numpy()})
        >>> torch.allclose(torch.from_numpy(y), folded(x), rtol=1e-4)
        True
    """
    _check_fold(folded)
    whole = isinstance(opset, int) and not isinstance(opset, bool)
    if opset is not None and not (whole and OPSETS[0] <= opset <= OPSETS[1]):
        expected, remedy = f"a number from {OPSETS[0]} to {OPSETS[1]}", "Leave opset out."
        raise refusal("export_onnx(opset=...)", expected, repr(opset), remedy)
    onnx = _package("onnx")
    model = onnx_model(folded.recipe, _newest() if opset is None else opset)
    onnx.helper.set_model_props(model, _metadata(folded))
    replace_file(path, [_serialized(model)], lambda name: _check(onnx, name, folded))


def onnx_model(recipe: Recipe, opset: int) -> Any:
    """Return a recipe as an ``onnx.ModelProto``: input ``x``, output ``y`` in float32, batches of any size.

    Args:
        recipe: its constants are arrays of numpy, or tensors of torch.
        opset: version of the operators, 18 to 25.

    Raises:
        ConformalError: ONNX has no such operation, or the graph is too large.
    """
    helper = _package("onnx").helper
    recipe = recipe.with_constants(
        lambda _, array: np.asarray(array.detach().cpu() if isinstance(array, Tensor) else array)
    )
    advances = [op for op in recipe.operations if isinstance(op, Advance)]
    reads_m = any("m" in op.parsed.heads() for op in advances)
    recipe = merged_pools(simplified(recipe))
    graph = OnnxGraph(recipe, opset, reads_m=reads_m)
    values: dict[str, Any] = {INPUT: graph.input}
    for operation in recipe.operations:
        RUN.check(operation, _WHERE)
        RUN.step(operation, graph, values)
    result = graph.finish(values[recipe.output])
    x, y = (
        helper.make_tensor_value_info(
            value.name, helper.np_dtype_to_tensor_dtype(value.dtype), [BATCH, *value.shape]
        )
        for value in (graph.input, result)
    )
    proto = helper.make_graph(graph.nodes, "folded", [x], [y], graph.initializers)
    graph.initializers.clear()  # values refer to their graph, so that it is freed late
    opsets = [helper.make_opsetid("", opset)]
    version = helper.find_min_ir_version_for(opsets)
    return helper.make_model(
        proto, opset_imports=opsets, ir_version=version, producer_name="conformallayers"
    )


def _check_fold(folded: object) -> None:
    if not isinstance(folded, RecipeModule):
        remedy = "Pass the result of cl.fold."
        if isinstance(folded, nn.Module):
            remedy = "Fold it first: cl.export_onnx(cl.fold(model, input_shape), path)."
        raise refusal(_WHERE, "a Folded", type(folded).__name__, remedy)
    if folded.dtype != torch.float32:  # ONNX Runtime has few operators in other dtypes
        remedy = "Fold with dtype=torch.float32; runtimes narrow a file to their own needs."
        raise refusal(_WHERE, "a fold in float32", str(folded.dtype), remedy)
    if folded.anchor.is_meta:
        raise refusal(_WHERE, "a fold with values", "one on meta", "Load its state first.")


def _package(name: str, purpose: str = "export_onnx") -> Any:
    """Import a package of the extra, or say which extra brings it."""
    try:
        return __import__(name)
    except ImportError as error:
        raise missing_extra(name, "onnx", f"cl.{purpose}") from error


def _runtime() -> Any | None:
    """Return the package onnxruntime, or None where it is not installed."""
    try:
        return _package("onnxruntime")
    except ConformalError:
        return None


@lru_cache(maxsize=1)
def _newest() -> int:
    """Return the newest of our opsets that ONNX Runtime opens a tiny model in."""
    runtime = _runtime()
    if runtime is None:
        return _WITHOUT_RUNTIME
    identity = Recipe((1,), (1,), (), INPUT)
    for version in range(OPSETS[1], OPSETS[0], -1):
        try:
            inference_session(runtime, onnx_model(identity, version).SerializeToString())
        except Exception:
            continue
        return version
    return OPSETS[0]


def open_session(folded: RecipeModule, threads: int | None = None) -> Callable[[Any], Any]:
    """Return a fold as a function of arrays in ONNX Runtime, without a file and without a comparison with torch.

    Args:
        folded: from :func:`conformallayers.fold`, in float32.
        threads: of ONNX Runtime; None takes as many as torch has.
    """
    _check_fold(folded)
    runtime = _package("onnxruntime", "Session")
    data = _serialized(onnx_model(folded.recipe, _newest()))
    return _opened(runtime, data, threads)


def _opened(runtime: Any, model: str | bytes, threads: int | None = None) -> Callable[[Any], Any]:
    try:
        session = inference_session(runtime, model, threads)
    except Exception as error:
        expected = f"a graph that ONNX Runtime {runtime.__version__} runs"
        raise refusal(_WHERE, expected, cause_line(error), _REMEDY) from error
    return lambda x: session.run([OUTPUT], {INPUT: x})[0]


def inference_session(runtime: Any, model: str | bytes, threads: int | None = None) -> Any:
    """Open a model on the CPU; ``runtime`` is the package onnxruntime, None takes as many threads as torch has."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _metadata(folded: Any) -> dict[str, str]:
    """Return the metadata of the file."""
    document = {
        "library": __version__,
        "origin": folded.origin,
        "strategy": folded.strategy,
        "input_shape": list(folded.input_shape),
        "output_shape": list(folded.output_shape),
        "dtype": "float32",
    }
    return {
        f"conformallayers.{key}": value if isinstance(value, str) else json.dumps(value)
        for key, value in document.items()
    }


def _serialized(model: Any) -> bytes:
    size = sum(len(array.raw_data) for array in model.graph.initializer)
    if size > _LARGEST:
        remedy = 'Fold with strategy="conv" or "layers".'
        raise refusal(_WHERE, "at most 2 GiB", f"{size} bytes", remedy)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _check(onnx: Any, name: str, folded: Any) -> None:
    """Refuse an invalid model, or one whose outputs differ from torch."""
    try:
        onnx.checker.check_model(name, full_check=True)
    except Exception as error:
        expected = "a model that onnx.checker accepts"
        raise refusal(_WHERE, expected, cause_line(error), _REMEDY) from error
    runtime = _runtime()
    if runtime is not None:
        check_engine(_WHERE, "ONNX Runtime", _opened(runtime, name), folded, _REMEDY)
        return
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(name)

    def run(x: Any) -> Any:
        with np.errstate(all="ignore"):
            results: Any = evaluator.run([OUTPUT], {INPUT: x})
        return results[0]

    check_engine(_WHERE, "the reference evaluator of onnx", run, folded, _REMEDY, _SLOW)


def check_engine(
    where: str,
    name: str,
    run: Callable[[Any], Any],
    folded: Any,
    remedy: str,
    batches: tuple[int, ...] = BATCHES,
) -> None:
    """Refuse a function of arrays whose outputs differ from torch, on samples of all sizes, 0 and NaN."""
    limit = LIMITS[folded.dtype]

    def ours(x: Tensor) -> Tensor:
        with torch.no_grad(), full_precision(x):
            return folded(x.to(folded.anchor.device)).cpu()  # type: ignore[no-any-return]

    whole = integer_values(folded.recipe.operations)  # the same bits everywhere
    for x in _batches(folded, batches):
        actual, expected = torch.from_numpy(run(x.numpy())), ours(x)
        lost = _error(actual, expected)
        if not whole and limit < lost < float("inf"):
            # Outputs that cancel change by more than the limit if the inputs change by the limit.
            noise = torch.randn((4, *x.shape), generator=torch.Generator().manual_seed(0))
            runs = [actual, *(ours(x * (1 + limit * one.to(x.dtype))) for one in noise)]
            off = torch.stack([(y.double() - expected).flatten(1).norm(dim=1) for y in runs])
            wrong = ~(off[0] <= off[1:].amax(0))
            lost = _error(actual[wrong], expected[wrong])
        if not lost <= limit:
            got = f"an error of {lost:.2g} at batch size {len(x)} in {name}"
            raise refusal(where, f"the numbers of torch up to {limit:g}", got, remedy)


def _batches(folded: Any, batches: tuple[int, ...] = BATCHES) -> Iterator[Tensor]:
    """Yield batches of normal samples, smaller ones where maps are large.

    Some samples are tiny, huge, zero or not a number.
    """
    largest = max(1, _ELEMENTS // folded.recipe.peak_elements())
    generator = torch.Generator("cpu").manual_seed(0)
    count = min(batches[-1], max(largest, 5))
    shape = (count, *folded.input_shape)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    x[1] *= 1e-12 / x[1].norm()
    x[2] *= 1e12 / x[2].norm()
    x[3] = 0
    x[4].view(-1)[0] = float("nan")
    for batch in batches:
        yield from x[:batch].to(folded.dtype).split(largest)


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a sample; entries that are not finite must be equal."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    finite = expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if not (same | finite).all():
        return float("inf")
    return relative_error(torch.where(finite, actual, 0.0), torch.where(finite, expected, 0.0))

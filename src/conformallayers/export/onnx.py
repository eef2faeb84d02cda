"""A folded network as one ONNX file: checked, and run against torch before it gets its name."""

from __future__ import annotations

import errno
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..errors import ConformalError, missing_extra, refusal
from ..folding.certificate import Certificate
from ..folding.folded import Folded
from ..utils.files import Path, replace_file
from .plain import plain
from .replacements import with_replacements

OPSETS = 18, 25  # what onnxscript translates to
_WITHOUT_RUNTIME = 20  # the opset where there is no ONNX Runtime to ask
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-11}  # relative errors of ONNX Runtime
BATCHES = 1, 4, 64
_LARGEST = 2**31 - 2**20  # bytes of one file


def export_onnx(folded: Folded, path: Path, *, opset: int | None = None) -> None:
    """Write a folded network as one ONNX file, for batches of any size.

    The input ``x`` is (batch, *input_shape), the output ``y`` (batch, *output_shape), both in the dtype of the
    fold. The file is written beside its place, checked by onnx, run by ONNX Runtime at batch sizes 1, 4 and 64 on
    numbers of all sizes, zero and NaN among them, and moved to its place if they agree with torch: relatively to 1e-5
    in float32 and 1e-11 in float64. If anything fails nothing is left behind. Without ONNX Runtime it is
    only checked.

    Needs the extra ``onnx``.

    Args:
        folded: from :func:`conformallayers.fold`, in float32 or float64.
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
    _check_arguments(folded, path, opset)
    onnx = _package("onnx")
    _package("onnxscript")
    model = _translated(folded, _newest() if opset is None else opset)
    _describe(model, folded)
    replace_file(path, [_serialised(model)], lambda name: _check(onnx, name, folded))


def _check_arguments(folded: object, path: Path, opset: object) -> None:
    where = "export_onnx(folded)"
    if not isinstance(folded, Folded):
        remedy = "Pass the result of cl.fold."
        if isinstance(folded, nn.Module):
            remedy = "Fold it first: cl.export_onnx(cl.fold(model, input_shape), path)."
        raise refusal(where, "a Folded", type(folded).__name__, remedy)
    if folded.dtype not in LIMITS:
        remedy = "Fold with dtype=torch.float32; runtimes narrow a file to their own needs."
        raise refusal(where, "a fold in float32 or float64", str(folded.dtype), remedy)
    if folded.anchor.is_meta:
        raise refusal(where, "a fold with numbers", "one on meta", "Load its state first.")
    if opset is not None and (
        isinstance(opset, bool) or not isinstance(opset, int) or not OPSETS[0] <= opset <= OPSETS[1]
    ):
        expected, remedy = f"a number from {OPSETS[0]} to {OPSETS[1]}", "Leave opset out."
        raise refusal("export_onnx(opset=...)", expected, repr(opset), remedy)
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):  # said now, not after some seconds of work
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)


def _package(name: str) -> Any:
    """Import a package of the extra, or say which extra brings it."""
    try:
        return __import__(name)
    except ImportError as error:
        raise missing_extra(name, "onnx", "cl.export_onnx") from error


def _runtime() -> Any | None:
    """Return onnxruntime, or None where it is not installed."""
    try:
        return _package("onnxruntime")
    except ConformalError:
        return None


@lru_cache(maxsize=1)
def _newest() -> int:
    """Return the newest opset that both onnxscript and ONNX Runtime know; a tiny model tells."""
    from onnx import TensorProto, helper

    runtime = _runtime()
    if runtime is None:
        return _WITHOUT_RUNTIME
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [x], [y])
    for version in range(OPSETS[1], OPSETS[0], -1):
        opsets = [helper.make_opsetid("", version)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        try:
            _session(runtime, model.SerializeToString())
        except Exception:
            continue
        return version
    return OPSETS[0]


def _session(runtime: Any, model: str | bytes) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _translated(folded: Folded, opset: int) -> Any:
    """Return the graph as onnxscript's model."""
    x = torch.zeros(3, *folded.input_shape, dtype=folded.dtype)
    batch = torch.export.Dim("batch")
    try:
        with _quiet(), torch.no_grad():
            shapes = ({0: batch},)
            program = torch.export.export(plain(folded), (x,), dynamic_shapes=shapes, strict=False)
            result = torch.onnx.export(
                with_replacements(program),
                (x,),
                dynamo=True,
                input_names=["x"],
                output_names=["y"],
                dynamic_shapes=({0: "batch"},),
                opset_version=opset,
                custom_translation_table=_translations(),
                external_data=False,
                export_params=True,
                keep_initializers_as_inputs=False,
                optimize=True,
                verbose=False,
                verify=False,
                report=False,
                profile=False,
                dump_exported_program=False,
            )
    except Exception as error:
        got = f"what torch.onnx does not translate: {_first_line(error)}"
        raise refusal(
            "export_onnx(folded)", "operators that ONNX has", got, _remedy(folded)
        ) from error
    model: Any = result.model  # type: ignore[union-attr]
    if model.opset_imports.get("") != opset:
        got = f"operators of version {model.opset_imports.get('')}"
        remedy = "Leave opset out, or ask for a newer one."
        raise refusal("export_onnx(opset=...)", f"version {opset}", got, remedy)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch and onnx say about each other, and about packages that nobody needs here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _translations() -> dict[Any, Callable[..., Any]]:
    """Return what onnxscript should say of some operators instead of its own words.

    It would round numbers to float32, also in float64, and 1e300 to infinity. And ReLU has to keep NaN: many
    runtimes take 0, the larger of both, for it.
    """
    from onnxscript import ir
    from onnxscript import opset18 as op

    def constant(value: float | int, dtype: int) -> Any:
        tensor: Any = ir.tensor(value, ir.DataType(dtype))
        return op.Constant(value=tensor)

    def scalar_tensor(
        s: float, dtype: int = 1, layout: str = "", device: str = "", pin_memory: bool = False
    ) -> Any:
        return constant(s, dtype if dtype > 0 else 1)

    def full(
        size: Any,
        fill_value: float,
        dtype: int = 1,
        layout: str = "",
        device: str = "",
        pin_memory: bool = False,
    ) -> Any:
        shape: Any = op.Cast(size, to=ir.DataType.INT64)
        return op.Expand(constant(fill_value, dtype if dtype > 0 else 1), shape)

    def clamp(self: Any, min: float | None = None, max: float | None = None) -> Any:
        limits = [None if end is None else constant(end, self.dtype) for end in (min, max)]
        return op.Clip(self, *limits)

    def relu(self: Any) -> Any:
        zero = constant(0, self.dtype)
        return op.Where(op.LessOrEqual(self, zero), zero, self)

    aten = torch.ops.aten
    return {
        aten.scalar_tensor.default: scalar_tensor,
        aten.full.default: full,
        aten.clamp.default: clamp,
        aten.relu.default: relu,
    }


def _describe(model: Any, folded: Folded) -> None:
    """Say what the file holds; take out where its lines of code stood on this machine."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.name = "folded"
    certificate = folded.certificate
    document = {
        "library": __version__,
        "origin": folded.origin,
        "strategy": folded.strategy,
        "certificate": None if certificate is None else _proof(certificate),
        "input_shape": list(folded.input_shape),
        "output_shape": list(folded.output_shape),
        "dtype": str(folded.dtype).removeprefix("torch."),
    }
    for key, value in document.items():
        text = value if isinstance(value, str) else json.dumps(value)
        model.metadata_props[f"conformallayers.{key}"] = text


def _proof(certificate: Certificate) -> dict[str, float | str]:
    """Return a certificate as JSON has it: any norm is ``"inf"``."""
    values = {name: getattr(certificate, name) for name in ("epsilon", "max_norm", "margin")}
    return {k: v if abs(v) < float("inf") else repr(v) for k, v in values.items()}


def _serialised(model: Any) -> bytes:
    from onnxscript import ir

    size = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    if size > _LARGEST:
        remedy = "Fold with a tolerance, or with a strategy of fewer numbers."
        raise refusal("export_onnx(folded)", "at most 2 GiB", f"{size} bytes", remedy)
    data: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return data


def _check(onnx: Any, name: str, folded: Folded) -> None:
    """Refuse a file that is no valid model, or that gives other numbers than torch."""
    try:
        onnx.checker.check_model(name, full_check=True)
    except Exception as error:
        got = f"what onnx refuses: {_first_line(error)}"
        raise refusal("export_onnx(folded)", "a valid model", got, _remedy(folded)) from error
    runtime = _runtime()
    if runtime is None:
        return
    try:
        session = _session(runtime, name)
    except Exception as error:
        got = f"what ONNX Runtime {runtime.__version__} does not run: {_first_line(error)}"
        raise refusal(
            "export_onnx(folded)", "operators that it has", got, _remedy(folded)
        ) from error
    for batch in BATCHES:
        x = _samples(folded, batch)
        with torch.no_grad():
            expected = folded(x.to(folded.anchor.device)).cpu()
        actual = torch.from_numpy(session.run(["y"], {"x": x.numpy()})[0])
        lost = _error(actual, expected)
        if not lost <= LIMITS[folded.dtype]:
            raise refusal(
                "export_onnx(folded)",
                f"the numbers of torch up to {LIMITS[folded.dtype]:g}",
                f"an error of {lost:.2g} at batch size {batch} in ONNX Runtime",
                _remedy(folded),
            )


def _samples(folded: Folded, batch: int) -> Tensor:
    """Return normal samples; in a large batch some are tiny, huge, zero or not a number."""
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, *folded.input_shape, generator=generator, dtype=torch.float64)
    if batch >= 8:
        x[1] *= 1e-20
        x[2] *= 1e15
        x[3] = 0
        x[4].view(-1)[0] = float("nan")
    return x.to(folded.dtype)


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a sample; what is not finite must be the same."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    finite = expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if not (same | finite).all():
        return float("inf")
    difference = torch.where(finite, actual.double() - expected.double(), 0.0).flatten(1)
    size = torch.where(finite, expected.double(), 0.0).flatten(1).norm(dim=1)
    lost = difference.norm(dim=1)
    return float(torch.where(lost == 0, 0.0, lost / size).max())


def _remedy(folded: Folded) -> str:
    """Tell how else to fold."""
    if set(folded.strategy.split("+")) == {"dense"}:
        return "Leave layers around the folded parts out, or report it: a dense fold should export."
    return 'Fold with strategy="dense", which keeps no layers.'


def _first_line(error: BaseException) -> str:
    """Return the first line of what went wrong at the bottom, shortened."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.')}"

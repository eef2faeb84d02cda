"""Write a folded network as one C99 header and one source, without dependencies or allocation."""

from __future__ import annotations

import os
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import refusal, shape_text
from ...functional import relative_error
from ...utils.files import replace_files
from ...utils.text import size
from .. import integer_operations as integer
from .. import point_operations as point
from ..numpy.network import Network
from ..recipe import Recipe
from ..simplify import simplified
from ..torch.module import RecipeModule
from .constants import Array
from .files import DEFAULT, CExport, texts_of
from .integers import WRITE
from .layers import write_scalar
from .program import Program
from .shapes import plan_parts, write_output

OPTIMIZE = ("speed", "size")
_REMEDY = 'Fold with strategy="dense", which keeps no layers, or compute it behind predict.'
_LIMIT = 2**25  # bytes of constants; compilers take minutes and gigabytes for more
_SAMPLES, _ELEMENTS = 64, 2**24  # random samples to measure with, and numbers of all of them
_OF_SCALARS = point.Advance, integer.IntegerAdvance, integer.IntegerRebase


def export_c(
    folded: Any,
    folder: str | os.PathLike[str],
    *,
    name: str = DEFAULT,
    optimize: str = "speed",
    samples: Tensor | Array | None = None,
    example: bool = False,
    report: bool = False,
) -> CExport:
    """Write a folded network as ``<name>.h`` and ``<name>.c``: C99, no dependencies, no allocation.

    ``int <name>_predict(const float *image, float *out)`` returns the index of the largest output, or -1 if
    there is a NaN. ``<name>_predict_with`` takes its work memory as well and may run in many threads. The default
    name adds ``cl_predict``, the macro ``<NAME>_SELF_TEST`` a test on one image. All files are written, or none.

    Args:
        folded: the result of :func:`conformallayers.fold`.
        folder: of the files; it is created if it does not exist.
        name: of the files and functions, a C identifier.
        optimize: ``"speed"`` writes loops that fill the registers of a desktop processor; ``"size"`` writes shorter
            ones, for processors without vectors or with little flash.
        samples: (N, *input_shape), to measure the error; None takes at most 64 random ones. The first is
            the image of the self-test.
        example: also write ``<name>_example.c``, which runs the self-test, and ``<name>.mk``, its Makefile.
        report: write nothing; the result has the sizes and errors that the files would have.

    Returns:
        A :class:`CExport`: sizes and measured errors; prints as a table.

    Examples:
        >>> import conformallayers as cl, tempfile
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = cl.export_c(cl.fold(model, (1, 8, 8)), folder)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['cl_model.c', 'cl_model.h']
        >>> made.output_error < 1e-5
        True
    """
    target = _checked(folded, folder, name, optimize)
    x = _samples(folded, samples)
    program = _program(folded, name, optimize)
    result = CExport(
        header=target / f"{name}.h",
        source=target / f"{name}.c",
        name=name,
        dtype="int8" if integer.integer_values(program.recipe.operations) else "float32",
        makefile=target / f"{name}.mk" if example else None,
        example=target / f"{name}_example.c" if example else None,
        **_sizes(program),
        **_errors(folded, program, x),
    )
    if not report:
        _write_files(folded, program, x[0], result)
    return result


def write(recipe: Recipe, name: str = DEFAULT, optimize: str = "speed") -> Program:
    """Write the operations of a recipe as statements.

    Raises:
        ConformalError: C has no such operation, or there are too many constants.
    """
    for operation in recipe.operations:
        WRITE.check(operation, "export_c(folded)", _REMEDY)
    program = Program(recipe, name, optimize == "speed")
    plan_parts(program)
    for index, operation in enumerate(recipe.operations):
        program.index = index
        if index in program.done:
            continue
        features = [name for name in operation.inputs if program.shape(name)]
        if not features and not isinstance(operation, _OF_SCALARS):
            write_scalar(operation, program)
        else:
            WRITE[type(operation)](operation, program)
    write_output(program)
    program.finish()
    total = sum(constant.bytes for constant in program.constants)
    if total > _LIMIT:
        remedy = 'Fold with strategy="conv" or "layers".'
        expected = f"at most {size(_LIMIT)} of constants, which compilers can take"
        raise refusal("export_c(folded)", expected, size(total), remedy)
    return program


def _checked(folded: Any, folder: Any, name: object, optimize: object) -> Path:
    """Check the arguments; return the folder."""
    if not isinstance(folded, RecipeModule):
        got, remedy = type(folded).__name__, "Fold it first: cl.fold(model, input_shape)."
        raise refusal("export_c(folded)", "a Folded", got, remedy)
    if optimize not in OPTIMIZE:
        raise refusal("export_c(optimize=...)", '"speed" or "size"', repr(optimize), "Give one.")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        remedy = f'Use letters, digits and "_", for example "{DEFAULT}".'
        raise refusal("export_c(name=...)", "a C identifier", repr(name), remedy)
    labels: Any = folded.labels
    outputs = prod(folded.output_shape)
    if labels is not None and len(labels) != outputs:
        remedy = "Set folded.labels to one name for every output, or to None."
        raise refusal("export_c(folded)", f"{outputs} labels", str(len(labels)), remedy)
    odd = re.compile(r"[\0\ud800-\udfff]")  # NUL would end a string; C has no lone surrogates
    wrong = [label for label in labels or () if not isinstance(label, str) or odd.search(label)]
    if wrong:
        remedy = "Set folded.labels to such strings, or to None."
        raise refusal(
            "export_c(folded)", "labels of UTF-8 without NUL", f"{wrong[0]!r:.60}", remedy
        )
    target = Path(folder)
    if any(path.exists() and not path.is_dir() for path in (target, *target.parents)):
        got = f"the file {os.fspath(folder)!r}"
        raise refusal("export_c(folder)", "a folder", got, "Name a folder.")
    return target


def _samples(folded: Any, samples: Any) -> Array:
    """Return the samples to measure with, (N, *input_shape) in float32."""
    shape = folded.input_shape
    if samples is None:
        generator = torch.Generator().manual_seed(0)
        count = max(1, min(_SAMPLES, _ELEMENTS // prod(shape)))
        samples = torch.rand(count, *shape, generator=generator)
    x = torch.as_tensor(samples).detach().float().cpu()
    if tuple(x.shape[1:]) != shape or not len(x) or not bool(x.isfinite().all()):
        raise refusal(
            "export_c(samples=...)",
            f"finite samples of shape (N, {shape_text(shape)[1:].replace(',)', ')')}",
            f"{tuple(x.shape)}" if bool(x.isfinite().all()) else "some that are not finite",
            "Leave them out to measure with random ones.",
        )
    return np.asarray(x.contiguous().numpy())


def _program(folded: Any, name: str, optimize: str) -> Program:
    """Write a fold as statements; refuse constants that are not finite."""
    recipe = simplified(folded.recipe.with_constants(lambda _, array: _double(array)))
    for constant, array in recipe.constants.items():
        if not np.isfinite(_typed(recipe, constant, array)).all():
            got, remedy = f"NaN or infinity in {constant}", "Train or load the model again."
            raise refusal("export_c(folded)", "finite weights in float32", got, remedy)
    return write(recipe, name, optimize)


def _double(array: Tensor) -> Array:
    return np.asarray(array.detach().cpu().double().numpy())


def _typed(recipe: Recipe, name: str, array: Array) -> Array:
    """Return a constant in the dtype of a float32 fold."""
    if name in recipe.integer_constants():
        return np.asarray(array, np.int64)
    with np.errstate(over="ignore"):
        return np.asarray(array, np.float64 if name in recipe.wide else np.float32)


def _write_files(folded: Any, program: Program, image: Array, result: CExport) -> None:
    """Write all files or none; the self-test has an image of bytes near the given one."""
    levels = np.rint(255 * image.clip(0, 1)).astype(np.uint8)
    outputs = _run(program.recipe, levels[None].astype(np.float32) / np.float32(255))[0]
    if not bool(outputs.isfinite().all()):
        remedy = "Train or load the model again."
        raise refusal("export_c(folded)", "finite outputs", "NaN or infinity", remedy)
    texts = texts_of(folded, program, levels, outputs.numpy(), result)
    result.header.parent.mkdir(parents=True, exist_ok=True)
    replace_files({path: [text.encode()] for path, text in texts.items()})


def _sizes(program: Program) -> dict[str, Any]:
    """Return the memory and the work of a program, for :class:`CExport`."""
    recipe = program.recipe
    return {
        "arrays": tuple((constant.name, constant.bytes) for constant in program.constants),
        "work_bytes": 4 * max(1, program.work_size),
        "caller_bytes": 4 * (prod(recipe.input_shape) + prod(recipe.output_shape)),
        "multiply_adds": program.multiply_adds,
    }


def _errors(folded: Any, program: Program, x: Array) -> dict[str, Any]:
    """Measure outputs in float32 against the fold."""
    with torch.no_grad():
        expected = folded(torch.from_numpy(x).to(folded.anchor)).double().cpu().flatten(1)
    actual = _run(program.recipe, x)
    return {
        "samples": len(x),
        "output_error": relative_error(actual, expected),
        "agreement": float((actual.argmax(1) == expected.argmax(1)).double().mean()),
    }


def _run(recipe: Recipe, x: Array) -> Tensor:
    """Run a recipe in float32 and return its outputs, (N, outputs)."""
    typed = recipe.with_constants(lambda name, array: _typed(recipe, name, array))
    network = Network(typed, np.dtype(np.float32))
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(network(x))).double().flatten(1)

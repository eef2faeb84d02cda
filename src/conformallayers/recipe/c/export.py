"""Write a folded network as one C99 header and one source, without dependencies or allocation."""

from __future__ import annotations

import os
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import refusal
from ...utils.files import replace_files
from ...utils.text import size
from .. import integer_operations as integer
from ..numpy.network import Network
from ..places import Array
from ..recipe import Recipe
from ..simplify import simplified
from ..torch.module import RecipeModule
from .files import DEFAULT, CExport, texts_of
from .integers import WRITE
from .program import Program
from .shapes import plan_parts, write_output

OPTIMIZE = ("speed", "size")
_LIMIT = 2**25  # bytes of constants; compilers take minutes and gigabytes for more


def export_c(
    folded: Any,
    folder: str | os.PathLike[str],
    *,
    name: str = DEFAULT,
    optimize: str = "speed",
    example: bool = False,
    report: bool = False,
) -> CExport:
    """Write a folded network as ``<name>.h`` and ``<name>.c``: C99, no dependencies, no allocation.

    ``int <name>_predict(const float *image, float *out)`` returns the index of the largest output, or -1 if
    there is a NaN (int8 reads one in the image as 0). ``<name>_predict_with`` takes its work memory as well and may
    run in many threads. The default name adds ``cl_predict``, the macro ``<NAME>_SELF_TEST`` a test on one image.
    All files are written, or none.

    Args:
        folded: the result of :func:`conformallayers.fold`.
        folder: of the files; it is created if it does not exist.
        name: of the files and functions, a C identifier.
        optimize: ``"speed"`` writes loops that fill the registers of a desktop processor; ``"size"`` writes shorter
            ones, for processors without vectors or with little flash.
        example: also write ``<name>_example.c``, which runs the self-test, and ``<name>.mk``, its Makefile.
        report: write nothing; the result has the sizes that the files would have.

    Returns:
        A :class:`CExport`: files, sizes and work, which it prints.

    Examples:
        >>> import conformallayers as cl, tempfile
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = cl.export_c(cl.fold(model, (1, 8, 8)), folder)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['cl_model.c', 'cl_model.h']
        >>> made.constant_bytes < 10_000
        True
    """
    _check(folded, name, optimize)
    target, program = Path(folder), _program(folded, name, optimize)
    if target.is_file():
        remedy = "Give the folder to write the files to."
        raise refusal("export_c(folder=...)", "a folder", f"the file {target}", remedy)
    result = CExport(
        header=target / f"{name}.h",
        source=target / f"{name}.c",
        name=name,
        dtype="int8" if integer.integer_values(program.recipe.operations) else "float32",
        makefile=target / f"{name}.mk" if example else None,
        example=target / f"{name}_example.c" if example else None,
        constant_bytes=sum(constant.bytes for constant in program.constants),
        work_bytes=4 * max(1, program.work_size),
        caller_bytes=4 * (prod(folded.input_shape) + prod(folded.output_shape)),
        multiply_adds=program.multiply_adds,
        written=not report,
    )
    if not report:
        _write_files(folded, program, result)
    return result


def write(recipe: Recipe, name: str = DEFAULT, optimize: str = "speed") -> Program:
    """Write the operations of a recipe as statements.

    Raises:
        ConformalError: C has no such operation, or there are too many constants.
    """
    for operation in recipe.operations:
        WRITE.check(operation, "export_c(folded)")
    program = Program(recipe, name, optimize == "speed")
    plan_parts(program)
    for index, operation in enumerate(recipe.operations):
        program.index = index
        if index in program.done:
            continue
        WRITE[type(operation)](operation, program)
    write_output(program)
    program.finish()
    total = sum(constant.bytes for constant in program.constants)
    if total > _LIMIT:
        remedy = 'Fold with strategy="conv" or "layers".'
        expected = f"at most {size(_LIMIT)} of constants, which compilers can take"
        raise refusal("export_c(folded)", expected, size(total), remedy)
    return program


def _check(folded: Any, name: object, optimize: object) -> None:
    """Refuse what cannot be written."""
    if not isinstance(folded, RecipeModule):
        got, remedy = type(folded).__name__, "Fold it first: cl.fold(model, input_shape)."
        raise refusal("export_c(folded)", "a Folded", got, remedy)
    if optimize not in OPTIMIZE:
        raise refusal("export_c(optimize=...)", '"speed" or "size"', repr(optimize), "Use either.")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        remedy = f'Use letters, digits and "_", for example "{DEFAULT}".'
        raise refusal("export_c(name=...)", "a C identifier", repr(name), remedy)
    labels: Any = folded.labels
    outputs = prod(folded.output_shape)
    if labels is not None and len(labels) != outputs:
        remedy = "Set folded.labels to one name for every output, or to None."
        raise refusal("export_c(folded)", f"{outputs} labels", str(len(labels)), remedy)


def _program(folded: Any, name: str, optimize: str) -> Program:
    """Write a fold as statements; refuse constants that are not finite."""
    recipe = folded.recipe.with_constants(lambda _, array: array.detach().cpu().double().numpy())
    recipe = simplified(recipe)
    for constant, array in recipe.constants.items():
        if not np.isfinite(_typed(recipe, constant, array)).all():
            got, remedy = f"NaN or infinity in {constant}", "Train or load the model again."
            raise refusal("export_c(folded)", "finite weights in float32", got, remedy)
    return write(recipe, name, optimize)


def _typed(recipe: Recipe, name: str, array: Array) -> Array:
    """Return a constant in the dtype of a float32 fold."""
    with np.errstate(over="ignore"):
        return np.asarray(array, recipe.fixed_dtypes().get(name, "float32"))


def _write_files(folded: Any, program: Program, result: CExport) -> None:
    """Write all files or none; the image of the self-test is random bytes."""
    levels = np.random.default_rng(0).integers(0, 256, program.recipe.input_shape, np.uint8)
    recipe, image = program.recipe, levels.astype(np.float32) / np.float32(255)
    typed = recipe.with_constants(lambda name, array: _typed(recipe, name, array))
    outputs = Network(typed, np.dtype(np.float32))(image[None]).ravel()
    if not np.isfinite(outputs).all():
        remedy = "Train or load the model again."
        raise refusal("export_c(folded)", "finite outputs", "NaN or infinity", remedy)
    texts = texts_of(folded, program, levels, outputs, result)
    replace_files({path: [text.encode()] for path, text in texts.items()})

"""Write a folded network as one C99 header and one source, without dependencies or allocation."""

from __future__ import annotations

import hashlib
import math
import os
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..errors import refusal, shape_text
from ..folding.certificate import Certificate
from ..folding.folded import Folded
from ..testing import relative_error
from ..utils.files import replace_files
from ..utils.text import count, size, table
from .c99_arrays import Array, Constant, number
from .c99_ops import INPUT, State
from .c99_read import Reader
from .c99_text import ALIASES, HEADER, SOURCE, SOURCE_ALIASES, comment, helpers

DEFAULT = "cl_model"
DTYPES = ("float32", "int8")
_LIMIT = 2**25  # bytes of constants; compilers take minutes and gigabytes for more
_SAMPLES = 64
_WIDTH = 98
_KEYWORDS = """auto break case char const continue default do double else enum extern float for goto if
inline int long register restrict return short signed sizeof static struct switch typedef union
unsigned void volatile while alignas alignof and and_eq asm bitand bitor bool catch class compl concept
consteval constexpr constinit const_cast co_await co_return co_yield decltype delete dynamic_cast
explicit export false friend mutable namespace new noexcept not not_eq nullptr operator or or_eq
private protected public reinterpret_cast requires static_assert static_cast template this
thread_local throw true try typeid typename using virtual wchar_t xor xor_eq"""  # of C and C++


@dataclass(frozen=True)
class CExport:
    """What :func:`export_c` wrote; prints as a table.

    Attributes:
        header, source: the files.
        name: what the functions and macros begin with.
        dtype: of the weights.
        arrays: name and bytes of every constant array.
        work_bytes: of work memory.
        multiply_adds: of one image.
        samples: that the errors were measured on.
        output_error: largest relative error of an output against the fold.
        denominator_error: largest relative error of a denominator; None with biases or branches alone.
        agreement: share of samples with the same largest output.
        certificate: what is proven of the denominator with the constants as they are written, or
            None: nothing was left out of the fold, or rounding to int8 is measured and not proven.
    """

    header: Path
    source: Path
    name: str
    dtype: str
    arrays: tuple[tuple[str, int], ...]
    work_bytes: int
    multiply_adds: int
    samples: int
    output_error: float
    denominator_error: float | None
    agreement: float
    certificate: Certificate | None

    @property
    def constant_bytes(self) -> int:
        """The bytes of all constant arrays."""
        return sum(taken for _, taken in self.arrays)

    def __str__(self) -> str:
        rows = [(name, f"{taken}") for name, taken in self.arrays]
        rows.append(("constants", f"{self.constant_bytes}"))
        rows.append(("work memory", f"{self.work_bytes}"))
        lines = [
            f"{self.header}, {self.source}",
            table(("array", "bytes"), rows),
            f"{self.dtype}: constants {size(self.constant_bytes)}, work memory "
            f"{size(self.work_bytes)}, {count(self.multiply_adds)} multiply-adds per image",
            self.measured,
        ]
        if self.certificate is not None:
            lines.append(f"denominator: {self.certificate}")
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def measured(self) -> str:
        """What was measured against the fold, in one line."""
        denominator = ""
        if self.denominator_error is not None:
            denominator = f", of the denominator {self.denominator_error:.2g}"
        return (
            f"measured on {self.samples} samples: largest relative error of the outputs "
            f"{self.output_error:.2g}{denominator}; same largest output in {self.agreement:.1%}"
        )


def export_c(
    folded: Folded,
    folder: str | os.PathLike[str],
    *,
    name: str = DEFAULT,
    dtype: str = "float32",
    samples: Tensor | Array | None = None,
) -> CExport:
    """Write a folded network as ``<name>.h`` and ``<name>.c``: C99, no dependencies, no allocation.

    The program has ``int <name>_predict(const float *image, float *out)``, which returns the index of
    the largest output, or -1 if there is a NaN, and ``<name>_predict_with``, which is given its
    work memory and may run in many threads. Under the default name there is ``cl_predict`` as well. Both files
    are written, or none.

    With a tolerance, the form is made smaller as far as the fold's certificate has room for that: entries
    are left out and the others stored in 8 or 16 bits. That is proven again, whatever the ``dtype``.

    Args:
        folded: the result of :func:`conformallayers.fold`.
        folder: where the files go; it must exist.
        name: of the files and functions, a C identifier.
        dtype: of the weights, ``"float32"`` or ``"int8"`` with a scale for each row. Sums are float32,
            the denominator is float64.
        samples: (N, *input_shape), to measure the error with; None takes 64 of random numbers
            from 0 to 1.

    Returns:
        A :class:`CExport`: sizes and measured errors; prints as a table.

    Examples:
        >>> import conformallayers as cl, tempfile
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = cl.export_c(cl.fold(model, (1, 8, 8)), folder, dtype="int8")
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['cl_model.c', 'cl_model.h']
        >>> made.output_error < 0.01
        True
    """
    target = _checked(folded, folder, name, dtype)
    x = _samples(folded, samples)
    with torch.no_grad():
        reader = Reader(int8=dtype == "int8")
        reader.read(folded)
        constants = [constant for step in reader.steps for constant in step.constants]
        _check_constants(constants)
        exact = Reader(int8=False, prune=False)
        exact.read(folded)
        expected = folded(torch.from_numpy(x).to(folded.anchor)).double().cpu().flatten(1)
    places, work = _places(reader)
    output, state = _run(reader, x)
    _, reference = _run(exact, x)
    actual = torch.from_numpy(output).double()
    result = CExport(
        header=target / f"{name}.h",
        source=target / f"{name}.c",
        name=name,
        dtype=dtype,
        arrays=tuple((constant.name, constant.bytes) for constant in constants),
        work_bytes=4 * work,
        multiply_adds=sum(step.multiply_adds for step in reader.steps),
        samples=len(x),
        output_error=relative_error(actual, expected),
        denominator_error=_denominator_error(state, reference),
        agreement=float((actual.argmax(1) == expected.argmax(1)).double().mean()),
        certificate=_certificate(reader, dtype),
    )
    header, source = _texts(folded, reader, result, places, constants)
    replace_files({result.source: [source.encode()], result.header: [header.encode()]})
    return result


def _checked(folded: object, folder: Any, name: object, dtype: object) -> Path:
    if not isinstance(folded, Folded):
        got, remedy = type(folded).__name__, "Fold it first: cl.fold(model, input_shape)."
        raise refusal("export_c(folded)", "a Folded", got, remedy)
    if dtype not in DTYPES:
        raise refusal("export_c(dtype=...)", '"float32" or "int8"', repr(dtype), "Give one.")
    plain = isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is not None
    if not plain or name in _KEYWORDS.split():
        remedy = f'Use letters, digits and "_", for example "{DEFAULT}".'
        raise refusal("export_c(name=...)", "a C identifier, no keyword", repr(name), remedy)
    target = Path(folder)
    if not target.is_dir():
        got, remedy = repr(os.fspath(folder)), "Create it first."
        if target.exists():
            got, remedy = f"the file {got}", "Name a folder."
        raise refusal("export_c(folder)", "a folder that exists", got, remedy)
    return target


def _samples(folded: Folded, samples: Any) -> Array:
    """Return the samples to measure with, (N, *input_shape) in float32."""
    shape = folded.input_shape
    if samples is None:
        generator = torch.Generator().manual_seed(0)
        samples = torch.rand(_SAMPLES, *shape, generator=generator)
    x = torch.as_tensor(samples).detach().float().cpu()
    if tuple(x.shape[1:]) != shape or not len(x) or not bool(x.isfinite().all()):
        raise refusal(
            "export_c(samples=...)",
            f"finite samples of shape (N, {shape_text(shape)[1:].replace(',)', ')')}",
            f"{tuple(x.shape)}" if bool(x.isfinite().all()) else "some that are not finite",
            "Leave them out to measure with random ones.",
        )
    return np.asarray(x.contiguous().numpy())


def _check_constants(constants: Iterable[Constant]) -> None:
    total = 0
    for constant in constants:
        total += constant.bytes
        if not np.isfinite(constant.values).all():
            got, remedy = f"NaN or infinity in {constant.name}", "Train or load the model again."
            raise refusal("export_c(folded)", "finite weights in float32", got, remedy)
    if total > _LIMIT:
        remedy = 'Fold with strategy="conv", or with a tolerance, or absorb less.'
        expected = f"at most {size(_LIMIT)} of constants, which compilers can take"
        raise refusal("export_c(folded)", expected, size(total), remedy)


def _run(reader: Reader, x: Array) -> tuple[Array, State]:
    """Compute in numpy what the program computes."""
    state = State({INPUT: x.reshape(len(x), -1)})
    with np.errstate(all="ignore"):
        for step in reader.steps:
            step.run(state)
    return state.values[reader.last], state


def _denominator_error(state: State, reference: State) -> float | None:
    pairs = zip(state.denominators, reference.denominators, strict=True)
    errors = [float(np.max(np.abs(a - b) / np.where(b == 0, 1, b))) for a, b in pairs]
    return max(errors, default=None)


def _certificate(reader: Reader, dtype: str) -> Certificate | None:
    """Return the weakest proof among the parts; in int8 one that lacks it leaves none."""
    proofs = [proof for proof in reader.certificates if proof is not None]
    if not proofs or (dtype == "int8" and len(proofs) < len(reader.certificates)):
        return None
    return Certificate(
        max(proof.epsilon for proof in proofs),
        min(proof.max_norm for proof in proofs),
        min(proof.margin for proof in proofs),
    )


def _places(reader: Reader) -> tuple[dict[int, str], int]:
    """Give every value a place: values that are never needed at the same time share one."""
    spans: dict[int, tuple[int, int]] = {}
    for index, step in enumerate(reader.steps):
        for value in (step.source, step.target):
            spans[value] = spans.get(value, (index, index))[0], index
    sizes = reader.sizes()
    placed: dict[int, tuple[int, int]] = {}
    for value, (first, last) in spans.items():
        if value in (INPUT, reader.last):
            continue
        taken = sorted(
            placed[other]
            for other in placed
            if spans[other][0] <= last and first <= spans[other][1]
        )
        start = 0
        for begin, end in taken:
            if start + sizes[value] <= begin:
                break
            start = max(start, end)
        placed[value] = start, start + sizes[value]
    names = {value: f"work + {start}" if start else "work" for value, (start, _) in placed.items()}
    work = max([1, *(end for _, end in placed.values())])
    return {**names, INPUT: "image", reader.last: "out"}, work


def _texts(
    folded: Folded,
    reader: Reader,
    result: CExport,
    places: dict[int, str],
    constants: list[Constant],
) -> tuple[str, str]:
    """Return the header and the source."""
    name, macro = result.name, result.name.upper()
    origin = folded.origin or ""
    origin = origin if re.fullmatch(r"[\w:.+-]*", origin, re.ASCII) else ""
    lines = [line for step in reader.steps for line in step.lines(places.__getitem__)]
    unused = [] if any("work" in place for place in places.values()) else ["(void)work;"]
    body = _indented([*unused, *lines])
    needed = helpers(call for step in reader.steps for call in step.helpers())
    arrays = "\n".join(constant.text() for constant in constants)
    digest = hashlib.sha256("\n".join([arrays, needed, body, origin]).encode())
    words: dict[str, Any] = {
        "name": name,
        "macro": macro,
        "id": f"0x{digest.hexdigest()[:8]}",
        "inputs": prod(folded.input_shape),
        "input_shape": ", ".join(map(str, folded.input_shape)),
        "outputs": prod(folded.output_shape),
        "output_shape": ", ".join(map(str, folded.output_shape)),
        "work": result.work_bytes // 4,
        "work_bytes": result.work_bytes,
        "version": __version__,
        "origin": origin,
        "proof": _proof(macro, result.certificate),
    }
    about = _about(folded, result, origin)
    default = name == DEFAULT
    header = HEADER.format(
        **words,
        about=comment([f"{name}.h: a folded network. Do not edit: export it again.", *about]),
        aliases=ALIASES.format(macro=macro) if default else "",
    )
    source = SOURCE.format(
        **words,
        about=comment([f"{name}.c: see {name}.h. Compile as C99 or C++17 and link with -lm."]),
        constants=arrays,
        helpers=needed,
        body=body,
        aliases=SOURCE_ALIASES.format(name=name) if default else "",
    )
    return header, source


def _about(folded: Folded, result: CExport, origin: str) -> list[str]:
    """Describe the network for the header."""
    proof = "the weights are those of the fold, nothing is left out"
    if result.certificate is not None:
        proof = _ascii(result.certificate)
    elif result.dtype == "int8":
        proof = "none: rounding to int8 is measured, not proven"
    facts = {
        "written by": f"conformallayers {__version__}",
        "input": " x ".join(map(str, folded.input_shape)),
        "output": " x ".join(map(str, folded.output_shape)),
        "weights": f"{result.dtype}, {result.constant_bytes} bytes of constants",
        "work memory": f"{result.work_bytes} bytes",
        "work": f"{result.multiply_adds} multiply-adds per image",
        "strategy": folded.strategy,
        "origin": origin or "unknown",
        "certificate": proof,
    }
    lines = ["", *(f"{key + ':':<13}{value}" for key, value in facts.items()), ""]
    wrapped = textwrap.wrap(result.measured[:1].upper() + result.measured[1:] + ".", _WIDTH - 4)
    return [*lines, *wrapped]


def _ascii(certificate: Certificate) -> str:
    bounded = math.isfinite(certificate.max_norm)
    inputs = f"images of norm up to {certificate.max_norm:g}" if bounded else "any image"
    return f"the denominator is within {certificate.epsilon:.3g} of the exact one for {inputs}"


def _proof(macro: str, certificate: Certificate | None) -> str:
    if certificate is None:
        return ""
    error = number(certificate.epsilon)
    text = "/* The relative error of the denominator that is proven, and for which images. */\n"
    text += f"#define {macro}_EPSILON {error}\n"
    if math.isfinite(certificate.max_norm):
        limit = number(certificate.max_norm)
        text += f"#define {macro}_MAX_NORM {limit}\n"
    return text


def _indented(lines: Iterable[str]) -> str:
    """Indent statements by their braces and wrap them."""
    found, depth = [], 1
    for line in lines:
        depth -= line.startswith("}")
        inner = len(line) - len(line.lstrip())
        margin = "    " * depth + " " * inner
        found += textwrap.wrap(
            line,
            _WIDTH,
            initial_indent=margin,
            subsequent_indent=margin + "    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        depth += line.endswith("{")
    return "\n".join(found)

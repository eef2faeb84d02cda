"""conformallayers fold and export: a trained network as one file, or as code for other runtimes."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..errors import refusal
from .extras import extra_for

if TYPE_CHECKING:
    from ..folding.folded import Folded
    from ..lab.training.saved_models import Loaded

_SEVERAL = Parameter(consume_multiple=True, negative="")
_FLAG = Parameter(negative="")
_DTYPES = ("float64", "float32", "float16", "bfloat16")


@Parameter(name="*")
@dataclass(frozen=True)
class FoldOptions:
    """How a network is folded.

    Args:
        input_shape: Of one sample, such as 1 28 28; as the images it was trained on are stored if
            not given.
        grey: Take grey images though it was trained on others; 1 28 28 where the set is not known.
        strategy: auto, dense, banded, sparse, conv, spectral or layers.
        tolerance: The relative error of the denominator that may be made, and is proven.
        max_norm: The largest norm of a sample that the tolerance must hold for; any if not given.
        dtype: float64, float32, float16 or bfloat16; that of the network if not given.
        labels: A text file with the name of each class, one a line; those of the data set if not given.
    """

    input_shape: Annotated[tuple[int, ...], _SEVERAL] = ()
    grey: Annotated[bool, _FLAG] = False
    strategy: str | None = None
    tolerance: float | None = None
    max_norm: float | None = None
    dtype: str | None = None
    labels: Path | None = None


def fold(model: Path, *, out: Path, options: FoldOptions | None = None) -> None:
    """Fold a trained network and save it as one file; say how it was folded and why.

    Args:
        model: The folder of a run, a checkpoint, or a model written by cl.save.
        out: The file.
    """
    with extra_for("folding"):
        from ..folding.files import save
        from ..lab.training.saved_models import load_model
    options = options or FoldOptions()
    loaded = load_model(model, "fold")
    folded, labels = _folded(loaded, "fold", options)
    print(folded.explain())
    save(folded, out, labels=labels, about=_about(loaded))
    print(f"Wrote {out}, {out.stat().st_size / 1024:.0f} KiB")


def export(
    model: Path,
    *,
    format: str,
    out: Path,
    name: str = "cl_model",
    weights: str = "float32",
    samples: Path | None = None,
    opset: int | None = None,
    options: FoldOptions | None = None,
) -> None:
    """Write a network for another runtime: C, ONNX, or numpy.

    Args:
        model: A fold or model written by cl.save, the folder of a run, or a checkpoint.
        format: c (a folder with a header and a source), onnx (a file), or numpy (a file that
            conformallayers.numpy has run).
        out: The folder or file.
        name: Of the files and functions in C.
        weights: float32 or int8, in C.
        samples: Some inputs as .npy, on which the error of int8 is measured.
        opset: Of ONNX; the newest if not given.
    """
    with extra_for("exporting"):
        from ..folding.folded import Folded
        from ..lab.training.saved_models import load_model
    if format not in _WRITERS:
        expected = f"one of {', '.join(_WRITERS)}"
        raise refusal("export --format", expected, repr(format), "Name one of them.")
    settings = {"name": name, "weights": weights, "samples": samples, "opset": opset}
    for key, usual in (("name", "cl_model"), ("weights", "float32"), ("samples", None)):
        if format != "c" and settings[key] != usual:
            got = f"{settings[key]} for {format}"
            raise refusal(f"export --{key}", "it for --format c alone", got, "Leave it out.")
    if format != "onnx" and opset is not None:
        got = f"{opset} for {format}"
        raise refusal("export --opset", "it for --format onnx alone", got, "Leave it out.")
    loaded = load_model(model, "export")
    if isinstance(loaded.module, Folded) and options is None:
        folded, labels = loaded.module, loaded.labels
    else:
        folded, labels = _folded(loaded, "export", options or FoldOptions())
    folded.labels, folded.about = labels, _about(loaded)
    _WRITERS[format](folded, out, settings)


def _folded(
    loaded: "Loaded", command: str, options: FoldOptions
) -> "tuple[Folded, tuple[str, ...] | None]":
    """Return the fold of a network and the labels of its outputs."""
    import torch

    from ..lab.training.saved_models import GREY, checked_labels, fold_model, read_labels

    shape: tuple[int, ...] | None = options.input_shape or None
    if options.grey:
        if shape is not None:
            got, remedy = "both", "Give one of them."
            raise refusal(f"{command} --grey", "--grey or --input-shape", got, remedy)
        shape = GREY if loaded.dataset is None or loaded.shape is None else (1, *loaded.shape[1:])
    chosen: dict[str, Any] = {
        key: getattr(options, key)
        for key in ("strategy", "tolerance", "max_norm")
        if getattr(options, key) is not None
    }
    if options.dtype is not None:
        if options.dtype not in _DTYPES:
            expected = f"one of {', '.join(_DTYPES)}"
            raise refusal(f"{command} --dtype", expected, repr(options.dtype), "Leave it out.")
        chosen["dtype"] = getattr(torch, options.dtype)
    folded = fold_model(loaded, command, shape, **chosen)
    labels = loaded.labels if options.labels is None else read_labels(options.labels)
    outputs = folded.output_shape[0] if len(folded.output_shape) == 1 else 0
    where = f"{command} --labels {options.labels}" if options.labels else str(loaded.path)
    return folded, checked_labels(labels, outputs, where)


def _about(loaded: "Loaded") -> dict[str, Any] | None:
    return dict(loaded.about) or None


def _write_c(folded: "Folded", out: Path, settings: dict[str, Any]) -> None:
    samples = None
    if settings["samples"] is not None:
        samples = _samples(settings["samples"], folded)
    from ..export.c99 import export_c

    if out.exists() and not out.is_dir():
        raise refusal("export --out", "a folder", f"the file {out}", "Name another folder.")
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    chosen = {"name": settings["name"], "dtype": settings["weights"], "samples": samples}
    try:
        print(export_c(folded, out, **chosen))
    except BaseException:
        if new:
            with suppress(OSError):  # something may lie in it by now
                out.rmdir()
        raise


def _write_onnx(folded: "Folded", out: Path, settings: dict[str, Any]) -> None:
    from ..export.onnx import export_onnx

    export_onnx(folded, out, opset=settings["opset"])
    print(f"Wrote {out}, {out.stat().st_size / 1024:.0f} KiB")


def _write_numpy(folded: "Folded", out: Path, settings: dict[str, Any]) -> None:
    """Save the fold, and let conformallayers.numpy run it beside torch before it takes its place."""
    import numpy as np
    import torch

    from ..folding.files import save
    from ..lab.experiments.writing import write_whole
    from ..numpy import load
    from ..testing import relative_error

    generator = torch.Generator().manual_seed(0)
    x = torch.rand(16, *folded.input_shape, generator=generator).to(folded.dtype)
    found: list[float] = []

    def write(partial: Path) -> None:
        save(folded, partial)
        y = torch.from_numpy(load(partial)(x.float().numpy()).astype(np.float64))
        with torch.inference_mode():
            found.append(relative_error(y, folded(x).double()))

    write_whole(out, write)
    print(
        f"Wrote {out}, {out.stat().st_size / 1024:.0f} KiB; numpy and torch differ by {found[0]:.1g}"
    )


def _samples(path: Path, folded: "Folded") -> Any:
    """Return the samples of an array as a tensor, as predict would take them."""
    import numpy as np
    import torch

    from ..lab.predict.arrays import Unreadable, count_rows, read_row
    from ..lab.training.saved_models import white_of

    shape, white = folded.input_shape, white_of(folded.about, path)
    try:
        count = count_rows(str(path), shape)
        rows = [read_row(str(path), row, shape, white) for row in range(count)]
    except Unreadable as fault:
        remedy = "Save an array of inputs with numpy.save."
        raise refusal(
            f"export --samples {path}", "samples of the model", str(fault), remedy
        ) from None
    return torch.from_numpy(np.stack(rows))


_WRITERS = {"c": _write_c, "onnx": _write_onnx, "numpy": _write_numpy}

"""conformallayers evaluate, fold, quantize, export, predict, playground and zoo: the commands for trained networks."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import App, Parameter

from ..errors import refusal, shape_text
from ..lab.options import DataOptions, FoldOptions, PredictOptions

if TYPE_CHECKING:
    from ..folding.folded import Folded

T = TypeVar("T")
Flat = Annotated[T, Parameter(name="*")]  # the fields of a class are options of the command


def print_accuracies(images: int, layers: float | None, folded: float | None) -> None:
    """Print the accuracies of both paths on test images."""
    for share, path in ((layers, "layer by layer"), (folded, "folded        ")):
        if share is not None:
            print(f"test accuracy {path} {100 * share:.2f} % of {images} images")


def evaluate(
    model: Path, *, dataset: str | None = None, options: Flat[DataOptions] = DataOptions()
) -> None:
    """Measure the accuracy of a network on test images, folded and layer by layer.

    Args:
        model: Run folder, checkpoint, fold written by cl.save, or a name of the zoo.
        dataset: Data set; by default the one it was trained on.
    """
    from ..lab.training.evaluate import evaluate as measure

    found = measure(model, dataset, options)
    epoch = "" if found["epoch"] is None else f" after epoch {found['epoch']}"
    print(f"{found['network']}{epoch}, {found['dataset']}")
    print_accuracies(found["images"], found["layers"], found["folded"])


def fold(model: Path, *, out: Path, options: Flat[FoldOptions] = FoldOptions()) -> None:
    """Fold a trained network, explain how and why, and save it as one file.

    Args:
        model: Run folder or checkpoint; any network as PACKAGE:FACTORY or FILE.py:FACTORY, called without
            arguments, with --shape and --weights; or a fold, with --labels.
        out: File to write.
    """
    folded = _folded(model, "fold", options)
    print(folded.explain())
    _save(folded, out)


def quantize(
    model: Path,
    *,
    out: Path,
    images: str | None = None,
    data: Flat[DataOptions] = DataOptions(),
    options: Flat[FoldOptions] = FoldOptions(),
) -> None:
    """Quantize a network to 8-bit integers, measure both on test images, and save the result as one file.

    Args:
        model: Run folder, checkpoint, fold written by cl.save, a name of the zoo, or PACKAGE:FACTORY as in
            conformallayers fold.
        out: File to write; conformallayers export takes it.
        images: Data set or folder of pictures; by default that of the training. 512 training images set the
            scales, test images measure the accuracy.
    """
    from ..lab.training.evaluate import quantize_fold

    folded = _folded(model, "quantize", options)
    quantized, found = quantize_fold(folded, images, data)
    print(quantized.quantization)
    print(f"accuracy on {found['images']} test images of {found['dataset']}, pixels from 0 to 1")
    print(f"float {100 * found['float']:.2f} %, int8 {100 * found['int8']:.2f} %")
    _save(quantized, out)


def export(
    model: Path,
    *,
    format: Literal["c", "onnx", "numpy"],
    out: Path | None = None,
    name: str | None = None,
    optimize: Literal["speed", "size"] | None = None,
    example: bool = False,
    report: bool = False,
    options: Flat[FoldOptions] = FoldOptions(),
) -> None:
    """Export a network to C, ONNX, or numpy.

    Args:
        model: Run folder, checkpoint, fold written by cl.save, a name of the zoo, such as digits-micro, or
            PACKAGE:FACTORY as in conformallayers fold.
        format: c (a folder with a header and a source file), onnx (a file), or numpy (a file that
            conformallayers.numpy runs).
        out: Folder or file to write; --report needs none.
        name: Name of the files and functions in C; by default cl_model.
        optimize: speed (the default), or size: C for processors without vectors or with little flash.
        example: Also write an example program in C that runs on any computer, and its Makefile.
        report: Print flash and RAM of the program in C; without --out nothing is written.
    """
    chosen = {"name": name, "optimize": optimize, "example": example}
    given: dict[str, Any] = {key: value for key, value in chosen.items() if value}
    if format != "c" and (given or report):
        names = ", ".join(f"--{name}" for name in given or ["report"])
        raise refusal("export --format", f"c for {names}", format, f"Leave {names} out.")
    if out is None and not report:
        remedy = "Name one; --format c --report needs none."
        raise refusal("export --out", "a folder or file to write", "none", remedy)
    folded = _folded(model, "export", options)
    if format == "c":
        from ..recipe.c.export import export_c

        made = export_c(folded, out or Path(), report=out is None, **given)
        print(made.report if out is None else made)
    elif format == "onnx" and out is not None:
        from ..recipe.onnx.export import export_onnx

        export_onnx(folded, out)
        _print_written(out)
    elif out is not None:
        _save(folded, out)


def predict(
    model: Path, paths: tuple[str, ...], *, options: Flat[PredictOptions] = PredictOptions()
) -> None:
    """Predict the most likely classes of every image; exit with 1 if an image is broken.

    Args:
        model: Run folder, checkpoint, fold written by cl.save, or a name of the zoo, such as
            digits-micro.
        paths: Images, or folders with them.
    """
    from ..lab.predict.predict import run_predict

    if run_predict(model, paths, options):
        sys.exit(1)


def playground(folds: tuple[str, ...] = (), *, out: Path = Path("playground.html")) -> None:
    """Write a web page to draw on, which runs folded networks in JavaScript and needs no server.

    Args:
        folds: Run folders, folds written by cl.save, or names of the zoo, from images to classes; by default mnist-micro.
        out: File to write.
    """
    from ..lab.playground.page import write_playground

    _print_written(write_playground(out, folds))


def _folded(model: Path, command: str, options: FoldOptions) -> "Folded":
    """Return the fold of a run, or a fold as it is, with its labels and notes."""
    import torch

    from ..folding.fold import fold as fold_network
    from ..lab.training.own_networks import plain_network
    from ..lab.training.saved_models import load_model

    dtype = options.dtype and getattr(torch, options.dtype)
    given = {"strategy": options.strategy, "dtype": dtype}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        shape = None if options.shape is None else tuple(map(int, options.shape.split(",")))
    except ValueError as error:
        expected, remedy = "sizes with commas", "Give those of one sample, such as 3,224,224."
        raise refusal(f"{command} --shape", expected, repr(options.shape), remedy) from error
    name = str(model)
    if ":" in name and not model.exists():
        if shape is None:
            expected, remedy = "the shape of one sample", "Give it, such as --shape 3,224,224."
            raise refusal(f"{command} --shape", expected, "none", remedy)
        if options.weights is None:
            print(f"No --weights: {name} keeps the values that it was created with.")
        folded = fold_network(plain_network(name, options.weights).eval(), shape, **chosen)
        folded.about = {"network": name.rpartition(":")[2]}
    elif options.weights is not None:
        remedy = "Leave it out: files and runs have their weights."
        raise refusal(f"{command} --weights", "PACKAGE:FACTORY beside it", name, remedy)
    else:
        loaded = load_model(model, command)
        wanted = shape or chosen or (command == "fold" and options.labels is None)
        if loaded.config is None and wanted:
            remedy = "It is folded already and takes --labels alone."
            raise refusal(command, "a network with layers", f"the fold {model}", remedy)
        folded = loaded.fold(command, shape, **chosen)
    if options.labels is not None:
        labels = tuple(options.labels.read_text("utf-8", errors="replace").splitlines())
        if (len(labels),) != folded.output_shape:
            expected = f"one label for each output of {shape_text(folded.output_shape)}"
            got, remedy = f"{len(labels)} lines", "Write one label on each line."
            raise refusal(f"{command} --labels {options.labels}", expected, got, remedy)
        folded.labels = labels
    return folded


def _save(folded: "Folded", out: Path) -> None:
    from ..folding.save import save

    save(folded, out)
    _print_written(out)


def _print_written(path: Path) -> None:
    print(f"Wrote {path}, {path.stat().st_size / 1024:.0f} KiB")


zoo = App(name="zoo", help="List the trained networks of the package; commands take their names.")


@zoo.default
def list_networks() -> None:
    """List the trained networks of the package."""
    from ..zoo.catalogue import list_records

    print(list_records())


@zoo.command
def card(name: str) -> None:
    """Print the card of a network: accuracy, cost, training, licence and limits.

    Args:
        name: Name of the network, such as digits-micro.
    """
    from ..zoo.catalogue import read_record, require

    print(read_record(require(name, "zoo card", "conformallayers zoo")).card, end="")


@zoo.command
def build(
    runs: tuple[Path, ...], *, out: Path | None = None, options: Flat[DataOptions] = DataOptions()
) -> None:
    """Add finished runs to the zoo, each measured from its file; same names are replaced.

    Args:
        runs: Folders of finished runs.
        out: Folder of the files; by default that of the package.
    """
    from ..lab.zoo import build_zoo
    from ..zoo.catalogue import FOLDER

    build_zoo(runs, out or FOLDER, options)

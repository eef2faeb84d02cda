"""Time folded networks against their layers and against their ReLU counterparts in four engines."""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import networks
from ...folding.fold import fold
from ...folding.folded import Folded
from ...testing import fold_error
from ...utils.files import replace_file, write_json
from ...utils.timing import interleave
from ..checks import command_line, make_folder, require_choice, require_positive
from ..report import figures
from ..training.runs import commit
from .options import BenchOptions
from .records import Row, kept, provenance
from .timing import fastest_other, run_layers

SHAPE = networks.IMAGE_SHAPE
_CALLS = 3  # timed calls per turn
_BUDGET = 40.0  # seconds of timing for one network and batch size; slow ones are called less often
_MAX_NORM = 55.0  # about the norm of a white image, √(3 · 32 · 32)
# A function without arguments that runs one batch.
Engine = Callable[[], object]
Pair = tuple[Callable[[], nn.Module], Callable[[], nn.Module]]


def relu_engines(
    model: nn.Module, x: Tensor, names: tuple[str, ...] = ("eager", "compile", "onnx", "openvino")
) -> tuple[dict[str, Engine], dict[str, str]]:
    """Return the engines that are installed and agree, and the reasons why others are skipped.

    All use the same number of threads.
    """
    builders = {
        "eager": _eager,
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
                notes[name] = f"skipped: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
                continue
            if not torch.allclose(actual, expected, rtol=1e-3, atol=1e-4):
                notes[name] = "skipped: its output differs"
                continue
            engines[name] = run
    return engines, notes


def _eager(model: nn.Module, x: Tensor) -> Engine:
    return torch.inference_mode()(lambda: model(x).clone())


def _compiled(model: nn.Module, x: Tensor) -> Engine:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)

    def run() -> object:
        with torch.no_grad():
            return compiled(x)

    run()
    return run


def _onnxruntime(model: nn.Module, x: Tensor) -> Engine:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    program: Any = torch.onnx.export(
        model, (x,), dynamo=True, verbose=False, external_data=False, optimize=True
    )
    data = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
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


def pairs(depths: Iterable[int]) -> dict[str, Pair]:
    """Return pairs of a ReLU network and its conformal counterpart, by name."""
    found: dict[str, Pair] = {
        "Base": (networks.BaseReLUNet, networks.BaseReSProNet),
        "LeNet": (networks.LeNet, networks.LeNetCL),
        "D3ModNet": (networks.D3ModNet, networks.D3ModNetCL),
    }
    for k in depths:
        found[f"DkNet {k}"] = (partial(networks.DkNet, k), partial(networks.DkNetCL, k))
    for k in depths:
        circular = partial(networks.DkNetCL, k, padding_mode="circular")
        found[f"DkNet {k} circular"] = (partial(networks.DkNet, k), circular)
    return found


def folded_engines(
    model: nn.Module, x: Tensor, folded: Folded, loose: Folded | None
) -> dict[str, Engine]:
    """Return the conformal network layer by layer, folded, and folded with a tolerance."""
    modules: dict[str, nn.Module] = {"layers": model, "folded": folded}
    if loose is not None:
        modules["tolerance"] = loose
    return {name: partial(run_layers, module, x) for name, module in modules.items()}


def measure(name: str, pair: Pair, options: BenchOptions) -> list[Row]:
    """Time one pair of networks at several batch sizes.

    The times of a row are milliseconds per batch: the median and the quartiles.
    """
    torch.manual_seed(0)
    relu, conformal = pair[0]().eval(), pair[1]().eval()
    folded, loose = fold(conformal, SHAPE), None
    if options.tolerance is not None:
        loose = fold(conformal, SHAPE, tolerance=options.tolerance, max_norm=_MAX_NORM)
    rounds = math.ceil(options.executions / _CALLS)
    rows = []
    for batch in options.batch:
        x = torch.rand(batch, *SHAPE, generator=torch.Generator().manual_seed(batch))
        engines, notes = relu_engines(relu, x)
        engines |= folded_engines(conformal, x, folded, loose)
        seconds = interleave(engines, rounds=rounds, calls=_CALLS, budget=_BUDGET)
        rows.append(
            {
                "network": name,
                "batch": batch,
                "strategy": folded.strategy,
                "error": fold_error(conformal, folded, x[:8]),
                "times": {key: list(found.milliseconds.values()) for key, found in seconds.items()},
                "notes": notes,
                "commit": commit(),  # one file may hold rows of several runs
            }
        )
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    header = ["network", "batch", *(f"{name} (ms)" for name in names)]
    header += ["strategy", "fastest other", "speed-up", "error"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        medians = {name: times[0] for name, times in row["times"].items()}
        other = fastest_other(medians)
        speedup = "" if other is None else f"{medians[other] / medians['folded']:.2f}"
        cells = [row["network"], str(row["batch"])]
        cells += [f"{medians[name]:.3f}" if name in medians else "" for name in names]
        cells += [row["strategy"], other or "", speedup, f"{row['error']:.1e}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def save(rows: Sequence[Row], names: Sequence[str], options: BenchOptions) -> None:
    """Write bench.json and bench.md."""
    shown = {key: value for key, value in vars(options).items() if key != "out"}
    source = provenance(command_line(["bench", *names], shown))
    write_json(options.out / "bench.json", {**source, "options": shown, "rows": rows})
    text = f"Times are medians in milliseconds (ms) per batch.\n\n{markdown(rows)}"
    replace_file(options.out / "bench.md", [text.encode()])


def run_bench(names: Sequence[str] = (), **options: Any) -> list[Row]:
    """Measure networks and write bench.json, bench.md and the figure.

    Args:
        names: of networks, such as ``"LeNet"`` or ``"DkNet 9"``; all if empty.
        **options: fields of :class:`conformallayers.lab.experiments.options.BenchOptions`.
    """
    chosen = BenchOptions(**options)
    require_positive("bench", chosen, "batch", "depths", "executions", "threads")
    known = pairs(chosen.depths)
    for name in names:
        require_choice("bench", name, known, "Name a network; --depths adds depths of DkNet.")
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    logging.getLogger("torch").setLevel(logging.ERROR)
    make_folder("bench --out", chosen.out)
    before = kept(chosen.out / "bench.json", {}, chosen.keep, "bench --keep")
    rows: list[Row] = before.get("rows", [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # exporters warn of their own deprecations
        for name in names or known:
            found = measure(name, known[name], chosen)
            print(markdown(found), flush=True)
            again = [_order(row) for row in found]
            rows = [row for row in rows if _order(row) not in again] + found
            rows.sort(key=_order)
            save(rows, names, chosen)  # after every network, so that a stop loses only one
    speedup_figure(rows, chosen.out)
    return rows


def _order(row: Row) -> tuple[str, bool, int, int]:
    """Return the sort key: kind of network, depth, batch size."""
    kind, _, rest = row["network"].partition(" ")
    depth = int(rest.split()[0]) if rest else 0
    return kind, rest.endswith("circular"), depth, row["batch"]


def speedup_figure(rows: list[Row], folder: Path) -> None:
    """Plot the time per batch against depth, one line per engine.

    The batch size is the one with the most depths; there is no figure of a single depth.
    """
    deep = [row for row in rows if _order(row)[:2] == ("DkNet", False)]
    counts = Counter(row["batch"] for row in deep)
    batch, depth_count = counts.most_common(1)[0] if counts else (0, 0)
    if depth_count < 2:
        return
    chosen = {_order(row)[2]: row["times"] for row in deep if row["batch"] == batch}
    with figures.styled(6.4, 4.2) as (figure, axes):
        for name in dict.fromkeys(name for times in chosen.values() for name in times):
            medians = {depth: times[name][0] for depth, times in chosen.items() if name in times}
            width = 2.5 if name in ("folded", "tolerance") else 1
            axes.plot(
                list(medians), list(medians.values()), marker="o", label=name, linewidth=width
            )
        axes.set(xlabel="depth k", ylabel=f"milliseconds, batch of {batch}", yscale="log")
        axes.legend()
    figures.save(figure, folder, "bench")

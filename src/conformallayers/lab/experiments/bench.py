"""Time folded networks against their layers and against their ReLU counterparts in four engines."""

from __future__ import annotations

import json
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from ... import networks
from ...errors import refusal
from ...folding.fold import fold
from ...folding.folded import Folded
from ...nn.container import layer_by_layer
from ...testing import fold_error
from ..report import figures
from ..training.runs import commit
from .engines import Engine, relu_engines
from .records import command_line, provenance
from .timing import Timing, interleave

SHAPE = networks.IMAGE_SHAPE
_BUDGET = 40.0  # seconds of timing for one network and batch size; slow ones get fewer rounds
Pair = tuple[Callable[[], nn.Module], Callable[[], nn.Module]]


def pairs(depths: Iterable[int]) -> dict[str, Pair]:
    """Return each ReLU network beside its conformal counterpart, by name."""
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


@dataclass(frozen=True)
class Row:
    """One network at one batch size; times are milliseconds of a batch, with quartiles."""

    network: str
    batch: int
    strategy: str
    error: float
    times: dict[str, tuple[float, float, float]]
    notes: dict[str, str]
    commit: str | None = None  # rows of several runs may stand together

    @property
    def fastest(self) -> str:
        """The fastest engine of the ReLU counterpart."""
        others = [name for name in self.times if name not in ("folded", "layers", "tolerance")]
        return min(others, key=lambda name: self.times[name][0])

    def speedup(self, name: str = "folded") -> float:
        """How many times as fast as the fastest engine of the ReLU counterpart."""
        return self.times[self.fastest][0] / self.times[name][0]


def folded_engines(
    model: nn.Module, x: torch.Tensor, folded: Folded, loose: Folded | None
) -> dict[str, Engine]:
    """Return the conformal network layer by layer, folded, and folded with a tolerance."""

    def layers() -> object:
        with torch.inference_mode(), layer_by_layer():
            return model(x)

    def run(module: Folded) -> object:
        with torch.inference_mode():
            return module(x)

    engines: dict[str, Engine] = {"layers": layers, "folded": partial(run, folded)}
    if loose is not None:
        engines["tolerance"] = partial(run, loose)
    return engines


def measure(
    name: str, pair: Pair, batches: Iterable[int], *, rounds: int, tolerance: float | None
) -> list[Row]:
    """Time one pair of networks at several batch sizes."""
    torch.manual_seed(0)
    relu, conformal = pair[0]().eval(), pair[1]().eval()
    folded = fold(conformal, SHAPE)
    loose = (
        None if tolerance is None else fold(conformal, SHAPE, tolerance=tolerance, max_norm=55.0)
    )
    rows = []
    for batch in batches:
        x = torch.rand(batch, *SHAPE, generator=torch.Generator().manual_seed(batch))
        engines, notes = relu_engines(relu, x)
        engines |= folded_engines(conformal, x, folded, loose)
        seconds = interleave(engines, rounds=rounds, budget=_BUDGET)
        times = {key: _milliseconds(value) for key, value in seconds.items()}
        error = fold_error(conformal, folded, x[:8])
        rows.append(Row(name, batch, folded.strategy, error, times, notes, commit()))
    return rows


def markdown(rows: list[Row]) -> str:
    """Write the rows as a table."""
    names = list(dict.fromkeys(name for row in rows for name in row.times))
    header = ["network", "batch", *names, "strategy", "fastest other", "speed-up", "error"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        cells = [row.network, str(row.batch)]
        cells += [f"{row.times[n][0]:.3f}" if n in row.times else "" for n in names]
        cells += [row.strategy, row.fastest, f"{row.speedup():.2f}", f"{row.error:.1e}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def save(rows: list[Row], folder: Path, options: dict[str, Any]) -> None:
    """Write bench.json and bench.md."""
    folder.mkdir(parents=True, exist_ok=True)
    source = provenance(command_line(["bench"], options))
    result = {**source, "options": options, "rows": [asdict(row) for row in rows]}
    (folder / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "bench.md").write_text(markdown(rows))


def run_bench(
    out: Path,
    names: Sequence[str],
    batches: Sequence[int],
    depths: Sequence[int],
    rounds: int,
    tolerance: float | None,
    threads: int | None,
    keep: bool = False,
) -> list[Row]:
    """Measure the named networks (all, if none is named) and write table, JSON and figure.

    With ``keep`` the rows of an earlier run stay, except those that are measured again.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    known = pairs(depths)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise refusal(
            "bench", f"networks among {', '.join(known)}", ", ".join(unknown), "See --help."
        )
    logging.getLogger("torch").setLevel(logging.ERROR)
    rows = _earlier(out) if keep else []
    options = {"batch": tuple(batches), "depth": tuple(depths), "rounds": rounds}
    options |= {"tolerance": tolerance, "threads": threads, "keep": keep}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # exporters speak of their own deprecations
        for name in names or known:
            found = measure(name, known[name], batches, rounds=rounds, tolerance=tolerance)
            print(markdown(found), flush=True)
            again = {(row.network, row.batch) for row in found}
            rows = [row for row in rows if (row.network, row.batch) not in again] + found
            rows.sort(key=_order)
            save(rows, out, options)  # after every network: a stop costs one of them
    speedup_figure(rows, out)
    return rows


def _order(row: Row) -> tuple[str, bool, int, int]:
    """Sort by kind of network, then depth, then batch size."""
    kind, _, rest = row.network.partition(" ")
    depth = int(rest.split()[0]) if rest else 0
    return kind, rest.endswith("circular"), depth, row.batch


def _earlier(folder: Path) -> list[Row]:
    """Read the rows of the last run, if there was one."""
    path = folder / "bench.json"
    if not path.exists():
        return []
    try:
        return [Row(**row) for row in json.loads(path.read_text())["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise refusal(
            f"bench --keep ({path})", "the rows of an earlier run", str(error), "Remove the file."
        ) from error


def speedup_figure(rows: list[Row], folder: Path) -> None:
    """Draw the time of a batch against depth, one line an engine, for the size with most depths."""
    deep = [r for r in rows if r.network.startswith("DkNet ") and r.network[-1].isdigit()]
    counts = Counter(row.batch for row in deep)
    if not counts:
        return
    smallest = counts.most_common(1)[0][0]
    chosen = sorted((r for r in deep if r.batch == smallest), key=lambda r: int(r.network[6:]))
    if len(chosen) < 2:
        return
    depths = [int(row.network.split()[1]) for row in chosen]
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(name for row in chosen for name in row.times):
        points = [
            (k, r.times[name][0]) for k, r in zip(depths, chosen, strict=True) if name in r.times
        ]
        bold = name in ("folded", "tolerance")
        axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if bold else 1)
    axes.set(xlabel="depth k", ylabel=f"milliseconds, batch of {smallest}", yscale="log")
    axes.legend()
    figures.save(figure, folder, "bench")


def _milliseconds(timing: Timing) -> tuple[float, float, float]:
    return tuple(round(1e3 * value, 4) for value in (timing.median, timing.low, timing.high))  # type: ignore[return-value]

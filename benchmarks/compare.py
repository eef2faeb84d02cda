"""Compare two checkouts: how long folding and folded networks take, and how exact they are.

    python benchmarks/compare.py OLD NEW [--networks LeNet "DkNet 3"] [--batch 1 64] [--rounds 25]

Each checkout runs in a process of its own that imports its own source. Both build the networks of
``conformallayers bench`` with the same weights. They take turns, with a pause between them, so that a busy
moment of the machine meets both; what counts is the ratio of the medians. A row is marked where the new
checkout is slower by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NETWORKS = ["Base", "LeNet", "D3ModNet", "DkNet 1", "DkNet 3", "DkNet 9", "DkNet 3 circular"]
PAUSE = 0.03  # seconds between two turns: a spinning thread would slow the next process down
LIMIT = 1.05


class Worker:
    """One checkout in a process of its own.

    Args:
        checkout: the folder with ``src``.
        threads: of torch.
    """

    def __init__(self, checkout: Path, threads: int) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout / "src"),
            "CONFORMALLAYERS_CALIBRATE": "0",  # both choose by the same rates
        }
        command = [sys.executable, __file__, "--worker", str(threads)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **question: Any) -> Any:
        """Send a question, and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended early")
        time.sleep(PAUSE)
        return json.loads(line)


def work(threads: int) -> None:
    """Answer questions on standard input until it ends."""
    import torch

    import conformallayers as cl

    torch.set_num_threads(threads)
    models: dict[str, Any] = {}
    folds: dict[tuple[str, bool], Any] = {}
    for line in sys.stdin:
        question = json.loads(line)
        name, loose = question["network"], question.get("tolerance", False)
        if name not in models:
            torch.manual_seed(0)
            models[name] = network(cl, name).eval()
        options = {"tolerance": 1e-3, "max_norm": 55.0} if loose else {}
        if question["do"] == "fold":
            start = time.perf_counter()
            folded = cl.fold(models[name], (3, 32, 32), **options)
            seconds = time.perf_counter() - start
            folds[name, loose] = folded
            x = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
            answer = {
                "seconds": seconds,
                "strategy": folded.strategy,
                "error": cl.fold_error(models[name], folded, x) if question["error"] else None,
            }
        else:
            batch = question["batch"]
            x = torch.rand(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))
            folded = folds[name, loose]
            with torch.inference_mode():
                folded(x)
                start = time.perf_counter()
                for _ in range(question["calls"]):
                    folded(x)
                answer = {"seconds": (time.perf_counter() - start) / question["calls"]}
        print(json.dumps(answer), flush=True)


def network(cl: Any, name: str) -> Any:
    """Return a network by the name that ``conformallayers bench`` has for it."""
    word, *rest = name.split()
    if word == "DkNet":
        options = {"padding_mode": "circular"} if "circular" in rest else {}
        return cl.networks.DkNetCL(int(rest[0]), **options)
    names = {"Base": "BaseReSProNet", "LeNet": "LeNetCL", "D3ModNet": "D3ModNetCL"}
    return getattr(cl.networks, names[word])()


def compare(workers: list[Worker], rounds: int, question: dict[str, Any]) -> list[list[float]]:
    """Return the seconds of each worker; they take turns, the first one first every other time."""
    times: list[list[float]] = [[], []]
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            times[index].append(workers[index].ask(**question)["seconds"])
    return times


def row(label: str, times: list[list[float]], note: str = "") -> bool:
    """Print one comparison; return whether the new checkout is as fast as the old one."""
    old, new = (statistics.median(values) for values in times)
    good = new <= LIMIT * old
    mark = "" if good else "  slower"
    print(
        f"{label:<34}{1e3 * old:>10.3f}{1e3 * new:>10.3f}{new / old:>8.3f}{mark}  {note}",
        flush=True,
    )
    return good


def main() -> None:
    """Compare two checkouts, and exit with 1 if a row is slower."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64, 1024])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    workers = [Worker(checkout, options.threads) for checkout in (options.old, options.new)]
    print(f"{'milliseconds':<34}{'old':>10}{'new':>10}{'ratio':>8}")
    good = True
    for name in options.networks:
        for loose in (False, True):
            question = {"network": name, "tolerance": loose}
            first = [w.ask(do="fold", error=True, **question) for w in workers]
            note = "; ".join(f"{a['strategy']}, error {a['error']:.1e}" for a in first)
            label = f"{name}{', tolerance' if loose else ''}"
            fold = {"do": "fold", "error": False, **question}
            slow = max(answer["seconds"] for answer in first) > 5
            good &= row(f"{label}: fold", compare(workers, 2 if slow else 7, fold), note)
            for batch in options.batch:
                call = {"do": "run", "batch": batch, "calls": 10 if batch == 1 else 3, **question}
                good &= row(f"{label}: batch {batch}", compare(workers, options.rounds, call))
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]))
    else:
        main()

"""Compare two checkouts: how long folding and folded networks take, and how exact they are.

    python benchmarks/compare.py OLD NEW [--networks LeNet "DkNet 3"] [--torch 64] [--onnx 1 64]

Each checkout runs in processes of its own that import its own source. Both build the networks of
``conformallayers bench`` with the same weights. They take turns, with a pause between them, so that a busy
moment of the machine meets both. One process may be a tenth slower than the next for all its life, so there
are several pairs of them; what counts is the ratio of the medians over all turns. A row is marked where the new
checkout is slower by more than 10 %.
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

NETWORKS = [
    "LeNet",
    "D3ModNet",
    "DkNet 1",
    "DkNet 3",
    "DkNet 9",
    "StageNet-micro",
    "StageNet-large",
]
PAUSE = 0.03  # seconds between two turns: a spinning thread would slow the next process down
LIMIT = 1.1
SHAPE = (3, 32, 32)
Row = dict[str, Any]


class Worker:
    """One checkout in a process of its own.

    Args:
        checkout: the folder with ``src``.
        threads: of torch and ONNX Runtime.
    """

    def __init__(self, checkout: Path, threads: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout.absolute() / "src")}
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
    runs: dict[tuple[str, str], Any] = {}
    for line in sys.stdin:
        question = json.loads(line)
        name, engine, batch = question["network"], question["engine"], question["batch"]
        if name not in models:
            torch.manual_seed(0)
            models[name] = network(cl, name).eval()
        start = time.perf_counter()
        if engine == "fold" or (name, "torch") not in runs:
            runs[name, "torch"] = cl.fold(models[name], SHAPE)
        answer: Row = {"seconds": time.perf_counter() - start}
        folded = runs[name, "torch"]
        x = torch.rand(batch, *SHAPE, generator=torch.Generator().manual_seed(batch))
        if engine == "fold":
            answer["strategy"] = folded.strategy
            answer["error"] = cl.fold_error(models[name], folded, x)
        else:
            if (name, engine) not in runs:
                runs[name, engine] = cl.Session(folded, engine=engine, threads=threads)
            run = runs[name, engine]
            given = x if engine == "torch" else x.numpy()
            with torch.inference_mode():
                run(given)
                start = time.perf_counter()
                for _ in range(question["calls"]):
                    run(given)
            answer["seconds"] = (time.perf_counter() - start) / question["calls"]
        print(json.dumps(answer), flush=True)


def network(cl: Any, name: str) -> Any:
    """Return a network by the name that ``conformallayers bench`` has for it."""
    word, _, rest = name.replace("-", " ").partition(" ")
    if word == "StageNet":
        return cl.networks.StageNet(rest)
    return getattr(cl.networks, f"{word}CL")(*map(int, rest.split()))


def measure(pairs: list[list[Worker]], rounds: int, question: Row) -> Row:
    """Return the medians of both checkouts in milliseconds and their ratio; pairs take turns, and so do their workers."""
    times: list[list[float]] = [[], []]
    for turn in range(max(rounds, len(pairs))):
        workers = pairs[turn % len(pairs)]
        for index in (0, 1) if turn // len(pairs) % 2 == turn % 2 else (1, 0):
            times[index].append(workers[index].ask(**question)["seconds"])
    old, new = (1e3 * statistics.median(found) for found in times)
    return {"old": old, "new": new, "ratio": new / old}


def questions(networks: list[str], batches: dict[str, list[int]]) -> dict[str, Row]:
    """Return what to ask for each row, by the name of the row."""
    found: dict[str, Row] = {}
    for name in networks:
        found[f"{name}: fold"] = {"network": name, "engine": "fold", "batch": 8}
        for engine, sizes in batches.items():
            for batch in sizes:
                asked = {"network": name, "engine": engine, "batch": batch}
                found[f"{name}: {engine}, batch {batch}"] = asked | {
                    "calls": 10 if batch == 1 else 3
                }
    return found


def main() -> None:
    """Compare two checkouts, and exit with 1 if a row is slower."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--torch", nargs="*", type=int, default=[64])
    parser.add_argument("--onnx", nargs="*", type=int, default=[1, 64])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    checkouts = [options.old, options.new]
    pairs = [[Worker(c, options.threads) for c in checkouts] for _ in range(options.pairs)]
    print(f"{'milliseconds':<40}{'old':>10}{'new':>10}{'ratio':>8}")
    slower = 0
    batches = {"torch": options.torch, "onnxruntime": options.onnx}
    for label, question in questions(options.networks, batches).items():
        folds = question["engine"] == "fold"
        row = measure(pairs, 3 if folds else options.rounds, question)
        slow = row["ratio"] > LIMIT
        slower += slow
        note = ""
        if folds:
            answers = [worker.ask(**question) for worker in pairs[0]]
            note = "; ".join(f"{one['strategy']}, error {one['error']:.1e}" for one in answers)
        times = f"{row['old']:>10.3f}{row['new']:>10.3f}{row['ratio']:>8.3f}"
        print(f"{label:<40}{times}{'  slower' if slow else '':<8}  {note}".rstrip(), flush=True)
    raise SystemExit(1 if slower else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]))
    else:
        main()

"""Compare two checkouts: how long folding and folded networks take, and how exact they are.

    python benchmarks/compare.py OLD NEW [--networks LeNet "DkNet 3"] [--batch 1 64] [--out FILE]

Each checkout runs in processes of its own that import its own source. Both build the networks of
``conformallayers bench`` with the same weights. They take turns, with a pause between them, so that a busy
moment of the machine meets both. One process may be a tenth slower than the next for all its life, so there
are several pairs of them; what counts is the ratio of the medians over all turns. A row is marked where the new
checkout is slower by more than 5 %. Every row is written to a file when it is measured, and a row that the
file has for the same two commits is not measured again.
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

DEPTHS = (1, 3, 9, 13, 30)
NETWORKS = [
    *("Base", "LeNet", "D3ModNet"),
    *(f"DkNet {depth}" for depth in DEPTHS),
    *(f"DkNet {depth} circular" for depth in DEPTHS),
]
PAUSE = 0.03  # seconds between two turns: a spinning thread would slow the next process down
LIMIT = 1.05
LONG = 5.0  # seconds: what takes longer is repeated once for each pair only
BUDGET = 60.0  # seconds of a row; but there are five turns at least
Row = dict[str, Any]


class Worker:
    """One checkout in a process of its own.

    Args:
        checkout: the folder with ``src``.
        threads: of torch.
    """

    def __init__(self, checkout: Path, threads: int) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout.absolute() / "src"),
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

    def timed_fold(name: str, loose: bool) -> float:
        if name not in models:
            torch.manual_seed(0)
            models[name] = network(cl, name).eval()
        options = {"tolerance": 1e-3, "max_norm": 55.0} if loose else {}
        start = time.perf_counter()
        folds[name, loose] = cl.fold(models[name], (3, 32, 32), **options)
        return time.perf_counter() - start

    for line in sys.stdin:
        question = json.loads(line)
        key = name, _ = question["network"], question["tolerance"]
        batch, calls = question.get("batch"), question.get("calls", 1)
        if batch is None or key not in folds:
            seconds = timed_fold(*key)
        x = torch.rand(batch or 8, 3, 32, 32, generator=torch.Generator().manual_seed(batch or 1))
        if batch is not None:
            with torch.inference_mode():
                folds[key](x)
                start = time.perf_counter()
                for _ in range(calls):
                    folds[key](x)
                seconds = (time.perf_counter() - start) / calls
        answer: Row = {"seconds": seconds}
        if question.get("describe"):
            answer["strategy"] = folds[key].strategy
            answer["error"] = cl.fold_error(models[name], folds[key], x)
        print(json.dumps(answer), flush=True)


def network(cl: Any, name: str) -> Any:
    """Return a network by the name that ``conformallayers bench`` has for it."""
    word, *rest = name.split()
    if word == "DkNet":
        options = {"padding_mode": "circular"} if "circular" in rest else {}
        return cl.networks.DkNetCL(int(rest[0]), **options)
    names = {"Base": "BaseReSProNet", "LeNet": "LeNetCL", "D3ModNet": "D3ModNetCL"}
    return getattr(cl.networks, names[word])()


def in_turns(pairs: list[list[Worker]], rounds: int, question: Row) -> list[list[float]]:
    """Return the seconds of both checkouts: pairs take turns, and so do the workers of a pair."""
    times: list[list[float]] = [[], []]
    started = time.monotonic()
    for turn in range(max(rounds, len(pairs))):
        if turn >= 5 and time.monotonic() - started > BUDGET:
            break
        workers = pairs[turn % len(pairs)]
        for index in (0, 1) if turn // len(pairs) % 2 == turn % 2 else (1, 0):
            times[index].append(workers[index].ask(**question)["seconds"])
    return times


def measure(pairs: list[list[Worker]], rounds: int, question: Row) -> Row:
    """Return the medians of both checkouts in milliseconds, their ratio, and what was folded."""
    row: Row = {}
    if "batch" not in question:
        first = [worker.ask(describe=True, **question) for worker in pairs[0]]
        row = {key: [answer[key] for answer in first] for key in ("strategy", "error")}
        rounds = 2 if max(answer["seconds"] for answer in first) > LONG else 9
    old, new = (statistics.median(times) for times in in_turns(pairs, rounds, question))
    return {"old_ms": 1e3 * old, "new_ms": 1e3 * new, "ratio": new / old, **row}


def questions(networks: list[str], batches: list[int]) -> dict[str, Row]:
    """Return what to ask for each row, by the name of the row."""
    found: dict[str, Row] = {}
    for loose in (False, True):
        for name in networks:
            label = f"{name}{', tolerance' if loose else ''}"
            fold = {"network": name, "tolerance": loose}
            found[f"{label}: fold"] = fold
            for batch in batches:
                calls = 10 if batch == 1 else 3
                found[f"{label}: batch {batch}"] = {**fold, "batch": batch, "calls": calls}
    return found


def rows_of(path: Path, commits: list[str]) -> dict[str, Row]:
    """Return the rows that a file has for two commits, by their names."""
    text = path.read_text("utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # the last line was cut
        path.write_text(whole, "utf-8")
    rows = [json.loads(line) for line in whole.splitlines()]
    return {row["row"]: row for row in rows if row["commits"] == commits}


def commit(checkout: Path) -> str:
    """Return the commit of a checkout, marked if it has changes."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Compare two checkouts, and exit with 1 if a row is slower."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64, 1024])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("compare.jsonl"))
    options = parser.parse_args()
    checkouts = [options.old, options.new]
    commits = [commit(checkout) for checkout in checkouts]
    done = rows_of(options.out, commits)
    pairs = [[Worker(c, options.threads) for c in checkouts] for _ in range(options.pairs)]
    print(f"{'milliseconds':<34}{'old':>10}{'new':>10}{'ratio':>8}")
    slower = 0
    for label, question in questions(options.networks, options.batch).items():
        row = done.get(label)
        if row is None:
            row = {"row": label, "commits": commits, **measure(pairs, options.rounds, question)}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        slow = row["ratio"] > LIMIT
        slower += slow
        folds = zip(row.get("strategy", []), row.get("error", []), strict=True)
        note = "; ".join(f"{strategy}, error {error:.1e}" for strategy, error in folds)
        times = f"{row['old_ms']:>10.3f}{row['new_ms']:>10.3f}{row['ratio']:>8.3f}"
        print(f"{label:<34}{times}{'  slower' if slow else '':<8}  {note}".rstrip(), flush=True)
    raise SystemExit(1 if slower else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]))
    else:
        main()

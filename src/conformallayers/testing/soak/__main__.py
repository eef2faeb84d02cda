"""python -m conformallayers.testing.soak --minutes N --seed S [--only KIND] [--case K] [--jobs J]."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from multiprocessing import get_context

import torch

from ...utils.text import table
from . import certificates, files, nets, runtimes, stale
from .case import Case

ATTACKS: dict[str, Callable[[Case], None]] = {
    "nets": nets.attack,
    "files": files.attack,
    "stale": stale.attack,
    "certificates": certificates.attack,
    "runtimes": runtimes.attack,
}


def soak(
    seed: int, minutes: float, kinds: list[str], first: int = 0, step: int = 1
) -> tuple[Counter[str], list[str]]:
    """Run cases of all kinds in turn until the time is over; return counts and findings."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    findings: list[str] = []
    end = time.monotonic() + 60 * minutes
    number = first
    while time.monotonic() < end:
        case = Case(kinds[number % len(kinds)], seed, number // len(kinds))
        findings += run(case)
        counts += case.counts
        number += step
    return counts, findings


def run(case: Case) -> list[str]:
    """Run a case and print its findings; return them."""
    case.run(ATTACKS[case.kind])
    if case.findings:
        print(case.report, flush=True)
    return case.findings


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if there were findings."""
    os.environ.setdefault("CONFORMALLAYERS_CALIBRATE", "0")  # "auto" chooses alike on every machine
    options = _options(arguments)
    kinds = [options.only] if options.only else list(ATTACKS)
    print(f"seed {options.seed}", flush=True)
    for line in runtimes.missing() if "runtimes" in kinds else ():
        print(f"skipped: {line}")
    if options.case is not None:
        case = Case(kinds[0], options.seed, options.case)
        findings, counts = run(case), case.counts
    elif options.jobs == 1:
        counts, findings = soak(options.seed, options.minutes, kinds)
    else:
        counts, findings = _in_processes(options.seed, options.minutes, kinds, options.jobs)
    counts["findings"] = len(findings)
    print(
        table(("count", "number"), [(name, f"{value}") for name, value in sorted(counts.items())])
    )
    return 1 if findings else 0


def _in_processes(
    seed: int, minutes: float, kinds: list[str], jobs: int
) -> tuple[Counter[str], list[str]]:
    total: Counter[str] = Counter()
    findings: list[str] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(soak, seed, minutes, kinds, job, jobs) for job in range(jobs)]
        for job in running:
            try:
                counts, found = job.result()
            except BrokenProcessPool:
                findings.append("a process died; --jobs 1 shows in which case")
                continue
            total += counts
            findings += found
    return total, findings


def _options(arguments: list[str] | None) -> argparse.Namespace:
    today = int(datetime.now(UTC).strftime("%Y%m%d"))
    parser = argparse.ArgumentParser(
        prog="python -m conformallayers.testing.soak", description=__doc__
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=today, help="the day, unless given")
    parser.add_argument("--only", choices=sorted(ATTACKS), help="one kind of attack")
    parser.add_argument("--case", type=int, help="run this one case; needs --only")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(arguments)
    if options.case is not None and options.only is None:
        parser.error("--case needs --only")
    return options


if __name__ == "__main__":
    raise SystemExit(main())

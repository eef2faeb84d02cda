"""Run cases of every kind, in one process or in several."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch

from soak import expansion, files, networks, readers, runtimes, stale
from soak.case import Case

ATTACKS: dict[str, Callable[[Case], None]] = {
    "networks": networks.attack,
    "expansion": expansion.attack,
    "files": files.attack,
    "readers": readers.attack,
    "stale": stale.attack,
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


def soak_in_processes(
    seed: int, minutes: float, kinds: list[str], jobs: int
) -> tuple[Counter[str], list[str]]:
    """Run cases of all kinds in several processes, each its own share of them."""
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

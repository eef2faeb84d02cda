"""One random case: its seed, its limit of time, its counts and findings."""

from __future__ import annotations

import resource
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from traceback import extract_tb
from typing import Any

SECONDS = 600  # of one case; most take milliseconds
_PACKAGE = "conformallayers/"


@dataclass
class Case:
    """A case with its counts and findings; the seed of the run, the kind and the number determine all that is random."""

    kind: str
    seed: int
    number: int
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    subject: str = ""  # the attacked model, for the report

    def __post_init__(self) -> None:
        self.rng = Random(f"{self.seed}/{self.kind}/{self.number}")

    @property
    def report(self) -> str:
        """The findings, below the command that reproduces them."""
        options = f"--seed {self.seed} --case {self.number} --only {self.kind}"
        command = f"python -m soak {options}"
        return "\n".join([command, *self.findings, self.subject])

    def find(self, text: str) -> None:
        """Note a broken promise."""
        self.findings.append(text)

    def run(self, attack: Callable[[Case], None]) -> None:
        """Run an attack within its limit of time; an exception is a finding too."""
        self.counts[f"{self.kind}: cases"] += 1
        try:
            with _limited_time(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attack(self)
        except Exception as error:
            self.find(f"{type(error).__name__}: {str(error)[:600]} ({place_of(error)})")


def place_of(error: BaseException) -> str:
    """Return the innermost file and line of the package that an exception passed."""
    frames = [frame for frame in extract_tb(error.__traceback__) if _PACKAGE in frame.filename]
    return f"{frames[-1].filename.rpartition(_PACKAGE)[2]}:{frames[-1].lineno}" if frames else ""


class OutOfTime(Exception):
    """A case takes longer than its limit; no TimeoutError, since code under test may catch an OSError."""


def _stop(number: int, frame: Any) -> None:
    raise OutOfTime(f"more than {SECONDS} s")


@contextmanager
def _limited_time() -> Iterator[None]:
    """Stop a case that takes too long."""
    held = signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, held)


@contextmanager
def limited_memory(amount: int) -> Iterator[None]:
    """Let the process ask for so many bytes more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + amount
    ends = [end for end in before if end != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([most, *ends]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

"""One random case: its seed, its limits of time and memory, its counts and findings."""

from __future__ import annotations

import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from traceback import extract_tb
from typing import Any

try:
    import resource
except ImportError:  # on Windows
    HAS_LIMITS = False
else:
    HAS_LIMITS = True

CPU_SECONDS = 120  # of one case; most take milliseconds
WALL_SECONDS = 900  # of one case that waits for something
_PACKAGE = "conformallayers/"
MEMORY = 6 * 2**30  # bytes that a case may ask for


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
        command = f"python -m conformallayers.testing.soak {options}"
        return "\n".join([command, *self.findings, self.subject])

    def find(self, text: str) -> None:
        """Note a broken promise."""
        self.findings.append(text)

    def run(self, attack: Callable[[Case], None]) -> None:
        """Run an attack within its limits; an exception is a finding too."""
        self.counts[f"{self.kind}: cases"] += 1
        try:
            with _limited_time(), limited_memory(MEMORY), warnings.catch_warnings():
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
    raise OutOfTime(f"more than {CPU_SECONDS} s of CPU or {WALL_SECONDS} s")


@contextmanager
def _limited_time() -> Iterator[None]:
    """Stop a case that takes too long, where the system can."""
    if not HAS_LIMITS:
        yield
        return
    kinds = (signal.SIGPROF, signal.SIGALRM)
    held = [signal.signal(kind, _stop) for kind in kinds]
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, handler in zip(kinds, held, strict=True):
            signal.signal(kind, handler)


@contextmanager
def limited_memory(amount: int) -> Iterator[None]:
    """Let the process ask for so many bytes more, where the system has such a limit."""
    if not HAS_LIMITS:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space() + amount
    ends = [end for end in before if end != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([most, *ends]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _address_space() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return 2**36

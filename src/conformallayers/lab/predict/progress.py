"""What a user sees on standard error: a bar on a terminal, and a line about everything broken."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TextIO

from .engines import Network
from .items import STANDARD_INPUT, items


class Bar:
    """A progress bar on standard error, if that is a terminal and the rows go elsewhere.

    Args:
        paths: what is gone through; counted beforehand where that is possible.
        network: tells what a sample is.
        stream: of the rows.
    """

    def __init__(self, paths: Sequence[str], network: Network, stream: TextIO) -> None:
        self._progress: Any = None
        self._task: Any = None
        if not sys.stderr.isatty() or stream.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        console = Console(stderr=True)
        quiet: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
        self._progress = Progress(*columns, console=console, transient=True, **quiet)
        total = None
        if STANDARD_INPUT not in paths:
            total = sum(1 for _ in items(paths, network.shape))
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, count: int) -> None:
        """Go on by so many samples."""
        if self._progress is not None:
            self._progress.advance(self._task, count)

    def say(self, line: str) -> None:
        """Write a line above the bar."""
        if self._progress is None:
            print(f"conformallayers: {line}", file=sys.stderr)
        else:
            plain = {"markup": False, "highlight": False, "soft_wrap": True}
            self._progress.console.print(f"conformallayers: {line}", **plain)

    def end(self, line: str) -> None:
        """Write the last line."""
        print(line, file=sys.stderr)

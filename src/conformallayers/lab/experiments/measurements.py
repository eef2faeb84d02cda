"""Measure the rows of an experiment one by one, resumable at every row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..report import figures
from .records import Row, command_line, kept, provenance, write_record


class Measurements:
    """Rows on disk are kept, missing rows are measured, and every new row is written at once.

    Writes NAME.json with the rows and their provenance, NAME.csv with the rows, and the figure.

    Args:
        words: the command, such as ``("experiment", "3")``.
        settings: options that every row depends on; a record with other values is not resumed.
        selection: further options, which choose the rows.
        out: the folder.
        name: of the files.
        resume: keep the rows in the folder.
        key: returns the value that identifies a row.
        line: returns the line that reports a new row.
        say: prints a line.
        sort: keep the rows sorted by their keys.
        lists: names of further lists of rows in the record.
    """

    def __init__(
        self,
        words: Sequence[str],
        settings: Row,
        selection: Row,
        *,
        out: Path,
        name: str,
        resume: bool,
        key: Callable[[Row], Any],
        line: Callable[[Row], str],
        say: Callable[[str], object],
        sort: bool = False,
        lists: Sequence[str] = (),
    ) -> None:
        self._out, self._name, self._line, self._sort, self.say = out, name, line, sort, say
        before = kept(out / f"{name}.json", settings, resume)
        self.rows: dict[Any, Row] = {key(row): row for row in before.get("rows", [])}
        self.lists: dict[str, list[Row]] = {name: before.get(name, []) for name in lists}
        shown = {**settings, **selection}
        self._resume = command_line(words, {**shown, "out": out, "resume": True})
        self._source = {**provenance(command_line(words, shown), before), "options": settings}
        if settings["threads"] is not None:
            self._source["machine"]["threads"] = settings["threads"]

    @property
    def record(self) -> Row:
        """The contents of the JSON file."""
        return {**self._source, "rows": list(self.rows.values()), **self.lists}

    def row(self, key: Hashable, measure: Callable[[], Row]) -> Row:
        """Return the row of a key, measured now if it is missing."""
        if key not in self.rows:
            self.rows[key] = measure()
            if self._sort:
                self.rows = dict(sorted(self.rows.items()))
            self.say(self._line(self.rows[key]))
            self.write()
        return self.rows[key]

    def write(self) -> None:
        """Write the JSON and the CSV file."""
        write_record(self._out, self._name, self.record, list(self.rows.values()))

    @contextmanager
    def drawing(self, draw: Callable[[list[Row]], Figure]) -> Iterator[None]:
        """Draw the figure at the end, also after an interrupt, which then says how to resume."""
        try:
            yield
        except KeyboardInterrupt as stop:
            done = f"Interrupted: {len(self.rows)} rows kept."
            raise KeyboardInterrupt(f"{done} To go on: {self._resume}") from stop
        finally:
            measured = [row for row in self.rows.values() if "failed" not in row]
            if measured:
                figures.save(draw(measured), self._out, "figure")

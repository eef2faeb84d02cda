"""Records of measurements: rows with the command, the commit and the machine they come from."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from ...errors import refusal
from ...utils.files import write_json
from ..checks import command_line, make_folder, require_same
from ..training.runs import commit

Row = dict[str, Any]
_FOLDERS = ("out", "runs", "data_root", "resume")  # options that no record names


def provenance(command: str, before: Row | None = None) -> Row:
    """Return the command, the commit and the machine; those of a resumed record come first."""
    machine = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    now = {"command": (command, " && "), "commit": (commit() or "unknown", ", ")}
    found: Row = {}
    for key, (text, separator) in now.items():
        earlier = ((before or {}).get(key) or text).split(separator)
        found[key] = separator.join(dict.fromkeys([*earlier, text]))
    return {**found, "machine": machine}


def mean_and_spread(shares: Sequence[float]) -> str:
    """Return the mean in per cent, and the standard deviation of several values.

    Examples:
        >>> mean_and_spread([0.9]), mean_and_spread([0.89, 0.9, 0.91])
        ('90.00 %', '90.00 ± 1.00 %')
    """
    spread = f" ± {100 * stdev(shares):.2f}" if len(shares) > 1 else ""
    return f"{100 * fmean(shares):.2f}{spread} %"


def grouped(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """Group rows by the value of a key, or by a tuple of values, in order of their first rows.

    Examples:
        >>> grouped([{"name": "a", "seed": 0}, {"name": "b"}, {"name": "a", "seed": 1}], "name")
        {'a': [{'name': 'a', 'seed': 0}, {'name': 'a', 'seed': 1}], 'b': [{'name': 'b'}]}
    """
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(itemgetter(*keys)(row), []).append(row)
    return found


def read_record(
    path: Path, where: str, *required: str, remedy: str = "Restore or remove it."
) -> Row:
    """Read a JSON object with the required keys, or refuse the file."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except ValueError:  # not JSON, or not UTF-8
        record = None
    absent = [name for name in required if name not in record] if isinstance(record, dict) else []
    if absent or not isinstance(record, dict):
        expected = "a record in JSON" + (f" with {', '.join(absent)}" if absent else "")
        raise refusal(f"{where}, {path}", expected, "another file", remedy)
    return record


def read_rows(path: Path, where: str) -> list[Row]:
    """Return the rows of a record, none if there is no such file."""
    return list(read_record(path, where, "rows")["rows"]) if path.exists() else []


def _texts(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers and names of a row, the first of every list, and the median of every timing."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            value = value.get("median", value)
        if isinstance(value, list):
            value = next(iter(value), "")
        if isinstance(value, Mapping):
            yield from _texts(value)
        elif name not in ("command", "commit"):
            yield f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


class Measurements:
    """A resumable table, written as NAME.json after every new row.

    Args:
        command: such as ``"experiment 3"``; its options that differ from the defaults are recorded.
        options: of the command; their folder ``out`` is written, and ``resume`` keeps its rows.
        settings: names of options that every row depends on; other values cannot be resumed.
        name: of the file.
        key: names of the fields that identify a row.
        say: receives a line for every new row.
    """

    def __init__(
        self,
        command: str,
        options: Any,
        *,
        settings: Sequence[str],
        name: str,
        key: Sequence[str],
        say: Callable[[str], object],
    ) -> None:
        self._path, self._where, self._key = options.out / f"{name}.json", command, itemgetter(*key)
        self.say, self.settings = say, {name: getattr(options, name) for name in settings}
        before = self._earlier(self._path) if options.resume else {}
        self.rows: dict[Any, Row] = {self._key(row): row for row in before.get("rows", [])}
        self.limits: list[Row] = before.get("limits", [])
        words = shlex.split(command)
        shown = {
            field.name: getattr(options, field.name)
            for field in fields(options)
            if getattr(options, field.name) != field.default and field.name not in _FOLDERS
        }
        self._resume = command_line(words, {**shown, "out": options.out, "resume": True})
        self._source = {**provenance(command_line(words, shown), before), "options": self.settings}
        if options.threads is not None:
            self._source["machine"]["threads"] = options.threads

    def _earlier(self, path: Path) -> Row:
        """Return the record to resume, empty if there is none; refuse one with other options."""
        if not path.exists():
            return {}
        remedy = "Give the same options, or start again without --resume."
        record = read_record(path, "--resume", "options", "rows", remedy=remedy)
        # The options as JSON gives them back: tuples are lists there.
        options = json.loads(json.dumps(self.settings))
        require_same("--resume,", record["options"] or {}, options, remedy)
        return record

    @property
    def record(self) -> Row:
        """The contents of the JSON file."""
        found = {**self._source, "rows": list(self.rows.values())}
        return {**found, "limits": self.limits} if self.limits else found

    def row(self, key: Hashable, measure: Callable[[], Row]) -> Row:
        """Return the row of a key, measured now if it is missing."""
        if key not in self.rows:
            self.add(measure())
        return self.rows[key]

    def add(self, row: Row) -> None:
        """Add a row, or replace the one with the same key; report and write it."""
        self.rows[self._key(row)] = row
        self.say(", ".join(_texts(row)))
        self.write()

    def write(self) -> None:
        """Write the JSON file."""
        write_json(self._path, self.record)

    @contextmanager
    def drawing(self, draw: Callable[[list[Row]], object]) -> Iterator[None]:
        """Draw the measured rows at the end, also after an interrupt, which then says how to resume."""
        make_folder(f"{self._where} --out", self._path.parent)
        stop = None
        try:
            yield
        except KeyboardInterrupt as interrupt:
            done = f"Interrupted: {len(self.rows)} rows kept."
            stop = KeyboardInterrupt(f"{done} To go on: {self._resume}")
            stop.__cause__ = interrupt
        measured = [row for row in self.rows.values() if "failed" not in row]
        if measured:
            draw(measured)
        if stop is not None:
            raise stop

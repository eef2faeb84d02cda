"""Records of measurements: rows with the command, the commit and the machine they come from."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from ...errors import refusal
from ...utils.files import write_csv, write_json
from ..checks import command_line, make_folder, require_folder, require_same
from ..training.runs import commit

Row = dict[str, Any]


def provenance(command: str, before: Row | None = None) -> Row:
    """Return the command, the commit and the machine; those of a resumed record come first."""
    commits = commit() or "unknown"
    if before:
        commands = before["command"].split(" && ")
        if command not in commands:
            commands.append(f"{command} --resume")
        command = " && ".join(dict.fromkeys(commands))
        commits = ", ".join(dict.fromkeys([*(before["commit"] or "unknown").split(", "), commits]))
    machine = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    return {"command": command, "commit": commits, "machine": machine}


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


def earlier_record(
    path: Path, options: Mapping[str, Any], resume: bool, where: str = "--resume"
) -> Row:
    """Return the record to resume, empty if there is none; refuse one with other options."""
    if not resume or not path.exists():
        return {}
    remedy = f"Give the same options, or start again without {where.split()[-1]}."
    record = read_record(path, where, "options", remedy=remedy)
    if not isinstance(record["options"], dict):
        raise refusal(f"{where}, {path}", "a record with options", "another file", remedy)
    # The options as JSON gives them back: tuples are lists there.
    require_same(f"{where},", record["options"], json.loads(json.dumps(dict(options))), remedy)
    return record


def write_record(folder: Path, name: str, record: Row, rows: Sequence[Row]) -> None:
    """Write the record as NAME.json, and its rows, flattened, as NAME.csv."""
    write_json(folder / f"{name}.json", record)
    write_csv(folder / f"{name}.csv", [_flat(row) for row in rows])


def _flat(row: Mapping[str, Any], prefix: str = "") -> Row:
    found: Row = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key} ")
        else:
            found[prefix + key] = value
    return found


@contextmanager
def staged_folder(out: Path, where: str) -> Iterator[Path]:
    """Yield a temporary folder beside ``out``, and move its files there at the end, JSON last.

    An interrupted command leaves ``out`` unchanged.
    """
    require_folder(where, out)
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=parent) as folder:
        yield Path(folder)
        out.mkdir(exist_ok=True)
        for path in sorted(Path(folder).iterdir(), key=lambda path: path.suffix == ".json"):
            os.replace(path, out / path.name)


class Measurements:
    """A resumable table: keep the rows on disk, measure missing ones, write after every new row.

    Writes NAME.json with the rows and their provenance, NAME.csv with the rows.

    Args:
        words: the command, such as ``("experiment", "3")``.
        options: of the command; their folder ``out`` is written, and ``resume`` keeps its rows.
        settings: names of options that every row depends on; other values cannot be resumed.
        selection: names of further options, which choose the rows.
        name: of the files.
        key: names of the fields that identify a row.
        line: formats the line that reports a new row.
        say: prints a line.
        sort: keep the rows sorted by their keys.
        lists: names of further lists of rows in the record.
    """

    def __init__(
        self,
        words: Sequence[str],
        options: Any,
        *,
        settings: Sequence[str],
        selection: Sequence[str],
        name: str,
        key: Sequence[str],
        line: Callable[[Row], str],
        say: Callable[[str], object],
        sort: bool = False,
        lists: Sequence[str] = (),
    ) -> None:
        self._out, self._name, self._line, self._sort = options.out, name, line, sort
        self._where = f"{' '.join(words)} --out"
        self.say, self.settings = say, {name: getattr(options, name) for name in settings}
        before = earlier_record(options.out / f"{name}.json", self.settings, options.resume)
        self._key = itemgetter(*key)
        self.rows: dict[Any, Row] = {self._key(row): row for row in before.get("rows", [])}
        self.lists: dict[str, list[Row]] = {name: before.get(name, []) for name in lists}
        shown = {name: getattr(options, name) for name in (*settings, *selection)}
        self._resume = command_line(words, {**shown, "out": options.out, "resume": True})
        self._source = {**provenance(command_line(words, shown), before), "options": self.settings}
        if options.threads is not None:
            self._source["machine"]["threads"] = options.threads

    @property
    def record(self) -> Row:
        """The contents of the JSON file."""
        return {**self._source, "rows": list(self.rows.values()), **self.lists}

    def row(self, key: Hashable, measure: Callable[[], Row]) -> Row:
        """Return the row of a key, measured now if it is missing."""
        if key not in self.rows:
            self.add(measure())
        return self.rows[key]

    def add(self, row: Row) -> None:
        """Add a row, or replace the one with the same key; report and write it."""
        self.rows[self._key(row)] = row
        if self._sort:
            self.rows = dict(sorted(self.rows.items()))
        self.say(self._line(row))
        self.write()

    def write(self) -> None:
        """Write the JSON and the CSV file."""
        write_record(self._out, self._name, self.record, list(self.rows.values()))

    @contextmanager
    def drawing(self, draw: Callable[[list[Row]], object]) -> Iterator[None]:
        """Draw the measured rows at the end, also after an interrupt, which then says how to resume."""
        make_folder(self._where, self._out)
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

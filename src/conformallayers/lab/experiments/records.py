"""Records of measurements: resumable rows in JSON, with the command, commit and machine, a table and a figure."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ConformalError, refusal
from ...utils.files import replace_file, write_json
from ...utils.text import markdown
from ..checks import command_line, make_folder, require_same
from ..training.run_folder import commit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
Cells = tuple[list[str], list[list[str]]]  # the header and the lines of a table
_FOLDERS = ("out", "data_root", "resume")  # options that no record names


def provenance(command: str, before: Mapping[str, Any] | None = None) -> Row:
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


def read_record(path: Path, where: str, *required: str) -> Row:
    """Read a JSON object with the required keys, or refuse the file."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except ValueError:  # not JSON, or not UTF-8
        record = None
    if not isinstance(record, dict) or not set(required) <= set(record):
        expected = " ".join(["a record in JSON", *(["with", ", ".join(required)] * bool(required))])
        raise refusal(f"{where}, {path}", expected, "another file", "Restore or remove it.")
    return record


def read_rows(path: Path, where: str) -> list[Row]:
    """Return the rows of a record, none if there is no such file."""
    return list(read_record(path, where, "rows")["rows"]) if path.exists() else []


def _texts(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers and names of a row, and the median of every timing."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            value = value.get("median", value)
        if isinstance(value, Mapping):
            yield from _texts(value)
        elif name not in ("command", "commit"):
            yield f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


@dataclass
class Records:
    """Rows of an experiment: NAME.json after every row; at the end NAME.md, and a figure if there is one.

    Used in a ``with`` block, whose end writes table and figure, also after an interrupt, and refuses
    if rows have failed.

    Args:
        command: such as ``"experiment 3"``; its options that differ from the defaults are recorded.
        options: of the command; their folder ``out`` is written, and ``resume`` keeps its rows.
        name: of the files.
        key: names of the fields that identify a row.
        cells: returns the table of the rows.
        figure: returns the figure of the rows.
        figure_name: of its file, if it is another.
        settings: names of options that every row depends on; rows of other values are not resumed.
        say: receives a line for every new row.
    """

    command: str
    options: Any
    name: str
    key: Sequence[str]
    cells: Callable[[list[Row]], Cells]
    figure: Callable[[list[Row]], Figure] | None = None
    figure_name: str | None = None
    settings: Sequence[str] = ()
    say: Callable[[str], object] = print

    def __post_init__(self) -> None:
        options, self._failed = self.options, list[str]()
        self.path = options.out / f"{self.name}.json"
        # The options as JSON gives them back: tuples are lists there.
        settings = json.loads(json.dumps({name: getattr(options, name) for name in self.settings}))
        before: Row = {}
        if options.resume and self.path.exists():
            before = read_record(self.path, self.command, "options", "rows")
            remedy = "Give the same options, another --out, or --no-resume to start again."
            require_same(f"{self.command},", before["options"], settings, remedy)
        self.rows = {itemgetter(*self.key)(row): row for row in before.get("rows", [])}
        changed = {
            field.name: getattr(options, field.name)
            for field in fields(options)
            if getattr(options, field.name) != field.default and field.name not in _FOLDERS
        }
        line = command_line(shlex.split(self.command), changed)
        self._source = {**provenance(line, before), "options": settings}
        if options.threads is not None:
            self._source["machine"]["threads"] = options.threads

    @property
    def record(self) -> Row:
        """The contents of the JSON file."""
        return {**self._source, "rows": list(self.rows.values())}

    def row(self, key: Hashable, measure: Callable[[], Row]) -> None:
        """Measure the row of a key if it is missing; a failure does not stop the others."""
        if key in self.rows:
            return
        try:
            self.add(measure())
        except ConformalError as error:
            name = ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)
            self._failed.append(name)
            self.say(f"{name}: {error}")

    def add(self, row: Row) -> None:
        """Add a row, or replace the one with the same key; report and write it."""
        self.rows[itemgetter(*self.key)(row)] = row
        self.say(", ".join(_texts(row)))
        self.options.out.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.record)

    def __enter__(self) -> Records:
        if self.options.out.exists():  # a folder is created with the first row
            make_folder(f"{self.command} --out", self.options.out)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            return
        measured = [row for row in self.rows.values() if "failed" not in row]
        if measured:
            self._summarise(measured)
        if error is not None:
            done = f"Interrupted: {len(self.rows)} rows kept."
            raise KeyboardInterrupt(f"{done} To go on, repeat the command.") from error
        if self._failed:
            got, remedy = f"the errors above in {'; '.join(self._failed)}", "Repeat the command."
            raise refusal(self.command, "every row measured", got, remedy)

    def _summarise(self, rows: list[Row]) -> None:
        out = self.options.out
        replace_file(out / f"{self.name}.md", [markdown(*self.cells(rows)).encode()])
        if self.figure is not None:
            from ..report import figures

            figures.save(self.figure(rows), out, self.figure_name or self.name)

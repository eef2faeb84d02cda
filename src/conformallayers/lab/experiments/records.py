"""Records of measurements: resumable rows in JSON, with the command, commit and machine, a table and a figure."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ConformalError, refusal
from ...utils.files import replace_file, write_json
from ...utils.text import markdown
from ..checks import command_line, require_same
from ..training.run_folder import commit, readable
from ..training.run_folder import read_record as read_record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
Cells = tuple[list[str], list[list[str]]]  # the header and the lines of a table
_FOLDERS = ("out", "data_root")  # options that no record names


def provenance(command: str, before: Mapping[str, Any] | None = None) -> Row:
    """Return the command, the commit and the machine; those of a resumed record come first."""
    found: Row = {"command": command, "commit": commit() or "unknown"}
    for key, separator in (("command", " && "), ("commit", ", ")):
        earlier = (before or found).get(key, found[key]).split(separator)
        found[key] = separator.join(dict.fromkeys([*earlier, found[key]]))
    found["machine"] = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    return found


def mean_and_spread(shares: Sequence[float]) -> str:
    """Return the mean in per cent, and the standard deviation of several values."""
    spread = f" ± {100 * stdev(shares):.2f}" if len(shares) > 1 else ""
    return f"{100 * fmean(shares):.2f}{spread} %"


def grouped(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """Group rows by the value of a key, or by a tuple of values, in order of their first rows."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(itemgetter(*keys)(row), []).append(row)
    return found


@dataclass
class Records:
    """Rows of an experiment: NAME.json after every row; at the end NAME.md, and NAME.png if there is a figure.

    Rows that exist are kept. Used in a ``with`` block, whose end writes table and figure, also after an
    interrupt, and refuses if rows have failed.
    """

    command: str  # such as "experiment 3"
    options: Any  # of the command; those other than the defaults are recorded
    name: str
    key: Sequence[str]  # fields that identify a row
    cells: Callable[[list[Row]], Cells]
    figure: Callable[[list[Row]], Figure] | None = None
    settings: Sequence[str] = ()  # options that every row depends on; other values are refused

    def __post_init__(self) -> None:
        options, self._failed = self.options, list[str]()
        self.path = options.out / f"{self.name}.json"
        settings = {name: getattr(options, name) for name in self.settings}
        before = read_record(self.path, self.command) if self.path.exists() else {}
        if before:
            remedy = f"Give the same options, another --out, or remove {self.path}."
            require_same(f"{self.command},", before.get("options", {}), settings, remedy)
        with readable(self.command, self.path):
            self.rows = {self._key(row): row for row in before.get("rows", [])}
        changed = {
            field.name: getattr(options, field.name)
            for field in fields(options)
            if getattr(options, field.name) != field.default and field.name not in _FOLDERS
        }
        line = command_line(shlex.split(self.command), changed)
        self._source = {**provenance(line, before), "options": settings}
        options.out.mkdir(parents=True, exist_ok=True)  # or fail before anything is measured

    def _key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)

    @property
    def record(self) -> Row:
        """The contents of the JSON file."""
        return {**self._source, "rows": list(self.rows.values())}

    def row(self, *key: Any, measure: Callable[[], Row]) -> None:
        """Measure the row of a key if it is missing; a failure does not stop the others."""
        if key in self.rows:
            return
        try:
            self.add(measure())
        except ConformalError as error:
            self._failed.append(", ".join(str(word) for word in key if word is not None))
            print(f"{self._failed[-1]}: {error}")

    def add(self, row: Row) -> None:
        """Add a row, or replace the one with the same key; write it, and print its line of the table."""
        key = self._key(row)
        self.rows[key] = row
        write_json(self.path, self.record)
        header, lines = self.cells([row])
        words = [str(word) for word in key]
        for line in lines:
            named = zip((name.partition(", ")[::2] for name in header), line, strict=True)
            shown = [
                f"{n} {cell} {unit}".rstrip() for (n, unit), cell in named if cell not in words
            ]
            print(f"{', '.join(words)}: {', '.join(shown)}")

    def __enter__(self) -> Records:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            return
        rows = list(self.rows.values())
        if rows:
            table = markdown(*self.cells(rows)).encode()
            replace_file(path := self.path.with_suffix(".md"), [table])
            print(f"Wrote {path}")
            if self.figure is not None:
                from ..report import figures

                figures.save(self.figure(rows), self.path.parent, self.name)
        if error is not None:
            done = f"Interrupted: {len(self.rows)} rows kept."
            raise KeyboardInterrupt(f"{done} To go on, repeat the command.") from error
        if self._failed:
            got = f"the errors above in {len(self._failed)} rows"
            raise refusal(self.command, "every row measured", got, "Repeat the command.")

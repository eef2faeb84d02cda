"""Records of measurements: rows with the command, the commit and the machine they come from."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from ...errors import refusal
from ..training.runs import commit
from .writing import write_csv, write_json

Row = dict[str, Any]


def command_line(words: Sequence[str], options: Mapping[str, Any]) -> str:
    """Return a command line without the options that are None, False or empty.

    Examples:
        >>> command_line(["experiment", "3"], {"depths": (1, 2), "batch": 64, "threads": None})
        'conformallayers experiment 3 --depths 1 2 --batch 64'
    """
    line = ["conformallayers", *words]
    for name, value in options.items():
        if value is None or value is False or value == ():
            continue
        values = value if isinstance(value, (tuple, list)) else [value]
        line += [f"--{name.replace('_', '-')}", *(str(v) for v in values if v is not True)]
    return shlex.join(line)


def provenance(command: str, before: Row | None = None) -> Row:
    """Return the command, the commit and the machine of a measurement.

    Args:
        command: the command line of this process.
        before: the record that is resumed; its commands and commits come first.
    """
    commands, commits = command, commit() or "unknown"
    if before:
        done = before["command"].split(" && ")
        more = [] if command in done else [f"{command} --resume"]
        commands = " && ".join([*done, *(line for line in more if line not in done)])
        commits = ", ".join(dict.fromkeys([*(before["commit"] or "unknown").split(", "), commits]))
    machine = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    return {"command": commands, "commit": commits, "machine": machine}


def mean_and_spread(shares: Sequence[float]) -> str:
    """Return the mean in per cent, and the standard deviation of several values.

    Examples:
        >>> mean_and_spread([0.9]), mean_and_spread([0.89, 0.9, 0.91])
        ('90.00 %', '90.00 ± 1.00 %')
    """
    spread = f" ± {100 * stdev(shares):.2f}" if len(shares) > 1 else ""
    return f"{100 * fmean(shares):.2f}{spread} %"


def kept(path: Path, options: Mapping[str, Any], resume: bool) -> Row:
    """Return the record to resume; empty if there is none or ``resume`` is False.

    Args:
        path: the JSON file.
        options: options of the measurement; a record with other options is refused.
        resume: whether to look for a record.
    """
    if not resume or not path.exists():
        return {}
    remedy = "Give the same options, or start again without --resume."
    try:
        record: Row = json.loads(path.read_text("utf-8"))
        before = dict(record["options"])
    except (ValueError, KeyError, TypeError) as error:
        raise refusal(f"--resume, {path}", "a record", "another file", remedy) from error
    for name, value in json.loads(json.dumps(dict(options))).items():
        if before.get(name) != value:
            where = f"--resume, --{name.replace('_', '-')}"
            raise refusal(where, f"{before.get(name)!r} as before", repr(value), remedy)
    return record


def write_record(folder: Path, name: str, record: Row, rows: Sequence[Row]) -> None:
    """Write the record as NAME.json, and its rows, flattened, as NAME.csv."""
    folder.mkdir(parents=True, exist_ok=True)
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

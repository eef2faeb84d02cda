"""PYTHONPATH=tests python -m soak --minutes N --seed S [--only KIND] [--case K] [--jobs J]."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from conformallayers.utils.text import table
from soak import runtimes
from soak.case import Case
from soak.run import ATTACKS, run, soak, soak_in_processes


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if there were findings."""
    options = _options(arguments)
    kinds = [options.only] if options.only else list(ATTACKS)
    print(f"seed {options.seed}", flush=True)
    for line in runtimes.missing() if "runtimes" in kinds else ():
        print(f"skipped: {line}")
    if options.case is not None:
        case = Case(kinds[0], options.seed, options.case)
        findings, counts = run(case), case.counts
    elif options.jobs == 1:
        counts, findings = soak(options.seed, options.minutes, kinds)
    else:
        counts, findings = soak_in_processes(options.seed, options.minutes, kinds, options.jobs)
    counts["findings"] = len(findings)
    print(
        table(("count", "number"), [(name, f"{value}") for name, value in sorted(counts.items())])
    )
    return 1 if findings else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    today = int(datetime.now(UTC).strftime("%Y%m%d"))
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=today, help="the day, unless given")
    parser.add_argument("--only", choices=sorted(ATTACKS), help="one kind of attack")
    parser.add_argument("--case", type=int, help="run this one case; needs --only")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(arguments)
    if options.case is not None and options.only is None:
        parser.error("--case needs --only")
    return options


if __name__ == "__main__":
    raise SystemExit(main())

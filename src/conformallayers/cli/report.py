"""conformallayers report: all results and the paper's numbers on one page."""

from pathlib import Path

from .extras import extra_for


def report(*, results: Path = Path("results"), out: Path | None = None) -> None:
    """Join what was measured with the paper's numbers into one HTML page.

    Args:
        results: The folder that the experiments have written to.
        out: The file; report.html in that folder if not given.
    """
    with extra_for("the report"):
        from ..lab.report.report import write_report
    print(f"Wrote {write_report(results, out)}")

"""The packages of the extra ``experiments``: one line that names it where one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import missing_extra

# What the extra brings: import name → name to install.
_EXPERIMENTS = {
    "cyclopts": "cyclopts",
    "matplotlib": "matplotlib",
    "optuna": "optuna",
    "PIL": "pillow",
    "pydantic": "pydantic",
    "rich": "rich",
    "sklearn": "scikit-learn",
}


@contextmanager
def extra_for(purpose: str) -> Iterator[None]:
    """Turn the failed import of a package of the extra into one line that names the extra."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXPERIMENTS:
            raise
        raise missing_extra(_EXPERIMENTS[package], "experiments", purpose) from error

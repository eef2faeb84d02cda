"""The command line. Heavy imports wait for the command that needs them."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import ClosedPipe, ConformalError, missing_extra

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

_INTERRUPTED = 130  # exit status that shells expect after SIGINT
_CLOSED_PIPE = 141  # and after SIGPIPE


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status; every error is one line on stderr."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    status = 0
    # Scripts start background commands with SIGINT ignored. Under torchrun, SIGTERM is left alone:
    # torchrun ends processes by it that wait for a failed one.
    for number in [signal.SIGINT] if "RANK" in os.environ else [signal.SIGINT, signal.SIGTERM]:
        signal.signal(number, signal.default_int_handler)
    try:
        _run(words)
    except KeyboardInterrupt as stop:
        print(str(stop) or "Interrupted.", file=sys.stderr)
        status = _INTERRUPTED
    except ClosedPipe:
        with suppress(OSError, ValueError):  # or Python would report the pipe when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = _CLOSED_PIPE
    except (ConformalError, OSError) as error:
        said = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}"
        if isinstance(error, FileExistsError):  # of a folder that is to be created
            said = f"{error.filename}: expected a folder, got a file. Name another folder."
        print(f"conformallayers: {said}", file=sys.stderr)
        status = 1
    sys.exit(status)


def _run(words: Sequence[str]) -> None:
    """Run a command; refuse wrong options, and a missing package of the extra, in one line."""
    try:
        app = build_app()
        from cyclopts import CycloptsError

        try:
            app(words, result_action="return_value", exit_on_error=False, print_error=False)
        except CycloptsError as error:
            raise ConformalError(_usage_error(error)) from error
    except ImportError as error:
        # A command that is imported by its name wraps the error.
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        package = (cause.name or "").partition(".")[0]
        if isinstance(error, ConformalError) or package in ("", "conformallayers"):
            raise
        purpose = words[0] if words else "the command line"
        raise missing_extra(package, "experiments", purpose) from error


def _usage_error(error: "CycloptsError") -> str:
    """Return one line about a wrong command line, with a suggestion for an unknown option."""
    from cyclopts import MissingArgumentError, UnknownOptionError, UnusedCliTokensError

    from ..utils.text import suggest

    error.verbose = False
    command = " ".join(["conformallayers", *(error.command_chain or ())])
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name, kind = error.argument.name, error.argument.field_info.kind
        missing = f"{name} VALUE" if kind is kind.KEYWORD_ONLY else name.strip("-").upper()
        return f"{missing} is missing. See {command} --help."
    if isinstance(error, UnusedCliTokensError):
        unused = " ".join(error.unused_tokens or ())
        return f'unexpected "{unused}" after {command}. See {command} --help.'
    if not isinstance(error, UnknownOptionError):
        return " ".join(str(error).split())
    option = (error.token.keyword or error.token.value).partition("=")[0]
    known = [name for argument in error.argument_collection for name in argument.names]
    return f"unknown option {option}.{suggest(option, known)}"


def _default_text(value: object) -> str | None:
    """Write a default as on the command line; omit an empty one, None and False."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or None
    return None if value is None or value is False else str(value)


def build_app() -> "App":
    """Return the commands."""
    from cyclopts import App, Parameter

    from . import experiments, models
    from .data import data

    app = App(
        name="conformallayers",
        help="Train deep, run shallow: train, fold, measure, quantize and export networks.",
        version=__version__,
        suppress_keyboard_interrupt=False,
        default_parameter=Parameter(
            consume_multiple=True, negative_iterable="", show_default=_default_text
        ),
    )
    # The options of train are the fields of a model of pydantic, whose import takes time.
    summary = "Train a network, and measure it folded and layer by layer."
    app.command("conformallayers.cli.train:train", name="train", help=summary)
    for command in (
        *(data, models.evaluate, models.fold, models.quantize, models.export, models.predict),
        *(models.playground, models.zoo),
        *(experiments.demo, experiments.bench, experiments.device, experiments.experiment),
        *(experiments.sweep, experiments.inspect, experiments.report),
    ):
        app.command(command)
    return app

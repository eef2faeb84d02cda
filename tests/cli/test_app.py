"""The command line as a whole: start-up, help, usage errors, missing packages, interrupts."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import conformallayers as cl
from conformallayers.cli import app as cli
from conformallayers.lab.training.config import DERIVED, TrainConfig
from support import run_command


@pytest.mark.parametrize("command", ["--version", "experiment 3 --help", "train --help"])
def test_version_and_help_do_not_import_torch(command: str) -> None:
    words = command.split()
    heavy = {"torch", "numpy", "matplotlib"} | ({"pydantic"} if "train" not in words else set())
    code = (
        "import sys\n"
        "from conformallayers.cli.app import main\n"
        f"try:\n    main({words})\n"
        "except SystemExit as leaving:\n    assert leaving.code == 0\n"
        f"assert not {heavy} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == cl.__version__ or words != ["--version"]


def options_of(*command: str) -> dict[str, str | None]:
    """Return the options and positional arguments of a command, and their help texts."""
    root = cli.build_app()
    app = functools.reduce(lambda app, word: app[word], command, root)
    arguments = app.assemble_argument_collection(
        default_parameter=root.default_parameter, parse_docstring=True
    )
    shown = [argument for argument in arguments if argument.parse and not argument.children]
    return {argument.name: argument.parameter.help for argument in shown}


COMMANDS = [
    *("demo", "bench", "train", "evaluate", "fold", "export", "predict", "sweep", "inspect"),
    *("report", "data list", "data check", "data get"),
    *("experiment 1", "experiment 2", "experiment 3", "experiment 4"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text(command: str) -> None:
    options = options_of(*command.split())
    assert options
    assert [name for name, text in options.items() if not text] == []


def test_options_of_train_are_the_fields_of_its_model() -> None:
    names = set(TrainConfig.model_fields) - set(DERIVED)  # which follow from data set and network
    fields = {f"--{name.replace('_', '-')}" for name in names}
    further = {"--out", "--resume", "--figures", "--data-root", "--check"}
    assert set(options_of("train")) == fields | further


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], 'Unknown command "trian". Did you mean "train"?'),
        (["train", "LeNet", "digits", "--lr", "1"], 'option --lr. Did you mean "--learning-rate"?'),
        (["train", "LeNet", "digits", "--epoch=1"], 'option --epoch. Did you mean "--epochs"?'),
        (["report", "--zzz"], "unknown option --zzz.\n"),
        (["zoo", "list"], 'unexpected "list" after conformallayers zoo. See conformallayers zoo --help.'),
        (["bench", "lenet"], 'got \'lenet\'. Name a network. Did you'),
        (["sweep", "Lenet", "digits"], "conformallayers: network: expected one of MLP, "),
        (["report", "nope"], "report RUN: expected the folder of a finished run, got nope without"),
        (["experiment", "3", "--depths", "1", "0"], 'Invalid value "0" for --depths'),
        (["train", "StageNet", "digits", "--preset", "smal"], 'micro. Did you mean "small"?'),
        (["demo", "--epochs", "0"], 'Invalid value "0" for --epochs. Must be > 0.'),
        (["fold", "run"], "--out VALUE is missing. See conformallayers fold --help."),
        (["fold", "run", "--out"], "--out VALUE is missing."),
        (["train"], "NETWORK is missing. See conformallayers train --help."),
        (["train", "LeNet", "digits", "--threads", "0"], "--threads: expected a value greater than 0, got"),
        (["evaluate", "net.py:Net"], "evaluate net.py:Net: expected a file of cl.save, the folder of a run"),
        (["export", "digits-micro", "--format", "onnx", "--name", "x"], "expected c for --name, got onnx. Leave --name out."),
        (["quantize", "digits-micro", "--out", "/dev/null/x"], "/dev/null/x: Not a directory"),
        (["sweep", "torch.nn:Identity", "digits", "--out", "/dev/null"], "expected parameters to train"),
        (["demo", "--out", __file__], f"{__file__}: expected a folder, got a file. Name another"),
        (["fold", "torch.nn:Identity", "--shape", "3", "--weights", "none", "--out", "x"], "none: No such file"),
        (["experiment", "7", "--variants", "x"], "expected one of plain, 'plain, rate × 0.5', "),
    ],
)  # fmt: skip
def test_wrong_command_lines_are_one_line_with_a_suggestion(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*words) == 1
    error = capsys.readouterr().err
    assert error.startswith("conformallayers: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("module", "package", "command"),
    [("sklearn", "scikit-learn", "demo"), ("rich", "rich", "train")],
)
def test_missing_extra_is_one_line(
    module: str,
    package: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.delitem(sys.modules, "conformallayers.cli.train", raising=False)
    for name in [n for n in sys.modules if n.startswith("conformallayers.lab")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [n for n in sys.modules if n.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    app = cli.build_app()
    monkeypatch.setattr(cli, "build_app", lambda: app)
    monkeypatch.setitem(sys.modules, module, None)
    names = ["LeNetCL", "digits"] if command == "train" else []
    assert run_command(command, *names, "--out", tmp_path / "out") == 1
    message = f"needs {package}: pip install 'conformallayers[experiments]'\n"
    assert capsys.readouterr().err.endswith(message)
    assert not list(tmp_path.iterdir())


def test_interrupt_leaves_one_line_and_no_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from conformallayers.cli.app import main; main()"]
    process = subprocess.Popen(
        [*command, "demo", "--epochs", "100000"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not any(tmp_path.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.05)  # the folder appears when the run starts
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, message
    assert message == "Interrupted.\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

"""The self-test in a program: passes where the program is right, on every compiler, and fails where it is not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from conformallayers.errors import ConformalError
from programs import FLAGS, SANITIZED, compiler, export, small_networks


def self_test(folder: Path, name: str, *command: str) -> int:
    line = ["make", "-f", f"{name}.mk", f"CC={' '.join(command)}", "CFLAGS=-O1"]
    subprocess.run([*line, "clean"], cwd=folder, check=True, capture_output=True)
    built = subprocess.run(
        [*line, f"{name}_example"], cwd=folder, check=False, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return subprocess.run([folder / f"{name}_example"], check=False, capture_output=True).returncode


@pytest.mark.parametrize("machine", ["gcc", pytest.param("clang", marks=pytest.mark.slow)])
def test_programs_pass_and_broken_ones_fail(machine: str, tmp_path: Path) -> None:
    command = [*compiler(machine), *FLAGS, *(SANITIZED if machine == "gcc" else [])]
    for number, fold in enumerate(small_networks().values()):
        made = export(fold, tmp_path, name=f"net{number}", example=True)
        assert self_test(tmp_path, made.name, *command) == 0
    text = made.source.read_text()
    changed = text.replace(
        "return largest(out,", "out[0] += out[0] / 10 + 1;\n    return largest(out,"
    )
    assert changed != text
    made.source.write_text(changed)
    assert self_test(tmp_path, made.name, *command) == 1


@pytest.mark.parametrize("machine", ["gcc", "clang", "arm"])
@pytest.mark.parametrize("level", ["-Os", pytest.param("-O3", marks=pytest.mark.slow)])
def test_every_compiler_takes_the_program_without_a_warning(
    machine: str, level: str, tmp_path: Path
) -> None:
    command = [*compiler(machine), "-std=c99", "-Wall", "-Wextra", "-Werror", level, "-c"]
    for number, fold in enumerate(small_networks().values()):
        made = export(fold, tmp_path, name=f"net{number}")
        line = [*command, f"-DNET{number}_SELF_TEST", made.source.name]
        done = subprocess.run(line, cwd=tmp_path, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_outputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    fold = small_networks()["conv"]
    for parameter in fold.buffers():
        parameter.fill_(3e38)
    with pytest.raises(ConformalError, match=r"expected finite outputs, got NaN or infinity"):
        export(fold, tmp_path / "new")
    assert not (tmp_path / "new").exists()

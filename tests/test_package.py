"""The package as it is installed: cheap to import, typed, and in one order of imports."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import conformallayers as cl

SOURCE = Path(cl.__file__).parent


def python(*arguments: str) -> str:
    """Run the interpreter in a clean process and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def imported_after(statement: str) -> set[str]:
    """Return the top-level names in sys.modules after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    return set(python("-c", code).split())


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    found = {
        f"{node.module}.{alias.name}" if node.module else alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    names = {f"{module}.{name}" for name, module in cl._HOMES.items()}
    told = "every name of _NAMES in __init__.py needs `from .file import Name as Name` under TYPE_CHECKING"
    assert found == {*names, *cl._SUBMODULES}, told


def test_import_without_torch() -> None:
    statements = "import conformallayers", "import conformallayers.errors"
    numpy = "import conformallayers.numpy"
    for statement in (
        *statements,
        numpy,
        "from conformallayers import ConformalError, __version__",
    ):
        names = imported_after(statement)
        assert "conformallayers" in names
        assert not {"torch", "scipy"} & names


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Import every public name and fold, warnings as errors, beside a torchvision that is broken."""
    folder = tmp_path_factory.mktemp("broken")
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    (folder / "torchvision.py").write_text(broken)
    lines = [
        "import sys, warnings",
        f"sys.path.insert(0, {str(folder)!r})",
        "import conformallayers as cl",
        "for name in cl.__all__: getattr(cl, name)",
        "model = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro('spectral')).eval()",
        "cl.fold(model, (1, 8, 8))",
        "print(*{name.split('.')[0] for name in sys.modules})",
        "print(*sys.modules.keys() & {'torch._dynamo'})",
    ]
    return set(python("-W", "error", "-c", "\n".join(lines)).split())


def test_import_of_everything_is_cheap(everything: set[str]) -> None:
    heavy = {"scipy", "matplotlib", "onnx", "onnxruntime", "sklearn", "torchvision", "pandas"}
    heavy |= {"optuna", "pydantic", "rich", "cyclopts", "hypothesis", "pytest"}
    heavy |= {"torch._dynamo"}  # as long as torch itself
    assert "torch" in everything
    assert not heavy & everything


def test_every_public_name_is_there() -> None:
    assert sorted(cl.__all__, key=str.lower) == sorted(set(cl.__all__), key=str.lower)
    for name in cl.__all__:
        assert getattr(cl, name) is not None
    assert sorted(dir(cl)) == sorted(cl.__all__)
    assert (SOURCE / "py.typed").is_file()  # for type checkers of users
    with pytest.raises(AttributeError, match="has no attribute 'folds'"):
        cl.folds  # noqa: B018


# Imports go from right to left, those inside functions too.
ORDER = [
    *(
        "errors",
        "utils",
        "functional",
        "nn",
        "graph",
        "recipe",
        "folding",
        "quantization",
        "container",
    ),
    *(
        "expansion",
        "conversion",
        "diagnosis",
        "inspection",
        "networks",
        "zoo",
        "session",
        "testing",
    ),
    *("numpy", "lab", "cli", "__main__"),
]


def imported_places(path: Path) -> set[str]:
    """Return the folders and top-level files of the package that a file imports from."""
    folder, found = path.relative_to(SOURCE).parent.parts, set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            start = folder[: len(folder) + 1 - node.level]
            parts = (*start, *(node.module.split(".") if node.module else ()))
            found.update(parts[:1] or (alias.name for alias in node.names))
        elif isinstance(node, ast.Import) and re.search(r"\bconformallayers\b", ast.unparse(node)):
            found.add("testing")  # the last place whose names the package has
    return found - {"__version__"}


def test_imports_go_one_way() -> None:
    for path in SOURCE.rglob("*.py"):
        inside = path.relative_to(SOURCE).with_suffix("")
        assert "from conformallayers" not in re.sub(r">>>.*", "", path.read_text()), inside
        if inside.name != "__init__" or len(inside.parts) > 1:  # its own names are imported late
            later = imported_places(path).intersection(ORDER[ORDER.index(inside.parts[0]) + 1 :])
            assert not later, f"{inside} imports from {later}"


def test_no_file_hides_a_public_function() -> None:
    places = {path.stem for path in SOURCE.iterdir() if path.stem != "__init__"}
    assert not {name for name in cl.__all__ if name in places and callable(getattr(cl, name))}
    assert cl.fold.__module__ == "conformallayers.folding.fold"
    assert cl.trace.__module__ == "conformallayers.graph.trace"


def files_called(run: Callable[[], object]) -> set[str]:
    """Return the files of the package in which a function is called, module bodies apart."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and str(SOURCE) in code.co_filename:
            found.add(str(Path(code.co_filename).relative_to(SOURCE)))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(("network", "most"), [("LeNet", 20), ("LeNetCL", 31)])
def test_a_fold_passes_few_files(network: str, most: int) -> None:
    model = getattr(cl.networks, network)().eval()
    found = files_called(lambda: cl.fold(model, (3, 32, 32)))
    assert len({*found, "__init__.py"}) <= most, sorted(found)


def test_evaluation_passes_few_files() -> None:
    model, x = cl.networks.LeNetCL().eval(), torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        model(x)
        found = files_called(lambda: model(x))
    assert len(found) <= 10, sorted(found)

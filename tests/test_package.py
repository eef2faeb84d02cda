"""The package as it is installed: cheap to import, typed, and in one order of imports."""

from __future__ import annotations

import ast
import importlib.resources
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import conformallayers as cl

SOURCE = Path(cl.__file__).parent

# A file, or a folder as one place, imports only from places before it. New files are listed here.
ORDER = (
    "errors",
    "utils",
    "functional",
    "pooling",
    "scaling",
    "recipe.fields",
    "recipe.operation",
    "recipe.layer_operations",
    "recipe.point_operations",
    "recipe.integer_operations",
    "recipe.arithmetic",
    "recipe.recipe",
    "recipe.document",
    "recipe.places",
    "recipe.archive",
    "recipe.file",
    "recipe.javascript",
    "recipe.numpy",
    "numpy",
    "nn.extra_layers",
    "nn.layers",
    "nn.activations",
    "nn.branches",
    "nn.homogeneous",
    "nn.bounds",
    "nn.specs",
    "nn.supported",
    "nn.registry",
    "nn.input_checks",
    "recipe.torch",
    "recipe.onnx",
    "folding.cost",
    "folding.operators",
    "folding.trace",
    "folding.stages",
    "folding.split",
    "folding.certificate",
    "folding.forms_by_row",
    "folding.forms",
    "folding.affine",
    "folding.problem",
    "folding.lower",
    "folding.strategies",
    "folding.plan",
    "folding.advice",
    "folding.part",
    "folding.cache",
    "nn.power_iteration",
    "nn.collapse",
    "nn.layerwise",
    "nn.container",
    "nn.traced",
    "conversion",
    "folding.explicit",
    "folding.quantization_report",
    "folding.folded",
    "folding.graph",
    "folding.lower_graph",
    "folding.fold",
    "folding.calibration",
    "folding.quantized_values",
    "folding.quantizer",
    "folding.quantize",
    "testing",
    "folding.verify",
    "inspection",
    "diagnosis",
    "hub",
    "networks",
    "recipe.c",
    "folding.model_files",
    "folding.files",
    "session",
    "zoo",
    "lab",
    "cli",
    "__main__",
)


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


def place_of(name: str) -> str | None:
    """Return the place in the order that a module of the package belongs to."""
    parts = name.split(".")
    whole = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((part for part in whole if part in ORDER), None)


def imports(path: Path) -> Iterator[str]:
    """Yield what a file imports from the package, in functions and for type checking too."""
    package = ("conformallayers", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            found = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for parts in found:
            if parts[0] == "conformallayers" and len(parts) > 1:
                yield ".".join(parts[1:])


def sources() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_files_import_only_from_files_before_them(path: Path) -> None:
    parts = [part for part in path.relative_to(SOURCE).with_suffix("").parts if part != "__init__"]
    own = place_of(".".join(parts))
    if own is None and path.name == "__init__.py":
        assert not list(imports(path)), "a folder of several places imports nothing itself"
        return
    assert own is not None, f"list {'.'.join(parts)} in the order of imports"
    for name in imports(path):
        place = place_of(name)
        if place is not None and place != own:
            assert ORDER.index(place) < ORDER.index(own), f"{own} imports {place}"


def test_the_package_itself_imports_nothing_of_its_own_at_once() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    relative = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]
    assert relative == []


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
        assert not {"torch", "safetensors", "scipy"} & names


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
        assert name in dir(cl)
    with pytest.raises(AttributeError, match="has no attribute 'folds'"):
        cl.folds  # noqa: B018


def test_no_file_hides_a_public_function() -> None:
    places = {path.stem for path in SOURCE.iterdir() if path.stem != "__init__"}
    assert not {name for name in cl.__all__ if name in places and callable(getattr(cl, name))}
    assert cl.fold.__module__ == cl.trace.__module__ == "conformallayers.folding.fold"


def test_the_package_lists_its_public_names_alone() -> None:
    assert sorted(dir(cl)) == sorted(cl.__all__)


def test_types_are_shipped() -> None:
    assert importlib.resources.files("conformallayers").joinpath("py.typed").is_file()


def test_one_version_number() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/conformallayers/__init__.py"
    others = [path for path in sources() if re.search(r"^__version__", path.read_text(), re.M)]
    assert others == []

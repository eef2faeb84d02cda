"""Documents for JavaScript: the operations of both sides, and what each refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformallayers.recipe.integer_operations import KINDS as INTEGER
from conformallayers.recipe.integer_operations import Dequantize, Quantize
from conformallayers.recipe.javascript.document import _LACKS, WRITE
from conformallayers.recipe.recipe import INPUT, RecipeBuilder
from node import document_of, needs_node, run_node
from recipe_cases import RECIPE_CASES
from support import assert_says


@needs_node
def test_both_sides_have_the_same_operations(tmp_path: Path) -> None:
    program = 'console.log(JSON.stringify(Object.keys(require("./runtime.js").OPERATIONS)))'
    assert {kind.kind for kind in WRITE} == set(json.loads(run_node(tmp_path, program)))
    assert {kind.kind for kind in _LACKS} == {"call"} | {kind.kind for kind in INTEGER}


def test_what_it_lacks_is_refused_by_name() -> None:
    builder = RecipeBuilder((3,))
    whole = builder.add(Quantize, INPUT, factor=9.0)
    whole = builder.recipe(builder.add(Dequantize, whole, name="y", scale=0.1))
    assert_says(
        lambda: document_of(whole, torch.float32),
        "got one in int8",
        "Pass the fold from before cl.quantize.",
    )


@needs_node
@pytest.mark.parametrize(
    ("change", "numbers", "message"),
    [
        (lambda d: d["operations"][0].update(operation="fft"), 60, "got fft. Fold with strategy"),
        (lambda d: d["operations"][0].update(operation="toString"), 60, "got toString"),
        (lambda d: None, 59, "expected 60 numbers, got 59"),
    ],
)
def test_javascript_refuses_too(
    change: Callable[[Any], None], numbers: int, message: str, tmp_path: Path
) -> None:
    (case,) = (case for case in RECIPE_CASES if case.name == "slice")
    document = document_of(case.build(), torch.float64)
    change(document)
    program = 'const { Network } = require("./runtime.js");'
    program += f"new Network({json.dumps(document)}).run(new Array({numbers}).fill(1));"
    assert message in run_node(tmp_path, program, check=False)


def test_documents_need_no_torch() -> None:
    code = "import conformallayers.recipe.javascript.document, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

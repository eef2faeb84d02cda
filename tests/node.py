"""Run the JavaScript runtime in node, for its tests."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformallayers.recipe.javascript.document import javascript_document, javascript_source
from conformallayers.recipe.recipe import Recipe

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")

# Reads networks with their samples, one JSON text a line, and writes the outputs of each.
_PROGRAM = """
const { Network } = require("./runtime.js");
for (const line of require("fs").readFileSync("cases.jsonl", "utf8").trim().split("\\n")) {
  const { document, samples, size } = JSON.parse(line);
  const net = new Network(document), bytes = Buffer.from(samples, "base64");
  const all = new net.Array(new Uint8Array(bytes).buffer);
  const rows = [];
  for (let start = 0; start < all.length; start += size) {
    const y = net.run(all.subarray(start, start + size));
    if (!(y instanceof net.Array)) throw new Error(`${y.constructor.name} is another dtype`);
    rows.push(Buffer.from(y.buffer, y.byteOffset, y.byteLength));
  }
  console.log(Buffer.concat(rows).toString("base64"));
}
"""


def document_of(recipe: Recipe, dtype: torch.dtype) -> dict[str, Any]:
    """Return the document of a recipe whose constants are tensors."""
    arrays = recipe.with_constants(lambda name, array: array.detach().cpu().numpy())
    return javascript_document(arrays, str(dtype).removeprefix("torch."))


def run_node(folder: Path, program: str, *, check: bool = True) -> str:
    """Run a program beside ``runtime.js``; return what it writes."""
    (folder / "runtime.js").write_text(javascript_source())
    (folder / "program.js").write_text(program)
    command = [str(NODE), "program.js"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr[:4000]
    return done.stdout if check else done.stderr


def outputs(folder: Path, cases: Sequence[tuple[dict[str, Any], Tensor]]) -> list[Tensor]:
    """Return what JavaScript computes for documents and batches of samples, in one process."""
    with (folder / "cases.jsonl").open("w") as file:
        for document, x in cases:
            data = base64.b64encode(x.contiguous().numpy().tobytes()).decode()
            case = {"document": document, "samples": data, "size": x[0].numel()}
            file.write(json.dumps(case) + "\n")
    lines = run_node(folder, _PROGRAM).splitlines()
    found = []
    for (document, x), line in zip(cases, lines, strict=True):
        y = np.frombuffer(base64.b64decode(line), document["dtype"]).copy()
        found.append(torch.from_numpy(y).view(len(x), *document["output_shape"]))
    return found

"""Write the golden files: one for each operation of recipes, one for each strategy and dtype.

A file that is there says what older versions wrote, and stays as it is: "dense" and "banded"
have forms where folds have factors now. To write what is new:

    python tests/data/make_golden.py
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.folded import Folded
from conformallayers.recipe.recipe import OPERATIONS, Recipe
from recipe_cases import RECIPE_CASES

FOLDER = Path(__file__).parent / "golden"
SHAPE = 1, 6, 6


def operations() -> Iterator[tuple[str, Folded]]:
    """Yield the smallest conformance recipe that has an operation, for each of them."""
    recipes = [case.build() for case in RECIPE_CASES]
    for kind in sorted(set(OPERATIONS) - {"call"}):
        having = [r for r in recipes if any(op.kind == kind for op in r.operations)]
        smallest = min(having, key=_size)
        yield f"operation-{kind}", Folded(smallest, torch.float64, {})


def _size(recipe: Recipe) -> int:
    arrays = sum(array.numel() for array in recipe.constants.values())
    return arrays + prod(recipe.input_shape) + prod(recipe.output_shape)


def stack(**options: object) -> cl.ConformalLayers:
    return cl.ConformalLayers(
        cl.Conv2d(1, 2, 3, **options), cl.ReSPro(), cl.Conv2d(2, 2, 3, **options), cl.ReSPro()
    )


def strategies() -> Iterator[tuple[str, Folded]]:
    """Yield folds by every strategy, with biases, branches and a head, and in every dtype."""
    torch.manual_seed(0)
    plain = stack()
    biased = stack(bias=True)
    block = cl.Residual(cl.Conv2d(1, 1, 3, padding=1), cl.ReSPro())
    branched = cl.ConformalLayers(cl.Conv2d(1, 1, 3), cl.ReSPro(projective=True), block)
    head = nn.Sequential(stack(), nn.Flatten(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    for name, model, strategy in (
        ("dense-factor", plain, "dense"),
        ("banded-factor", plain, "banded"),
        ("conv", plain, "conv"),
        ("layers", plain, "layers"),
        ("biases", biased, "dense"),
        ("branches", branched, "dense"),
        ("head", head, "layers"),
    ):
        yield f"strategy-{name}", cl.fold(model, SHAPE, strategy=strategy)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield f"dtype-{name}", cl.fold(plain, SHAPE, strategy="conv", dtype=dtype)


def inputs(shape: tuple[int, ...]) -> Tensor:
    """Return two samples of numbers that every dtype has."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-16, 17, (2, *shape), generator=generator) / 8


def main() -> None:
    """Write missing files; their notes have two samples and what the constants make of them in float64."""
    FOLDER.mkdir(exist_ok=True)
    for name, folded in (*operations(), *strategies()):
        x = inputs(folded.input_shape)
        path = FOLDER / f"{name}.safetensors"
        if path.exists():
            continue
        cl.save(folded, path)
        y = cl.load(path).double()(x.double())
        cl.save(folded, path, about={"input": x.tolist(), "output": y.tolist()})


if __name__ == "__main__":
    main()

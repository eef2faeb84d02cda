"""Print a markdown table: the relative error of both paths by depth and dtype.

The oracle is the layer-by-layer path of a float64 copy with the same (rounded) weights. Run it with
``python benchmarks/precision.py``; the table in docs/mathematics.md is its output.
"""

from __future__ import annotations

import argparse

import torch

import conformallayers as cl

SHAPE = (3, 16, 16)
CHANNELS = 16
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def network(depth: int, alpha: str) -> cl.ConformalLayers:
    """Return ``depth`` convolutions of 3×3 with ReSPro, and a last linear layer."""
    layers: list[torch.nn.Module] = []
    for index in range(depth):
        layers.append(cl.Conv2d(CHANNELS if index else SHAPE[0], CHANNELS, 3, padding=1))
        layers.append(cl.ReSPro(alpha))
    return cl.ConformalLayers(*layers, cl.Flatten(), cl.Linear(CHANNELS * 256, 10))


def errors(depth: int, alpha: str, dtype: torch.dtype, samples: int) -> tuple[float, float]:
    """Return the largest relative error of the folded and of the layer-by-layer path."""
    torch.manual_seed(depth)
    model = network(depth, alpha)
    x = torch.rand(samples, *SHAPE)
    with torch.no_grad():
        model(x)  # in training mode: spectral norms start here
    model, x = model.to(dtype).eval(), x.to(dtype)
    folded = cl.fold(model, SHAPE, strategy="dense")
    with torch.no_grad(), cl.layer_by_layer():
        layered = cl.testing.relative_error(model(x), cl.testing.reference(model, x))
    return cl.fold_error(model, folded, x), layered


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 3, 9, 27, 81])
    parser.add_argument("--alpha", choices=["spectral", "young"], default="spectral")
    parser.add_argument("--samples", type=int, default=64)
    arguments = parser.parse_args()
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    print("| layers | path | " + " | ".join(names) + " |")
    print("|---:|---|" + "---:|" * len(names))
    for depth in arguments.depths:
        pairs = [errors(depth, arguments.alpha, dtype, arguments.samples) for dtype in DTYPES]
        for path, values in zip(
            ("folded", "layer by layer"), zip(*pairs, strict=True), strict=True
        ):
            cells = " | ".join(f"{value:.1e}" for value in values)
            print(f"| {depth} | {path} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

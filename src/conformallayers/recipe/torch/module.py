"""Run a recipe with torch: a module whose buffers are the constants of the recipe."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...errors import refusal
from ...functional import transformed
from .. import layer_operations as layer
from ..file import describe
from ..recipe import CHUNK_BYTES, INPUT, Recipe, Shape
from .operations import RUN, row_major


class Constants(nn.Module):
    """The constants of a recipe as buffers; fixed ones keep their dtype when the module is converted."""

    def __init__(self, arrays: Mapping[str, Tensor], fixed: Iterable[str]) -> None:
        super().__init__()
        self.fixed = frozenset(fixed)
        self._buffers.update(arrays)  # register_buffer refuses the name of a method, such as "half"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Convert every constant; fixed ones change their device alone."""
        kept = {name: self._buffers[name] for name in self.fixed}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, array in kept.items():
            if array is not None:
                moved: Any = self._buffers[name]
                self._buffers[name] = array.to(moved.device)
        return self


class RecipeModule(nn.Module):
    """Run a recipe on batches, (B, *input_shape) → (B, *output_shape).

    Args:
        recipe: its constants are tensors on one device; they become buffers.
        dtype: of inputs and outputs.
    """

    anchor: Tensor  # empty; has the dtype and the device of inputs

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__()
        self.constants = Constants(_laid_out(recipe), recipe.fixed_dtypes())
        self.calls = nn.ModuleDict(dict(recipe.modules))
        device = next((array.device for array in recipe.constants.values()), torch.device("cpu"))
        anchor = torch.empty(0, dtype=dtype, device=device)
        self.register_buffer("anchor", anchor, persistent=False)
        steady_allocator()
        self._bare = replace(recipe, constants={}, modules={})
        self._steps = list(zip(recipe.operations, recipe.last_uses(), strict=True))
        # Convolutions read image maps fastest in channels-last order.
        self._images = {
            name
            for op in recipe.operations
            if isinstance(op, layer.Conv) and len(op.stride) == 2
            for name in op.inputs[:1]
        }
        self.chunk_size: int | None = None
        if recipe.by_sample:
            per_sample = max(4, dtype.itemsize) * recipe.peak_elements()
            self.chunk_size = max(1, CHUNK_BYTES // per_sample)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs, constants and outputs."""
        return self.anchor.dtype

    @property
    def input_shape(self) -> Shape:
        """The shape of one input sample."""
        return self._bare.input_shape

    @property
    def output_shape(self) -> Shape:
        """The shape of one output sample."""
        return self._bare.output_shape

    @property
    def recipe(self) -> Recipe:
        """The operations that run, with their constants; prints as a list."""
        arrays = dict(self.constants._buffers)
        return replace(self._bare, constants=arrays, modules=dict(self.calls.items()))

    def forward(self, x: Tensor) -> Tensor:
        """Run a batch; a large batch runs in chunks."""
        return in_chunks(self._run, x, self.chunk_size)

    def _run(self, x: Tensor) -> Tensor:
        # Where a transform runs, the layout of a tensor cannot be asked for.
        images = set[str]() if transformed() else self._images
        values: dict[str, Any] = {INPUT: _image(x) if INPUT in images else x}
        for operation, dropped in self._steps:
            RUN.step(operation, self, values)
            for name in operation.outputs:
                if name in images:
                    values[name] = _image(values[name])
            for name in dropped:
                del values[name]
        result: Any = values[self._bare.output]
        if not isinstance(result, Tensor):  # several outputs
            return result  # type: ignore[no-any-return]
        return row_major(result) if result.dim() == 4 and not transformed() else result

    def constant(self, name: str) -> Tensor:
        """Return a constant."""
        found: Any = self.constants._buffers[name]
        return found  # type: ignore[no-any-return]

    def optional(self, name: str | None) -> Tensor | None:
        """Return a constant, or None where an operation has none."""
        return None if name is None else self.constant(name)

    def get_extra_state(self) -> Tensor:
        """Return the operations as bytes of JSON: a state fits those operations and settings alone."""
        text = json.dumps(describe(self._bare), sort_keys=True)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse the state of another fold: constants do not fit other factors between them."""
        if not torch.equal(state.cpu(), self.get_extra_state()):
            remedy = "Fold it again, or use cl.save and cl.load."
            expected = "the state of this fold"
            raise refusal("Folded.load_state_dict", expected, "that of another one", remedy)


def placed(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Recipe:
    """Move a recipe in floats to a device, and cast it."""
    modules = {
        name: copy.deepcopy(module).to(dtype=dtype, device=device)
        for name, module in recipe.modules.items()
    }
    return replace(recipe.with_constants(lambda _, array: array.to(device, dtype)), modules=modules)


def in_chunks(run: Callable[[Tensor], Tensor], x: Tensor, chunk: int | None) -> Tensor:
    """Run a large batch in chunks, so that intermediate values stay in the cache."""
    if chunk is None or torch.compiler.is_compiling() or x.shape[0] <= 2 * chunk:
        return run(x)
    parts = x.split(chunk)
    if torch.is_grad_enabled() and x.requires_grad:
        return torch.cat([run(part) for part in parts])
    first = run(parts[0])
    result = first.new_empty(x.shape[0], *first.shape[1:])
    for part, out in zip(parts, result.split(chunk), strict=True):
        out.copy_(first if part is parts[0] else run(part))
    return result


@lru_cache(maxsize=1)
def steady_allocator() -> None:
    """Make the C library reuse the memory of a chunk instead of fetching fresh pages at each call.

    glibc raises its mmap threshold to the size of a large block when one is freed for the first time.
    """
    torch.empty(CHUNK_BYTES, dtype=torch.uint8)


def _image(x: Tensor) -> Tensor:
    """Return image maps or kernels in channels-last order, the fastest; those of one channel in row-major order."""
    return row_major(x) if x.shape[1] == 1 else x.contiguous(memory_format=torch.channels_last)


def _laid_out(recipe: Recipe) -> dict[str, Tensor]:
    """Return the constants in row-major order: products round by the order in memory. Kernels are as images."""
    kernels = {op.weight for op in recipe.operations if isinstance(op, layer.Conv)}
    return {
        name: _image(array) if name in kernels and array.dim() == 4 else array
        for name, array in ((name, array.contiguous()) for name, array in recipe.constants.items())
    }

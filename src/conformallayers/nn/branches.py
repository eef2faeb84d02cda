"""Modules that branch: residual connections, parallel branches, and groups of channels.

Branches are added or concatenated as points: ``x ← x₁ + (t₁/t₂)·x₂`` keeps the coordinate of the
first branch. A composite defines only the order in which values pass its modules and joins. A
:class:`Flow` defines what a value is: a batch, a shape, a bound or a step of a trace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ConformalError, is_whole, refusal
from ..functional import Scalar
from .activations import RadialActivation
from .bounds import Shape
from .layers import Channels
from .registry import SPECS, LayerSpec, is_affine, is_homogeneous, modules_in, shape_after, spec_of

T = TypeVar("T")
How = Literal["sum", "concatenate"]


class Flow(Generic[T]):
    """Define what happens to a value at each module and join of a composite."""

    def run(self, path: str, module: nn.Module, value: T) -> T:
        """Apply a module, or the modules of an ``nn.Sequential`` in order."""
        for name, child in modules_in(path, module):
            value = self.step(name, child, value)
        return value

    def step(self, path: str, module: nn.Module, value: T) -> T:
        """Apply a layer, an activation or another composite."""
        raise NotImplementedError

    def split(self, path: str, groups: Sequence[nn.Module], value: T) -> list[T]:
        """Apply modules that each take some of the channels, and together take all of them."""
        paths = (below(path, f"channels.{index}") for index in range(len(groups)))
        return [self.run(at, module, value) for at, module in zip(paths, groups, strict=True)]

    def join(self, path: str, values: list[T], join: Join) -> T:
        """Add or concatenate values; the result has the coordinate of the first."""
        raise NotImplementedError


class Join(nn.Module):
    """Join branches: the sum of their points, or their concatenation along an axis.

    ``disjoint`` branches start with different coefficients of the same value.
    """

    def __init__(self, how: How, dim: int = 1, *, disjoint: bool = False) -> None:
        super().__init__()
        self.how, self.dim, self.disjoint = how, dim, disjoint

    def merge(self, parts: list[Tensor]) -> Tensor:
        """Return the sum or the concatenation, without broadcasting."""
        shapes = [tuple(part.shape) for part in parts]
        if self.how == "concatenate":
            self._check_axes(shapes)
            return torch.cat(parts, self.dim)
        if any(shape != shapes[0] for shape in shapes):
            remedy = "A sum does not broadcast; use a shortcut to change the shape of the skip."
            raise refusal("a sum of branches", "one shape", _listed(shapes), remedy)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _check_axes(self, shapes: list[tuple[int, ...]]) -> None:
        rank = len(shapes[0])
        axis = self.dim % rank if -rank <= self.dim < rank else 0
        others = [shape[:axis] + shape[axis + 1 :] for shape in shapes]
        if axis == 0 or any(other != others[0] for other in others):  # no set: sizes may be symbols
            expected = f"shapes that differ on axis {self.dim} alone, which is not the batch axis"
            remedy = "Make the shapes of the branches fit, or join them on another axis."
            raise refusal("a concatenation of branches", expected, _listed(shapes), remedy)

    def shape(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of a joined sample."""
        parts = [torch.empty(1, *shape, device="meta") for shape in shapes]
        return tuple(self.merge(parts).shape[1:])

    def extra_repr(self) -> str:
        """Return the kind of join and its axis."""
        return self.how if self.how == "sum" else f"concatenate, dim={self.dim}"


class Composite(nn.Module):
    """Base class of modules that branch."""

    def flow(self, path: str, value: T, through: Flow[T]) -> T:
        """Apply the modules and joins of the branches to a value."""
        raise NotImplementedError(f"{type(self).__name__} does not define flow")

    def forward(self, input: Tensor) -> Tensor:
        """Map a batch of points; activations inside need a number for alpha."""
        result: Tensor = self.flow("", input, BatchFlow())
        return result


class BatchFlow(Flow[Tensor]):
    """Apply modules to batches, (B, ...)."""

    def run(self, path: str, module: nn.Module, value: Tensor) -> Tensor:
        """Call the module."""
        result: Tensor = module(value)
        return result

    def join(self, path: str, values: list[Tensor], join: Join) -> Tensor:
        """Add or concatenate tensors."""
        return join.merge(values)


def joined_bound(bounds: list[Scalar], join: Join, one_coordinate: bool) -> Scalar:
    """Return the bound of a sum or a concatenation.

    With ``one_coordinate`` no branch has passed an activation. Disjoint branches then share the energy of
    the value that they start from, and the largest bound is that of their concatenation.
    """
    if join.disjoint and one_coordinate:
        return _largest(bounds)
    squares = join.how == "concatenate"
    total: Scalar = 0.0
    for bound in bounds:
        total = total + (bound**2 if squares else bound)
    return total**0.5 if squares else total


def _largest(bounds: list[Scalar]) -> Scalar:
    tensors = [bound for bound in bounds if isinstance(bound, Tensor)]
    numbers = [bound for bound in bounds if not isinstance(bound, Tensor)]
    if not tensors:
        return max(numbers)
    largest = torch.stack(tensors).amax()
    return largest.clamp_min(max(numbers)) if numbers else largest


def _listed(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(str(shape) for shape in shapes)


class Residual(Composite):
    """Add the output of a few layers to their input; the sum has the coordinate of the skip.

    Args:
        *modules: the layers, as in :class:`ConformalLayers`, or one ``OrderedDict`` of them.
        shortcut: a module in the skip connection, such as a convolution that changes the number of
            channels; None for the identity.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> import conformallayers as cl
        >>> block = cl.Residual(cl.Conv2d(8, 8, 3, padding=1), cl.ReSPro())
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 8, 3), cl.ReSPro(), block)
        >>> model(torch.rand(2, 1, 6, 6)).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(self, *modules: Any, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = _sequence("Residual", modules)
        self.shortcut = nn.Identity() if shortcut is None else checked_module("Residual", shortcut)
        self.join = Join("sum")

    def flow(self, path: str, value: T, through: Flow[T]) -> T:
        """Add the output of the body to the skip."""
        skip = through.run(below(path, "shortcut"), self.shortcut, value)
        return through.join(
            path, [skip, through.run(below(path, "body"), self.body, value)], self.join
        )


class Parallel(Composite):
    """Apply several branches to the same input and add or concatenate their outputs.

    The result has the coordinate of the first branch.

    Args:
        *modules: the branches: layers, composites, or ``nn.Sequential`` of them.
        join: ``"sum"`` or ``"concatenate"``.
        dim: the axis to concatenate on, not the batch axis.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> import conformallayers as cl
        >>> wide = cl.Parallel(cl.Conv2d(1, 4, 1), cl.Conv2d(1, 4, 3, padding=1), join="concatenate")
        >>> cl.ConformalLayers(wide, cl.ReSPro())(torch.rand(2, 1, 6, 6)).shape
        torch.Size([2, 8, 6, 6])
    """

    def __init__(self, *modules: nn.Module, join: How = "sum", dim: int = 1) -> None:
        super().__init__()
        if join not in ("sum", "concatenate"):
            remedy = 'The default is "sum".'
            raise refusal("Parallel(join=...)", '"sum" or "concatenate"', repr(join), remedy)
        if not is_whole(dim) or dim == 0:
            remedy = "1 is the channel axis."
            raise refusal("Parallel(dim=...)", "an axis after the batch axis", repr(dim), remedy)
        if not modules:
            raise refusal("Parallel", "at least one branch", "none", "Pass the branches.")
        self.branches = nn.ModuleList(checked_module("Parallel", module) for module in modules)
        self.join = Join(join, dim)

    def flow(self, path: str, value: T, through: Flow[T]) -> T:
        """Join the outputs of the branches."""
        values = [
            through.run(below(path, f"branches.{index}"), branch, value)
            for index, branch in enumerate(self.branches)
        ]
        return through.join(path, values, self.join)


class Split(Composite):
    """Apply one module to each group of channels, and concatenate the results.

    The result has the coordinate of the first group.

    Args:
        sizes: the number of channels of each group; together all channels of the input.
        modules: one for each group: a layer, a map, a composite, or an ``nn.Sequential`` of them.

    Shape:
        (B, C, ...) → (B, C', ...)

    Examples:
        >>> import torch
        >>> import conformallayers as cl
        >>> pool = cl.Split([4, 12], [cl.AvgPool2d(2), torch.nn.LPPool2d(2, 2)])
        >>> cl.ConformalLayers(cl.Conv2d(3, 16, 3), cl.ReSPro(), pool)(torch.rand(1, 3, 8, 8)).shape
        torch.Size([1, 16, 3, 3])
    """

    def __init__(self, sizes: Sequence[int], modules: Iterable[nn.Module]) -> None:
        super().__init__()
        many = isinstance(sizes, Sequence) and len(sizes) > 0
        if not many or not all(is_whole(n) and n > 0 for n in sizes):
            remedy = "Give the number of channels of each group."
            raise refusal("Split(sizes=...)", "integers > 0", repr(sizes), remedy)
        self.sizes = tuple(sizes)
        self.groups = nn.ModuleList(checked_module("Split", module) for module in modules)
        if len(self.groups) != len(self.sizes):
            expected, got = f"{len(self.sizes)} modules, one for each group", str(len(self.groups))
            raise refusal("Split(modules=...)", expected, got, "Use cl.Identity to keep a group.")
        self.join = Join("concatenate", disjoint=True)

    @property
    def channels(self) -> list[Channels]:
        """The modules that slice the groups from the input."""
        return list(_channels(self.sizes))

    def flow(self, path: str, value: T, through: Flow[T]) -> T:
        """Pass the groups through their modules and concatenate the results."""
        parts = zip(through.split(path, self.channels, value), self.groups, strict=True)
        values = [
            through.run(below(path, f"groups.{index}"), module, part)
            for index, (part, module) in enumerate(parts)
        ]
        return through.join(path, values, self.join)

    def extra_repr(self) -> str:
        """Return the sizes of the groups."""
        return f"sizes={list(self.sizes)}"


@lru_cache(maxsize=128)
def _channels(sizes: tuple[int, ...]) -> tuple[Channels, ...]:
    stops = list(accumulate(sizes))
    ranges = zip([0, *stops], stops, strict=False)
    return tuple(Channels(start, stop, stops[-1]) for start, stop in ranges)


def below(path: str, name: str) -> str:
    """Return the path of a child module."""
    return f"{path}.{name}" if path else name


def checked_module(owner: str, module: Any) -> nn.Module:
    """Return the argument if it is a module, and refuse anything else."""
    if not isinstance(module, nn.Module):
        raise refusal(owner, "modules", repr(module), "Pass layers, or nn.Sequential of layers.")
    return module


def _sequence(owner: str, modules: tuple[Any, ...]) -> nn.Sequential:
    if len(modules) == 1 and isinstance(modules[0], OrderedDict):
        return nn.Sequential(modules[0])
    return nn.Sequential(*(checked_module(owner, module) for module in modules))


# -- composites of layers --------------------------------------------------------------------------------


def branches(module: nn.Module) -> bool:
    """Check whether a module has branches with activations or maps, so that it is not one linear layer."""
    return isinstance(module, Composite) and any(
        isinstance(child, RadialActivation) or is_homogeneous(child) for child in module.modules()
    )


def check_module(path: str, module: nn.Module) -> list[nn.Module]:
    """Refuse a module that cannot stand in a ConformalLayers.

    Returns the activations of the module in the order a point passes them.
    """
    if isinstance(module, RadialActivation):
        _check_activation(path, module)
        return [module]
    if not isinstance(module, Composite):
        spec_of(path, module)
        return []
    checking = _Checking()
    module.flow(path, None, checking)
    return checking.passed


def _check_activation(path: str, module: RadialActivation) -> None:
    where = f"ConformalLayers at position {path}"
    module_type, base = type(module), RadialActivation
    if module_type.growth is base.growth:
        remedy = "Derive from it and define growth(q), or use cl.ReSPro."
        got = f"{module_type.__name__}, which has none"
        raise refusal(where, "an activation with a growth", got, remedy)
    problem = module.fault()
    if problem is not None:
        expected = "a positive growth(q) of + - * / sqrt exp log tanh, 1 at q = 0, and a slope > 0"
        got = f"{module_type.__name__} with {problem}"
        raise refusal(where, expected, got, "See cl.RadialActivation.")


class _Checking(Flow[None]):
    """Check the modules of a composite; no values flow."""

    def __init__(self) -> None:
        self.passed: list[nn.Module] = []

    def step(self, path: str, module: nn.Module, value: None) -> None:
        self.passed += check_module(path, module)

    def join(self, path: str, values: list[None], join: Join) -> None:
        pass


_Bounded = tuple[Shape, Scalar]


class _Bounding(Flow[_Bounded]):
    """Compute the output shape and the bound of a composite of linear layers."""

    def step(self, path: str, module: nn.Module, value: _Bounded) -> _Bounded:
        shape, bound = value
        bound = spec_of(path, module).bound(module, shape) * bound
        return tuple(shape_after(module, shape)[1:]), bound

    def join(self, path: str, values: list[_Bounded], join: Join) -> _Bounded:
        shape = join.shape([shape for shape, _ in values])
        return shape, joined_bound([bound for _, bound in values], join, one_coordinate=True)


def _composite_problem(module: Any) -> str | None:
    try:
        check_module("", module)
    except ConformalError as error:
        return str(error).removeprefix("ConformalLayers at position ")
    return None


def _composite_bound(module: Any, shape: Shape) -> Scalar:
    bound: Scalar = module.flow("", (shape, 1.0), _Bounding())[1]
    return bound


SPECS[Composite] = LayerSpec(
    _composite_bound,
    check=_composite_problem,
    affine=lambda module: any(is_affine(part) for part in module.modules() if part is not module),
)

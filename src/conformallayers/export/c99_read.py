"""From a folded network to the steps of a C program: what stands around its parts, then the parts.

What has no form in C is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import refusal, shape_text
from ..folding.certificate import Certificate
from ..folding.folded import Conformal, Folded, Native
from ..folding.strategies.banded import BandedCore
from ..folding.strategies.composed import ComposedCore
from ..folding.strategies.dense import DenseCore
from ..folding.strategies.layers import LayersCore
from ..folding.strategies.sparse import SparseCore
from ..nn.extra_layers import Centre
from ..nn.layers import Flatten, Identity, Linear
from ..registry.registry import has_hooks
from .c99_arrays import Array, Constant, Form, Matrix, form, matrix
from .c99_cores import Maps, dense_form, dense_matrix
from .c99_ops import INPUT, Copy, Enter, Leave, Relu, Step, Subtract, Times, Value
from .c99_prune import needed, proven, radius_of, room_each, room_left
from .c99_recur import Recur, Site
from .chain import chain_of
from .values import known_rule

# How a form may be stored within a tolerance, smallest first, and the share of the room that
# entries may take which are left out; the rest is for rounding.
_COMPACT = {"int8_t": 0.5, "int16_t": 0.9, "float": 1.0}
_DENSE = 'Fold with strategy="dense".'
_LINEAR = (nn.Linear, Linear)
_FLATTEN = (nn.Flatten, Flatten)
_NOTHING = (nn.Identity, Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    """Walk through nested ``nn.Sequential``."""
    if type(module) is nn.Sequential and not has_hooks(module):
        for child in module:
            yield from _flat(child)
    else:
        yield module


class Reader:
    """Collect the steps of a fold.

    Args:
        int8: store weights in eight bits; what is added or on a diagonal stays float.
        prune: simplify forms as far as their certificates have room for.
    """

    def __init__(self, *, int8: bool, prune: bool = True) -> None:
        self.storage = "int8_t" if int8 else "float"
        self.prune = prune
        self.steps: list[Step] = []
        self.values = 1  # that there are; the first is the image
        self.certificates: list[Certificate | None] = []
        self.last = INPUT  # the value at hand
        self.shape: tuple[int, ...] = ()
        self.parts = self._heads = 0

    def read(self, folded: Folded) -> None:
        """Read all of a fold."""
        self.shape = folded.input_shape
        for part in chain_of(folded, "export_c(folded)"):
            for module in _flat(part):
                self._module(module)
        if self.shape != folded.output_shape:
            got = shape_text(self.shape)
            raise refusal("export_c", shape_text(folded.output_shape), got, _DENSE)
        if self.sizes().get(self.last) != self.size:  # it gets a place of its own: the output
            self.add(Copy(source=self.last, target=self.new(), size=self.size))

    def sizes(self) -> dict[int, int]:
        """Return the floats that each value needs."""
        found: dict[int, int] = {}
        for step in self.steps:
            if step.size:
                found[step.target] = max(found.get(step.target, 0), step.size)
        return found

    @property
    def size(self) -> int:
        """The number of coefficients of the value at hand."""
        return prod(self.shape)

    def new(self) -> int:
        """Return the number of a new value."""
        self.values += 1
        return self.values - 1

    def add(self, step: Step) -> None:
        """Append a step; what it writes is the value at hand."""
        self.steps.append(step)
        self.last = step.target

    def writable(self) -> int:
        """Return the value at hand if it may be overwritten, else a new one."""
        return self.new() if self.last == INPUT else self.last

    def _module(self, module: Any) -> None:
        if isinstance(module, Conformal):
            self._part(module)
        elif isinstance(module, Native):
            got = "layers that were kept, with biases, branches or great depth"
            raise refusal("export_c(folded)", "a folded part", got, _DENSE)
        elif has_hooks(module) or "forward" in vars(module):
            got = f"{type(module).__name__} with hooks"
            raise refusal("export_c(folded)", "plain layers", got, "Remove them and fold again.")
        elif type(module) is Centre:
            self._offset(_numpy(module.mean))
        elif type(module) in _LINEAR:
            self._linear(module)
        elif type(module) is nn.ReLU:
            self.add(Relu(source=self.last, target=self.writable(), size=self.size))
        elif type(module) in _FLATTEN:
            self._flatten(module)
        elif type(module) not in _NOTHING:
            raise refusal(
                "export_c(folded)",
                "Centre, Linear, ReLU and Flatten around the folded parts",
                type(module).__name__,
                "Fold the model without it, and compute it behind predict.",
            )

    def _offset(self, mean: Array) -> None:
        """Append the subtraction of a constant sample."""
        values = _float(np.broadcast_to(mean, self.shape))
        constant = Constant(f"offset{self._next_head()}", "float", values)
        target = self.writable()
        self.add(Subtract(source=self.last, target=target, size=self.size, constants=(constant,)))

    def _next_head(self) -> int:
        self._heads += 1
        return self._heads - 1

    def _linear(self, module: Any) -> None:
        """Append a linear layer; it acts on the last axis, as in torch."""
        name = f"linear{self._next_head()}"
        weights = matrix(f"{name}_weight", _numpy(module.weight), self.storage)
        bias = None
        if module.bias is not None:
            bias = Constant(f"{name}_bias", "float", _float(_numpy(module.bias)))
        *outer, _ = self.shape
        self.shape = (*outer, len(weights.values))
        self.times(weights, prod(outer), bias)

    def times(self, weights: Matrix, count: int = 1, bias: Constant | None = None) -> None:
        """Append a product with a matrix."""
        constants = (*weights.constants, *(() if bias is None else (bias,)))
        self.add(
            Times(
                source=self.last,
                target=self.new(),
                size=count * len(weights.values),
                constants=constants,
                multiply_adds=count * weights.entries,
                matrix=weights,
                count=count,
                bias=bias,
            )
        )

    def _flatten(self, module: Any) -> None:
        axes = len(self.shape) + 1
        start, stop = module.start_dim % axes, module.end_dim % axes
        if start == 0:
            got, remedy = "Flatten(start_dim=0)", "Flatten from axis 1."
            raise refusal("export_c(folded)", "samples that stay apart", got, remedy)
        inner = self.shape[start - 1 : stop]
        self.shape = (*self.shape[: start - 1], prod(inner), *self.shape[stop:])

    # -- parts ----------------------------------------------------------------------------------

    def _part(self, part: Conformal) -> None:
        name = f"part{self.parts}"
        self.parts += 1
        rules = tuple(_rule(rule) for rule in part.rules)
        bias = None
        if part.bias is not None:
            bias = Constant(f"{name}_bias", "float", _float(_numpy(part.bias)))
        if part.recurring is not None:
            self._recurring(name, part, bias)
        else:
            self._chain(name, part, rules, bias)
        self.shape = part.output_shape

    def _chain(
        self, name: str, part: Conformal, rules: tuple[str, ...], bias: Constant | None
    ) -> None:
        core, groups = part.core, len(rules)
        self.add(Enter(source=self.last, target=self.writable(), size=self.size, groups=groups))
        unit = self.last
        certificate = part.certificate
        if isinstance(core, (ComposedCore, LayersCore)):
            Maps(self, name, core).read()
            certificate = certificate if self.storage == "float" else None
        elif isinstance(core, (DenseCore, BandedCore, SparseCore)):
            for group, weight in enumerate(core.weights):
                exact = dense_form(core, group, part.input_shape)
                stored, proof = self._form(f"{name}_form{group}", exact, part, group, weight)
                certificate = proof if group == 0 else _weaker(certificate, proof)
                step = Value(
                    source=unit,
                    target=unit,
                    size=0,
                    constants=stored.constants,
                    multiply_adds=stored.entries,
                    form=stored,
                    group=group,
                    weight=weight,
                )
                self.add(step)
            self.times(matrix(f"{name}_matrix", dense_matrix(core), self.storage))
        else:
            got = f'a part by strategy "spectral" ({type(core).__name__})'
            raise refusal("export_c(folded)", "forms or kernels written out", got, _DENSE)
        size = prod(part.output_shape)
        self.certificates.append(certificate)
        self.add(
            Leave(
                source=self.last,
                target=self.last,
                size=size,
                constants=() if bias is None else (bias,),
                rules=rules,
                scale=part.scale,
                bias=bias,
            )
        )

    def _form(
        self, name: str, exact: Array, part: Conformal, group: int, weight: float
    ) -> tuple[Form, Certificate | None]:
        """Return a form as it is stored, and what is proven of the denominator with it."""
        certificate = part.certificate
        room = room_each(room_left(certificate), len(part.rules))
        provable = all(rule.provable for rule in part.rules)
        if certificate is None or room == 0 or not (provable and self.prune):
            proof = certificate if self.storage == "float" else None
            return form(name, exact, self.storage), proof
        whole = torch.from_numpy(exact) * weight
        radius = radius_of(certificate, part.rules[group])
        for storage, share in _COMPACT.items():
            stored = form(name, exact, storage, needed(whole, share * room, radius).numpy())
            if proven(whole, _wide(stored.values) * weight, room, radius):
                return stored, Certificate(certificate.epsilon, certificate.max_norm, 0.0)
            if storage == self.storage:
                break
        if self.storage == "int8_t":
            return stored, None
        return form(name, exact, self.storage), certificate

    def _recurring(self, name: str, part: Conformal, bias: Constant | None) -> None:
        """Append a part with biases or branches."""
        core, recurring = part.core, part.recurring
        if not isinstance(core, (DenseCore, BandedCore, SparseCore)) or recurring is None:
            got = f'one with biases by strategy "{core.name}"'
            raise refusal("export_c(folded)", "a part with its forms written out", got, _DENSE)
        if self.storage != "float":
            raise refusal(
                'export_c(dtype="int8")',
                "a part without inner biases or branches",
                "one with them, whose energies are small differences",
                'Use dtype="float32", which keeps double there.',
            )
        forms = tuple(
            form(f"{name}_form{index}", dense_form(core, index, part.input_shape), "double")
            for index in range(len(core.weights))
        )
        rows = _double(f"{name}_rows", recurring.rows) if len(recurring.rows) else None
        vectors = _double(f"{name}_vectors", recurring.vectors) if recurring.shifts else None
        sites = []
        for index, (rule, parts, shifts, coordinate) in enumerate(recurring.keys):
            gram = getattr(recurring, f"gram{index}")
            products = _double(f"{name}_gram{index}", gram) if shifts else None
            factor = float(recurring.factors[index])
            sites.append(Site(_rule(rule), parts, shifts, coordinate, factor, products))
        weights = Constant(f"{name}_matrix", "double", dense_matrix(core).reshape(-1))
        found = [weights, rows, vectors, bias, *(site.gram for site in sites)]
        constants = [constant for constant in found if constant is not None]
        self.certificates.append(part.certificate)
        self.add(
            Recur(
                source=self.last,
                target=self.new(),
                size=prod(part.output_shape),
                constants=(*constants, *(c for form in forms for c in form.constants)),
                multiply_adds=weights.values.size
                + sum(form.entries for form in forms)
                + (0 if rows is None else rows.values.size),
                count=self.size,
                matrix=weights,
                forms=forms,
                weights=core.weights,
                rows=rows,
                sites=tuple(sites),
                parts=recurring.parts,
                shifts=recurring.shifts,
                vectors=vectors,
                scale=part.scale,
                bias=bias,
            )
        )


def _weaker(a: Certificate | None, b: Certificate | None) -> Certificate | None:
    """Return what is proven of both."""
    return None if a is None or b is None else min(a, b, key=lambda proof: proof.margin)


def _rule(rule: Any) -> str:
    try:
        return known_rule(rule)
    except ValueError:
        raise refusal(
            "export_c(folded)",
            "activations of the library",
            f"the rule of {rule.name}",
            "C knows no growth of your own: use one of the library's.",
        ) from None


def _numpy(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().cpu().double().numpy())


def _float(values: Array) -> Array:
    return values.astype(np.float32).reshape(-1)


def _double(name: str, tensor: Tensor) -> Constant:
    return Constant(name, "double", _numpy(tensor).reshape(-1))


def _wide(values: Array) -> Tensor:
    return torch.from_numpy(values.astype(np.float64))

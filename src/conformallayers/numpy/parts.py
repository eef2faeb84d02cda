"""From the structure of a file to functions: the conformal parts and what stands around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import refusal
from ..export.archive import is_count
from .arrays import Array, flat
from .cores import CORES, CoreRun, Parts, energy
from .layers import MAKERS, Run

_LARGEST = 1e300  # of a coordinate: beyond it the published form has sent every point to 0
_CHAINS = ("nn.Sequential", "nn.ModuleList")


def _inverse(t: Array) -> Array:
    return np.where(t == 0, 0.0, 1 / np.where(t == 0, 1.0, t))


def _tanh(q: Array) -> Array:
    short = q < 1e-4
    u = np.sqrt(np.where(short, 1.0, q))
    return np.where(short, 1 + q / 3 - q**2 / 45, u / np.tanh(u))


# q, the squared length in units of α → what the coordinate is multiplied with.
GROWTH: dict[str, Callable[[Array], Array]] = {
    "projective": lambda q: 1 + q,
    "gnomonic": lambda q: np.sqrt(1 + q),
    "radial_tanh": _tanh,
}


def _advance(rule: str, tau: Array, n: Array, m: Array) -> Array:
    """Return the next τ, given the energy ``n = q·τ²`` and the peak m of the input."""
    published = rule == "published"
    q = n * _inverse(tau) * _inverse(tau)
    return np.asarray(tau + m * n if published else tau * GROWTH[rule](q))


def _scaled(z: Array, factor: Array) -> Array:
    return np.asarray(z * factor.astype(z.dtype).reshape(-1, *[1] * (z.ndim - 1)))


def in_chunks(run: Run, x: Array, piece: int | None) -> Array:
    """Run a large batch a few samples at a time."""
    if piece is None or len(x) <= piece:
        return run(x)
    starts = range(0, len(x), piece)
    return np.concatenate([run(x[start : start + piece]) for start in starts])


def _are_numbers(values: Iterable[Any]) -> bool:
    """Tell whether an empty batch would not hide that one cannot multiply with a value."""
    return all(type(value) in (int, float) for value in values)


class Builder:
    """Make functions of the modules of a structure.

    Args:
        path: of the file.
        arrays: its arrays by name.
    """

    def __init__(self, path: str, arrays: dict[str, Array]) -> None:
        self._path, self._arrays = path, arrays
        self._made: dict[str, Run] = {}

    def build(self, spec: dict[str, Any], path: str) -> Run:
        """Return the function of a module, or refuse it by name."""
        if "same" in spec:
            return self._made[spec["same"]]
        kind, children = spec["type"], dict(spec["children"])
        if kind == "conformal":
            run = self._conformal(spec, path)
        elif kind in _CHAINS:
            run = chain([self.build(child, f"{path}.{name}") for name, child in children.items()])
        elif kind in ("cl.Residual", "cl.Parallel"):
            run = self._joined(spec, path)
        else:
            run = self._layer(spec)
        self._made[path] = run
        return run

    def _layer(self, spec: dict[str, Any]) -> Run:
        kind = spec["type"].removeprefix("nn.").removeprefix("cl.")
        try:
            return MAKERS[kind](self._settings(spec), self._tensors(spec))
        except KeyError as error:
            raise self._refusal(str(error.args[0])) from None

    def _refusal(self, kind: str) -> Exception:
        native = kind == "native"
        return refusal(
            f"load({self._path})",
            "layers that run in numpy",
            "layers that were kept, with biases, branches or great depth" if native else kind,
            'Use cl.load; layers inside a ConformalLayers fold away with strategy="dense".',
        )

    def _joined(self, spec: dict[str, Any], path: str) -> Run:
        """Add or concatenate what linear branches give."""
        children = dict(spec["children"])
        join = self._settings(children.pop("join"))
        if "branches" in children:
            path, children = f"{path}.branches", dict(children["branches"]["children"])
        else:  # the coordinate is that of the skip, which comes first
            children = {name: children[name] for name in ("shortcut", "body")}
        runs = [self.build(child, f"{path}.{name}") for name, child in children.items()]
        if join["how"] == "concatenate":
            return lambda x: np.concatenate([run(x) for run in runs], join["dim"])
        return lambda x: np.asarray(sum(run(x) for run in runs))

    def _value(self, value: Any) -> Any:
        """Return a value of the settings: records as namespaces, rules by name."""
        if isinstance(value, list):
            return tuple(map(self._value, value))
        if not isinstance(value, dict):
            return value
        if value["is"] == "tensor":
            return self._arrays[value["name"]]
        fields = {key: self._value(item) for key, item in value.items() if key != "is"}
        if value["is"] == "float":
            return float(fields["value"])
        return fields["name"] if value["is"] == "Rule" else SimpleNamespace(**fields)

    def _settings(self, spec: dict[str, Any]) -> dict[str, Any]:
        return {key: self._value(value) for key, value in spec["settings"].items()}

    def _tensors(self, spec: dict[str, Any]) -> dict[str, Array]:
        return {key: self._arrays[found["name"]] for key, (_, found) in spec["tensors"].items()}

    def _core(self, spec: dict[str, Any], path: str) -> CoreRun:
        layers: list[Run] = []
        for name, child in spec["children"]:
            stages = enumerate(child["children"])
            layers += [self.build(stage, f"{path}.{name}.{i}") for i, (_, stage) in stages]
        settings = self._settings(spec)
        if not all(_are_numbers(settings.get(name, ())) for name in ("weights", "factors")):
            raise ValueError("weights that are no numbers")
        return CORES[spec["type"]](Parts(settings, self._tensors(spec), layers))

    def _conformal(self, spec: dict[str, Any], path: str) -> Run:
        """Normalise, apply the core, run the scalar recurrence, divide."""
        s, children = self._settings(spec), dict(spec["children"])
        core = self._core(children["core"], f"{path}.core")
        recurring = self._recurrence(children["recurring"]) if "recurring" in children else None
        bias, scale = self._tensors(spec).get("bias"), s["scale"]
        if not is_count(s["piece"]) or not _are_numbers([scale]):
            raise ValueError("pieces of no size, or no scale")

        def run(x: Array) -> Array:
            dtype = x.dtype
            if recurring is not None:  # an energy may be a small difference of its parts
                x = x.astype(np.float64)
            peak = np.abs(flat(x)).max(1, initial=0)
            peak = peak + (peak == 0)
            unit = x / peak.reshape(-1, *[1] * (x.ndim - 1))
            m = peak.astype(np.float64)
            tau = np.sqrt(energy(unit))
            v, forms = core(unit)
            if any(n.shape != tau.shape for n in forms):
                raise ValueError("forms without one value for each sample")
            if recurring is not None:
                v = v if s["branches"] else v[:, None]
                y = recurring(unit, m, tau, v, forms, scale).astype(dtype)
            else:
                for rule, n in zip(s["rules"], forms, strict=True):
                    tau = _advance(rule, tau, n, m)
                y = _scaled(v, scale * _inverse(tau))
            return y if bias is None else y + bias

        return lambda x: in_chunks(run, x, s["piece"])

    def _recurrence(self, spec: dict[str, Any]) -> Callable[..., Array]:
        """Return what divides the parts of a point, with biases or branches; see recurrence.py."""
        s, t = self._settings(spec), self._tensors(spec)

        def run(
            unit: Array, m: Array, tau: Array, v: Array, forms: list[Array], scale: float
        ) -> Array:
            alive = (tau != 0).astype(np.float64)
            inverse, start = _inverse(tau), m * tau
            dots = np.zeros((len(unit), 0))
            if len(t["rows"]):
                dots = flat(unit) @ t["rows"].T
            growths: list[Array] = []

            def along(key: tuple[int, ...], first: Array) -> Array:
                for site in key:
                    first = first / growths[site]
                return first

            values, row = iter(forms), 0
            for index, (rule, parts, shifts, coordinate) in enumerate(s["keys"]):
                linear = [along(key, inverse) for key in parts]
                total = np.zeros_like(tau)
                for a, first in enumerate(linear):
                    for second in linear[a:]:
                        twice = 1 if second is first else 2
                        total = total + twice * first * second * next(values)
                if shifts:
                    ks = np.stack([along(key, alive) for key in shifts], 1)
                    total = total + ((ks @ t[f"gram{index}"]) * ks).sum(1)
                    for k in linear:
                        mixed = (dots[:, row : row + len(shifts)] * ks).sum(1)
                        total, row = total + 2 * k * mixed, row + len(shifts)
                t_now = start * t["factors"][index]
                for site in coordinate:  # one by one: a product of many could overflow on its way
                    t_now = np.minimum(t_now * growths[site], _LARGEST)
                q = np.maximum(total, 0)
                grown = 1 + t_now * q if rule == "published" else GROWTH[rule](q)
                growths.append(np.minimum(grown, _LARGEST))
            y = np.zeros_like(v[:, 0])
            for index, key in enumerate(s["parts"]):
                y = y + _scaled(v[:, index], scale * along(key, inverse))
            for key, vector in zip(s["shifts"], t["vectors"], strict=True):
                y = y + _scaled(np.broadcast_to(vector, y.shape), along(key, alive))
            return y

        return run


def chain(runs: list[Run]) -> Run:
    """Return functions one after the other."""

    def run(x: Array) -> Array:
        for part in runs:
            x = part(x)
        return x

    return run

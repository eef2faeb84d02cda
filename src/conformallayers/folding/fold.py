"""Whole models: find the ConformalLayers in any traceable module, fold them, absorb the head."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from ..errors import ConformalError, checked_shape, refusal, shape_text
from ..functional import wide_dtype
from ..nn.branches import branches
from ..nn.container import ConformalLayers
from ..nn.extra_layers import Centre
from ..registry.bounds import Shape
from ..registry.registry import find_spec, flatten_modules
from ..utils.fingerprint import fingerprint
from .branches import Web
from .certificate import ErrorBudget, rounding_budget
from .folded import PIECE_BYTES, Folded, Part, make_part
from .machine import machine
from .operators import Operator, freeze, is_plain, operator_of, refuse_hooks
from .plan import Plan, checked_strategy, make_plan, outlook, with_outcome
from .problem import request_of, whole_of, with_head
from .stages import Program, with_prefix
from .strategies import Cost
from .strategies.paths import MAX_PATHS
from .trace import Step, Trace, trace_modules

Whole = TypeVar("Whole", bound=Program | Web)
_SAMPLES = 2  # that shapes are followed with; of 1, an axis could be the batch or not
_ROOT = "conformal_layers"  # the name of a ConformalLayers that is folded by itself


def fold(
    model: nn.Module,
    input_shape: tuple[int, ...],
    *,
    strategy: str = "auto",
    tolerance: float | None = None,
    max_norm: float | None = None,
    dtype: torch.dtype | None = None,
    max_paths: int = MAX_PATHS,
) -> Folded:
    """Fold a model into a new module for inference; the model is not changed.

    Each ConformalLayers in the model becomes one linear map and one quadratic form, and the linear
    layers right behind it are absorbed while that makes it cheaper. Whatever the mode of the
    model, the fold has evaluation semantics: dropout is the identity.

    Args:
        model: a :class:`ConformalLayers`, or any module that torch.fx can trace with some inside.
        input_shape: of one sample, without the batch axis.
        strategy: ``"auto"`` takes the fastest by a cost model of this machine. By name:
            ``"dense"``, ``"banded"`` (image rows as blocks), ``"sparse"``, ``"conv"`` (composed
            kernels along the cheapest route), ``"spectral"`` (Fourier transform, for stride 1 with
            circular padding or none), ``"layers"`` (no folding, only α and factors resolved).
        tolerance: None drops only what is proven to be below the rounding of the dtype. A number
            allows that relative error of the denominator, and proves it: ``folded.certificate``.
        max_norm: the largest norm of an input that the tolerance must hold for; None: any.
        dtype: of the result; None takes that of the model's first parameter.
        max_paths: where branches pass activations, write out at most so many paths; a network with
            more of them keeps its layers.

    Returns:
        A :class:`Folded` module. ``print(folded.explain())`` tells what was chosen and why.

    Examples:
        >>> import conformallayers as cl
        >>> model = torch.nn.Sequential(
        ...     cl.ConformalLayers(cl.Conv2d(1, 8, 3), cl.ReSPro(), cl.Conv2d(8, 8, 3), cl.ReSPro()),
        ...     torch.nn.Flatten(),
        ...     torch.nn.Linear(128, 10),
        ... )
        >>> folded = cl.fold(model, (1, 8, 8))
        >>> x = torch.rand(5, 1, 8, 8)
        >>> torch.allclose(folded(x), model.eval()(x), atol=1e-6)
        True
    """
    shape = checked_shape(input_shape, "fold(input_shape=...)")
    strategy = checked_strategy(strategy)
    _check_positive("tolerance", tolerance)
    _check_positive("max_norm", max_norm)
    if max_norm is not None and tolerance is None:
        raise refusal(
            "fold(max_norm=...)", "a tolerance beside it", "none", "Give tolerance=... as well."
        )
    if isinstance(max_paths, bool) or not isinstance(max_paths, int) or max_paths < 1:
        remedy = f"The default is {MAX_PATHS}."
        raise refusal("fold(max_paths=...)", "a whole number > 0", repr(max_paths), remedy)
    dtype, device = _dtype_and_device(model, dtype)
    slack = rounding_budget(dtype)
    if tolerance is not None:
        if not torch.finfo(dtype).eps / 2 <= tolerance < 1:
            raise refusal(
                "fold(tolerance=...)",
                f"a number from {torch.finfo(dtype).eps / 2:.1g}, the rounding of {dtype}, to 1",
                repr(tolerance),
                "Leave it out for a fold that is exact to rounding.",
            )
        slack = ErrorBudget(tolerance, max_norm or math.inf, requested=True)
    with torch.inference_mode(False), torch.no_grad():
        graph_module, shapes = _capture(model, shape)
        plans: dict[str, Plan] = {}
        for node in [n for n in graph_module.graph.nodes if n in shapes.traces]:
            path = "" if isinstance(model, ConformalLayers) else str(node.target)
            label = path if path not in plans else f"{path} ({node.name})"
            plans[label] = _replace(
                graph_module, node, shapes, strategy, slack, dtype, device, max_paths
            )
        body = _simplest(graph_module).to(dtype=dtype, device=device)
        piece = None
        if shapes.steady:
            piece = _piece(graph_module, shapes.shapes, max(4, dtype.itemsize))
    return Folded(body, plans, (shape, shapes.result), dtype, device, piece, fingerprint(model))


def trace(model: nn.Module, input_shape: tuple[int, ...]) -> Trace:
    """Return the steps of a model's ConformalLayers: path, op, shapes, alpha and bound.

    Args:
        model: a :class:`ConformalLayers`, or a traceable module with some inside.
        input_shape: of one sample, without the batch axis.

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.AvgPool2d(2), cl.ReSPro(alpha=3.0), cl.Flatten())
        >>> print(cl.trace(model, (3, 8, 8)))
        path  op                                             input      output     alpha  bound
        ----  ---------------------------------------------  ---------  ---------  -----  -----
        0     AvgPool2d(kernel_size=2, stride=2, padding=0)  (3, 8, 8)  (3, 4, 4)             1
        1     ReSPro(alpha=3)                                (3, 4, 4)  (3, 4, 4)      3      1
        2     Flatten(start_dim=1, end_dim=-1)               (3, 4, 4)  (48,)                 1
    """
    shape = checked_shape(input_shape, "trace(input_shape=...)")
    if isinstance(model, ConformalLayers):
        return model.trace(shape)
    _, shapes = _capture(model, shape, keep_hooks=True)
    steps: list[Step] = []
    for found in shapes.traces.values():
        offset = len(steps)
        for step in found.steps:
            sources = tuple(source if source < 0 else source + offset for source in step.sources)
            steps.append(replace(step, sources=sources))
    return Trace(shape, tuple(steps))


def programs_of(
    model: nn.Module, input_shape: Shape, *, prefix: bool = True
) -> dict[str, list[Program | Web]]:
    """Return the program of each ConformalLayers, with none, one, … following layers absorbed.

    ``prefix`` tells whether it begins with the layers before the ConformalLayers that fold away.
    """
    graph_module, shapes = _capture(model, input_shape)
    found: dict[str, list[Program | Web]] = {}
    for node in shapes.traces:
        path = "" if node.target == _ROOT else str(node.target)
        whole, _ = _whole(graph_module, node, shapes, prefix)
        wholes = [whole]
        for follower, module in _followers(graph_module, node, shapes):
            wholes.append(with_head(wholes[-1], module, shapes.shapes[follower]))
        found[path if path not in found else f"{path} ({node.name})"] = wholes
    return found


def _whole(
    graph_module: fx.GraphModule, node: fx.Node, shapes: _Shapes, prefix: bool = True
) -> tuple[Program | Web, fx.Node]:
    """Return what a ConformalLayers computes, with the layers before it that keep the shape of t.

    A margin of zeros or repeated channels multiply the norm of every sample by one number, so they
    fold away. Returns the program and the node that feeds it.
    """
    path, feed = str(node.target), node.all_input_nodes[0]
    steps = shapes.traces[node]
    root = graph_module.get_submodule(path)
    layers = tuple(flatten_modules(root, "" if path == _ROOT else path))
    whole = whole_of(steps, layers)
    if isinstance(whole, Web) or not prefix:
        return whole, feed
    modules: list[nn.Module] = []
    operators: list[Operator] = []
    norm_factor, first = 1.0, feed
    while first.op == "call_module" and len(first.users) == 1 and len(first.all_input_nodes) == 1:
        module, before = graph_module.get_submodule(str(first.target)), first.all_input_nodes[0]
        kind = find_spec(module)
        factor = kind.norm_factor(module) if kind and kind.norm_factor else None
        refused = kind is not None and kind.check is not None and kind.check(module) is not None
        if factor is None or refused or not {before, first} <= shapes.shapes.keys():
            break
        modules.insert(0, module)
        operators.insert(0, operator_of(module, shapes.shapes[before], shapes.shapes[first]))
        norm_factor, first = norm_factor * factor, before
    if not modules or not _begins(graph_module, first):  # behind a part they belong to that one
        return whole, feed
    return with_prefix(whole, tuple(modules), tuple(operators), norm_factor), first


def _begins(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node is the input of the model, or that without its mean."""
    while node.op == "call_module" and len(node.all_input_nodes) == 1:
        if not is_plain(graph_module.get_submodule(str(node.target)), (Centre,)):
            return False
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, ConformalLayers) or is_plain(m, (Centre,)) or find_spec(m) is not None
        return known or super().is_leaf_module(m, module_qualified_name)


class _Shapes(fx.Interpreter):
    """Follow zeros through the graph to learn shapes; ConformalLayers are traced, not run."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # or fx would write its own lines into our messages
        self.traces: dict[fx.Node, Trace] = {}
        self.shapes: dict[fx.Node, Shape] = {}  # of a sample, where the batch axis comes first
        self.steady = True  # whether it does so everywhere
        self.result: Shape = ()

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_module" and isinstance(self.fetch_attr(str(n.target)), ConformalLayers):
            x: Tensor = self.env[n.all_input_nodes[0]]
            self.traces[n] = _retraced(self.fetch_attr(str(n.target)), str(n.target), x)
            value: Any = x.new_zeros(x.shape[0], *self.traces[n].output_shape)
        else:
            value = super().run_node(n)
        if isinstance(value, Tensor) and n.op != "get_attr":
            if value.shape[:1] == (_SAMPLES,):
                self.shapes[n] = tuple(value.shape[1:])
            else:
                self.steady = False
        if n.op == "output":
            if not isinstance(value, Tensor):
                raise refusal(
                    "fold(model)",
                    "a model that returns one tensor",
                    type(value).__name__,
                    "Fold its ConformalLayers one by one: model.part = cl.fold(model.part, shape).",
                )
            self.result = tuple(value.shape[1:])
        return value


def _retraced(layers: ConformalLayers, path: str, x: Tensor) -> Trace:
    prefix = "" if path == _ROOT else path
    return trace_modules(flatten_modules(layers, prefix), tuple(x.shape[1:]))


def _capture(
    model: nn.Module, shape: Shape, keep_hooks: bool = False
) -> tuple[fx.GraphModule, _Shapes]:
    """Trace a frozen copy of the model and learn the shape of every value in it."""
    if not isinstance(model, nn.Module):
        raise refusal("fold(model)", "an nn.Module", type(model).__name__, "Pass the model itself.")
    if isinstance(model, Folded):
        raise refusal("fold(model)", "a model with layers", "a Folded", "It is folded already.")
    if not any(isinstance(m, ConformalLayers) for m in model.modules()):
        raise refusal(
            "fold(model)",
            "a cl.ConformalLayers, or a module with some inside",
            type(model).__name__,
            "Nothing else folds; wrap its linear layers and activations.",
        )
    for path, module in model.named_modules():
        custom = type(module).forward is not ConformalLayers.forward
        if isinstance(module, ConformalLayers) and custom:
            raise refusal(
                f"fold({path or 'model'})",
                "the forward of ConformalLayers",
                f"{type(module).__name__}, which overrides it",
                "Put what it adds into a module around the ConformalLayers.",
            )
    if not keep_hooks:
        for path, module in model.named_modules():
            refuse_hooks(path, module)
    root: nn.Module = freeze(model)
    if isinstance(model, ConformalLayers):
        root = nn.Sequential()
        root.add_module(_ROOT, freeze(model))
    try:
        graph_module = fx.GraphModule(root, _Tracer().trace(root))
    except Exception as error:
        raise refusal(
            f"fold({type(model).__name__})",
            "a model that torch.fx can trace",
            f"{type(error).__name__}: {str(error).splitlines()[0]}",
            "Fold its ConformalLayers one by one: model.part = cl.fold(model.part, shape).",
        ) from error
    parameter = next(model.parameters(), None)
    zeros = torch.zeros(
        _SAMPLES,
        *shape,
        dtype=None if parameter is None else parameter.dtype,
        device=None if parameter is None else parameter.device,
    )
    shapes = _Shapes(graph_module)
    try:
        shapes.run(zeros)
    except ConformalError:
        raise
    except Exception as error:
        raise refusal(
            f"fold({type(model).__name__})",
            f"a model that takes one batch of samples of shape {shape_text(shape)}",
            f"{type(error).__name__}: {str(error).splitlines()[0]}",
            "Check input_shape, and that model(x) runs.",
        ) from error
    return graph_module, shapes


def _replace(
    graph_module: fx.GraphModule,
    node: fx.Node,
    shapes: _Shapes,
    strategy: str,
    slack: ErrorBudget,
    dtype: torch.dtype,
    device: torch.device,
    max_paths: int,
) -> Plan:
    """Put a folded chain in the place of a ConformalLayers node and of what it absorbs."""
    whole, feed = _whole(graph_module, node, shapes)
    if feed.op != "placeholder":
        slack = replace(slack, radius=math.inf)  # max_norm is that of the model's input
    request = request_of(_on(whole, device), slack, dtype, device, max_paths)
    requests, ends, wholes = [request], [node], [whole]
    kept = [0.0]  # seconds of the layers that each candidate leaves standing
    for follower, module in _followers(graph_module, node, shapes):
        wholes.append(_on(with_head(wholes[-1], module, shapes.shapes[follower]), device))
        requests.append(request.sibling(wholes[-1]))  # type: ignore[arg-type]
        ends.append(follower)
        own = Cost(gemm=wholes[-1].operators[-1].multiply_adds(), calls=2).seconds(machine())
        kept = [seconds + own for seconds in kept] + [0.0]
    # How much of the head to absorb is settled before anything is built: building takes longest.
    seconds = [outlook(item, strategy) + rest for item, rest in zip(requests, kept, strict=True)]
    best = min(range(len(seconds)), key=lambda i: (seconds[i], -i))
    last_node = ends[best]
    plan = make_plan(requests[best], strategy)
    folded = make_part(requests[best], plan.strategy)
    plan = with_outcome(plan, folded.certificate, best)
    name = f"folded_{node.name}"
    graph_module.add_submodule(name, folded)
    with graph_module.graph.inserting_after(last_node):
        new = graph_module.graph.call_module(name, (feed,))
    last_node.replace_all_uses_with(new)
    current = last_node
    while current is not feed:
        previous = current.all_input_nodes[0]
        graph_module.graph.erase_node(current)
        current = previous
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return plan


def _followers(
    graph_module: fx.GraphModule, node: fx.Node, shapes: _Shapes
) -> list[tuple[fx.Node, nn.Module]]:
    """Return the affine modules that hang on a node in a single line."""
    found = []
    while len(node.users) == 1:
        (node,) = node.users
        module = _affine(graph_module, node)
        if module is None or node not in shapes.shapes or len(node.all_input_nodes) != 1:
            break
        found.append((node, module))
    return found


def _affine(graph_module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        kind = find_spec(module)
        refused = kind is None or (kind.check is not None and kind.check(module) is not None)
        return None if refused or branches(module) else module
    return nn.Flatten() if _flattens(node) else None


def _flattens(node: fx.Node) -> bool:
    """Tell whether a node flattens all axes but the first."""
    flattens = node.op == "call_function" and node.target is torch.flatten
    flattens = flattens or (node.op == "call_method" and node.target == "flatten")
    return flattens and (node.args[1:], dict(node.kwargs)) in _FROM_AXIS_1


_FROM_AXIS_1: tuple[tuple[tuple[int, ...], dict[str, int]], ...] = (
    ((1,), {}),
    ((1, -1), {}),
    ((), {"start_dim": 1}),
    ((), {"start_dim": 1, "end_dim": -1}),
)


def _simplest(graph_module: fx.GraphModule) -> nn.Module:
    """Return an nn.Sequential where the graph is a plain chain of modules."""
    modules: list[nn.Module] = []
    previous = None
    for node in graph_module.graph.nodes:
        if node.op == "call_module" and node.args == (previous,) and not node.kwargs:
            modules.append(graph_module.get_submodule(str(node.target)))
        elif node.op == "output":
            if node.args != (previous,):
                return graph_module
        elif node.op != "placeholder" or previous is not None:
            return graph_module
        previous = node
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


# Modules outside the registry that treat every sample by itself in evaluation mode.
_BY_SAMPLE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU),
    *(nn.Mish, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.LayerNorm, nn.GroupNorm),
    Centre,
)


def _piece(graph_module: fx.GraphModule, shapes: dict[fx.Node, Shape], itemsize: int) -> int | None:
    """Return the samples that may run at a time, or None where samples might depend on others."""
    largest = max((math.prod(shapes.get(n, ())) for n in graph_module.graph.nodes), default=1)
    pieces = [max(1, PIECE_BYTES // (2 * itemsize * largest))]
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "output") or _flattens(node):
            continue
        if node.op != "call_module":
            return None
        module = graph_module.get_submodule(str(node.target))
        if isinstance(module, Part):
            pieces.append(module.piece)
        elif not _by_sample(module):
            return None
    return min(pieces)


def _by_sample(module: nn.Module) -> bool:
    """Tell whether a module treats every sample by itself."""
    kind = find_spec(module)
    if kind is not None:
        return kind.check is None or kind.check(module) is None
    return is_plain(module, _BY_SAMPLE)


def _on(program: Whole, device: torch.device) -> Whole:
    """Move a program's operators where float64 exists, if they are not there."""
    if wide_dtype(device) is torch.float64:
        return program
    for item in program.operators:
        item.module.to("cpu")
    return program


def _dtype_and_device(
    model: nn.Module, dtype: torch.dtype | None
) -> tuple[torch.dtype, torch.device]:
    parameter = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
    if dtype is None:
        dtype = torch.get_default_dtype() if parameter is None else parameter.dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise refusal(
            "fold(dtype=...)", "a floating-point torch.dtype", repr(dtype), "Try torch.float32."
        )
    return dtype, torch.device("cpu") if parameter is None else parameter.device


def _check_positive(name: str, value: Any) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not operator.gt(value, 0) or value == float("inf"):
        remedy = "Leave it out." if number else f"Pass float({name})."
        raise refusal(f"fold({name}=...)", "None or a finite number > 0", repr(value), remedy)

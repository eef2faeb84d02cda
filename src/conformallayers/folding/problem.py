"""Modules → Program or Web: the two shapes of a network, and requests to fold them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..registry.bounds import Shape
from ..registry.registry import flatten_modules
from .branches import Web, absorbed, web_of
from .certificate import ErrorBudget
from .operators import freeze
from .stages import Program, absorb, program_of
from .strategies import Request
from .strategies.paths import MAX_PATHS, WebRequest
from .trace import Source, Trace, trace_modules


def whole_of(trace: Trace, layers: tuple[tuple[str, nn.Module], ...]) -> Program | Web:
    """Return a program where the steps are a chain, a web where branches pass activations."""
    source = Source(layers, trace.alphas)
    return replace(program_of(trace), source=source) if trace.chain else web_of(trace, source)


def program_or_web(model: nn.Module, prefix: str, input_shape: Shape) -> Program | Web:
    """Trace the children of a model."""
    layers = tuple((path, freeze(module)) for path, module in flatten_modules(model, prefix))
    return whole_of(trace_modules(layers, input_shape), layers)


def with_head(whole: Program | Web, module: nn.Module, output_shape: Shape) -> Program | Web:
    """Append an affine module that stands behind."""
    if isinstance(whole, Web):
        return absorbed(whole, module, output_shape)
    return absorb(whole, module, output_shape)


def request_of(
    whole: Program | Web,
    slack: ErrorBudget,
    dtype: torch.dtype,
    device: torch.device,
    max_paths: int = MAX_PATHS,
) -> Request | WebRequest:
    """Ask for a fold."""
    if isinstance(whole, Web):
        return WebRequest(whole, slack, dtype, device, max_paths)
    return Request(whole, slack, dtype, device)

"""Save a fold as one safetensors file, and load it with the same numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import refusal
from ..recipe.file import DTYPES, Stored, read_file, typed, write_file
from ..recipe.layer_operations import Call
from ..recipe.recipe import unsupported
from .folded import Folded
from .plan import Plan


def save(
    folded: Folded,
    path: str | os.PathLike[str],
    *,
    labels: Sequence[str] | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Save a folded network as one safetensors file; no pickle.

    The file is written under a temporary name and then renamed, so that neither a full disk nor a kill leaves
    half of it. To store a model before folding, keep its ``state_dict`` and the arguments of its constructor.

    Args:
        folded: of :func:`conformallayers.fold`.
        path: of the file.
        labels: a name for every output; None keeps those that the fold has.
        about: anything else that JSON can hold, by name; None keeps what the fold has.

    Examples:
        >>> import conformallayers as cl, tempfile
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten())
        >>> folded, x = cl.fold(model, (1, 8, 8)), torch.rand(2, 1, 8, 8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cl.save(folded, f"{folder}/net.safetensors")
        ...     loaded = cl.load(f"{folder}/net.safetensors")
        >>> torch.equal(loaded(x), folded(x))
        True
    """
    given: Any = folded
    if not isinstance(given, Folded):
        remedy = "Fold a model first: cl.save(cl.fold(model, input_shape), path)."
        raise refusal("save(folded)", "a Folded", type(given).__name__, remedy)
    if os.fspath(path).lower().endswith((".onnx", ".c", ".h", ".pt", ".pth")):
        remedy = "Use cl.export_onnx for ONNX, cl.export_c for C and torch.save for a pickle."
        raise refusal("save(path)", "a path such as net.safetensors", repr(os.fspath(path)), remedy)
    dtype = str(folded.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        remedy = "Fold with dtype=torch.float32."
        raise refusal("save(folded)", f"one of {', '.join(DTYPES)}", dtype, remedy)
    recipe = folded.recipe
    for operation in recipe.operations:
        if isinstance(operation, Call):  # of a module, and a file holds no code
            raise unsupported(operation, "save(folded)", "operations that a file can describe")
    kinds = recipe.fixed_dtypes()
    recipe = recipe.with_constants(lambda name, array: _array(name, array, kinds.get(name)))
    stored = Stored(
        recipe,
        dtype,
        folded.strategy,
        folded.origin,
        folded.labels if labels is None else labels,  # type: ignore[arg-type]
        folded.about if about is None else about,  # type: ignore[arg-type]
        folded.plans,
    )
    write_file(path, stored)


def load(path: str | os.PathLike[str]) -> Folded:
    """Load the fold that :func:`save` wrote, on the CPU, with equal numbers.

    Every operation, the shapes of its values and a SHA-256 of all bytes are checked. That finds damage; it does
    not tell who wrote the file.

    Args:
        path: of the file.
    """
    stored = read_file(path)
    try:
        plans = {name: typed(plan, Plan) for name, plan in stored.plans.items()}
    except ValueError as error:
        where, remedy = f"load({os.fspath(path)})", "Save it again with cl.save."
        raise refusal(
            where, "a whole file of cl.save", f"plans that do not fit ({error})", remedy
        ) from error
    dtype: torch.dtype = getattr(torch, stored.dtype)
    kinds = stored.recipe.constant_dtypes(stored.dtype)
    recipe = stored.recipe.with_constants(
        lambda name, array: torch.from_numpy(array).to(getattr(torch, kinds[name]))
    )
    folded = Folded(recipe, dtype, plans, stored.origin)
    folded.labels, folded.about = stored.labels, stored.about
    return folded


def _array(name: str, tensor: Tensor, kind: str | None) -> Any:
    if tensor.is_meta:
        raise refusal("save(folded)", "constants with values", f"{name} on meta", "Fold again.")
    tensor = tensor.detach().cpu()
    if kind == "float64":  # devices without it hold float32
        tensor = tensor.double()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

"""Weights without torch: initial values by the graph's own rules, and safetensors files in and out.

A value's random numbers depend on the seed and the tensor's name alone, so that another graph of the same model
(another batch, another plan) starts from the same weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from layoutopt.errors import GraphError
from layoutopt.files import write_atomic
from layoutopt.graph import Role, Tensor, TrainingGraph

__all__ = ["initial_value", "initial_values", "load_safetensors", "save_safetensors"]


def initial_values(graph: TrainingGraph, seed: int = 0, *, given: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Parameters and optimizer state at the start of training.

    Args:
        graph: whose tensors' ``init`` says how: "zeros", "ones", "constant:VALUE" or "normal:STD"; state without one
            starts at zero.
        seed: of the random numbers.
        given: names that need no value, because a checkpoint has them.

    Returns:
        Arrays by tensor name, in the tensors' shapes and types.

    Raises:
        GraphError: an ``init`` that is none of these, or a parameter without one.
    """
    return {t.name: initial_value(t, seed) for t in graph.by_role("parameter", "state") if t.name not in given}


def initial_value(tensor: Tensor, seed: int = 0) -> np.ndarray:
    """The value of one parameter or state tensor at the start of training, as :func:`initial_values` says."""
    kind, _, argument = tensor.init.partition(":")
    dtype = np.dtype(tensor.dtype)
    if (kind in ("zeros", "ones") and not argument) or (not tensor.init and tensor.role == "state"):
        return np.full(tensor.shape, kind == "ones", dtype)
    if not tensor.init:
        raise GraphError(f"parameter {tensor.name!r} {list(tensor.shape)} has no starting value: give it one")
    try:
        value = float(argument)
    except ValueError:
        kind = ""
    if kind == "constant":
        return np.full(tensor.shape, value, dtype)
    if kind == "normal":
        rng = np.random.default_rng([seed, crc32(tensor.name.encode())])
        return (rng.standard_normal(tensor.shape, np.float32) * np.float32(value)).astype(dtype, copy=False)
    raise GraphError(
        f"{tensor.role} {tensor.name!r} starts as {tensor.init!r}: expected zeros, ones, constant:VALUE or normal:STD"
    )


def load_safetensors(
    graph: TrainingGraph,
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str] | None = None,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    role: Role = "parameter",
) -> dict[str, np.ndarray]:
    """Values for the graph's parameters (or state) from a safetensors file.

    Args:
        graph: what the values must fit.
        path: the file.
        rename: a name in the file to a name in the graph; unchanged by default.
        allow_missing: prefixes of graph names that the file may lack (a fresh classifier head).
        allow_extra: prefixes of file names (renamed) that are skipped; integer tensors, which are buffers, always are.
        role: "parameter" or "state".

    Returns:
        float32 arrays by graph name, without those that are missing.

    Raises:
        GraphError: no such file, not safetensors, or a tensor is missing, unknown, of another shape or type, or holds
            NaN or infinity; the message names it.
    """
    file = Path(path)
    if not file.is_file():
        raise GraphError(f"no checkpoint at {file}: expected a safetensors file")
    wanted = {t.name: t for t in graph.by_role(role)}
    found = {(rename(name) if rename else name): value for name, value in _read(file).items()}
    extra = sorted(n for n in found if n not in wanted and not n.startswith(tuple(allow_extra)))
    if extra:
        raise GraphError(
            f"{file} holds {extra[0]} ({len(extra)} such), which {graph.name} does not have: another model?"
        )
    missing = sorted(n for n in wanted if n not in found and not n.startswith(tuple(allow_missing)))
    if missing:
        raise GraphError(f"{file} lacks {missing[0]} ({len(missing)} such), which {graph.name} needs: another model?")
    values = {}
    for name, value in found.items():
        if name not in wanted:
            continue
        if value.shape != wanted[name].shape:
            raise GraphError(f"{file}: {name} has shape {value.shape}, expected {wanted[name].shape}")
        if not np.isfinite(value).all():
            bad = int(np.size(value) - np.isfinite(value).sum())
            raise GraphError(f"{file}: {name} holds {bad} NaN or infinite values: use another checkpoint")
        values[name] = np.ascontiguousarray(value, np.float32)
    return values


def _read(file: Path) -> dict[str, np.ndarray]:
    """Every float tensor of the file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise GraphError("reading checkpoints needs safetensors: pip install 'layoutopt[examples]'") from error
    values: dict[str, np.ndarray] = {}
    try:
        with safe_open(str(file), "numpy") as handle:
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                kind = str(handle.get_slice(name).get_dtype())
                if kind in ("F32", "F16", "F64"):
                    values[name] = handle.get_tensor(name)
                elif not kind.startswith(("I", "U", "BOOL")):
                    raise GraphError(f"{file}: {name} is {kind}: only F16, F32 and F64 are read, convert it first")
    except SafetensorError as error:
        raise GraphError(f"{file} is not a safetensors file, or is damaged ({error})") from error
    return values


def save_safetensors(
    path: str | os.PathLike[str], values: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file; a reader sees the old file or the new one.

    Args:
        path: the file.
        values: arrays by name.
        metadata: strings kept in the header; ``{"format": "pt"}`` is what transformers wants to see.

    Raises:
        GraphError: safetensors is not installed.
        LayoutOptError: the file cannot be written.
    """
    try:
        from safetensors.numpy import save
    except ImportError as error:
        raise GraphError("writing checkpoints needs safetensors: pip install 'layoutopt[examples]'") from error
    arrays = {name: np.asarray(value, order="C") for name, value in values.items()}  # scalars stay scalars
    write_atomic(path, save(arrays, dict(metadata) if metadata else None))

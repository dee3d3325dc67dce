"""Weights of a backbone, and of the head that its model was published or fine-tuned with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from layoutopt import checkpoint, textclass
from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.graph import TrainingGraph

__all__ = ["HEAD", "Pretrained", "load_pretrained"]

HEAD = {
    "pooler.weight": "pooler.dense.weight",
    "pooler.bias": "pooler.dense.bias",
    "classifier.weight": "classifier.weight",
    "classifier.bias": "classifier.bias",
}
"""Of a head's parts, the names in a checkpoint, without the backbone's prefix."""

_FILE = "model.safetensors"


@dataclass(frozen=True)
class Pretrained:
    """What a checkpoint holds for side-tuning.

    Attributes:
        values: float32 by parameter of the backbone.
        head: float32 by part of the head (:data:`HEAD`), those that there are: a pooler, a classifier.
        classes: labels that the classifier was trained for, in order; empty where none is named.
        tokenizer: file of the tokenizer; None where there is none.
    """

    values: dict[str, np.ndarray]
    head: dict[str, np.ndarray]
    classes: tuple[str, ...] = ()
    tokenizer: Path | None = None


def load_pretrained(graph: TrainingGraph, facts: Mapping[str, Any], where: Path | None, seed: int) -> Pretrained:
    """The weights of a captured backbone.

    Args:
        graph: a captured backbone.
        facts: of its taps.
        where: a checkpoint directory or safetensors file; None: the pretrained package of minilm, and weights drawn
            from ``seed`` for other models.
        seed: of drawn weights.

    Raises:
        LayoutOptError: missing, damaged, of another model, or not finite.
    """
    source = textclass.pretrained("minilm").directory if where is None and facts["model"] == "minilm" else where
    if source is None:
        return Pretrained(checkpoint.initial_values(graph, seed), {})
    file = source / _FILE if source.is_dir() else source
    if not file.is_file():
        raise LayoutOptError(
            f"no weights at {file}: expected a checkpoint directory with {_FILE}, or a safetensors file"
        )
    prefix, blocks = str(facts["prefix"]), str(facts["blocks"])
    names = {name: _with_prefix(name, prefix) for name in _tensors(file, ())}
    wanted = {t.name for t in graph.by_role("parameter")}
    # Heads and poolers are no part of a backbone; blocks that it lacks mean that it is another model's.
    beside = [n for n in names.values() if n not in wanted and not n.startswith(f"{blocks}.")]
    values = checkpoint.load_safetensors(graph, file, rename=names.__getitem__, allow_extra=beside)
    head = _head(file, prefix, int(facts["width"]))
    tokenizer = file.parent / "tokenizer.json"
    return Pretrained(values, head, _classes(file, head), tokenizer if tokenizer.is_file() else None)


def _with_prefix(name: str, prefix: str) -> str:
    """A parameter's name as the whole model has it: a checkpoint may be of the bare backbone."""
    return name if name.startswith(prefix) else f"{prefix}{name}"


def _classes(file: Path, head: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    if "classifier.weight" not in head or not (file.parent / "config.json").is_file():
        return ()
    return textclass.classes_of(textclass.Source(file.parent))


def _tensors(file: Path, wanted: Sequence[str]) -> dict[str, np.ndarray | None]:
    """Every name in the file, with its array where it is wanted.

    Raises:
        GraphError: no safetensors file, or the package is missing.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise GraphError("reading checkpoints needs safetensors: pip install 'layoutopt[side]'") from error
    try:
        with safe_open(str(file), "numpy") as handle:
            return {name: handle.get_tensor(name) if name in wanted else None for name in list(handle.keys())}
    except SafetensorError as error:
        raise GraphError(f"{file} is not a safetensors file, or is damaged ({error})") from error


def _head(file: Path, prefix: str, width: int) -> dict[str, np.ndarray]:
    """What there is of a head, where it reads numbers of the backbone's width.

    Raises:
        GraphError: it holds NaN or infinity.
    """
    in_file = {key: (name, f"{prefix}{name}") for key, name in HEAD.items()}
    found = _tensors(file, [name for pair in in_file.values() for name in pair])
    head: dict[str, np.ndarray] = {}
    for key, pair in in_file.items():
        value = next((x for name in pair if (x := found.get(name)) is not None), None)
        if value is None or (value.ndim == 2 and value.shape[1] != width):
            continue
        if not np.isfinite(value).all():
            raise GraphError(f"{file}: {key} holds NaN or infinite values: use another checkpoint")
        head[key] = np.ascontiguousarray(value, np.float32)
    # A part without its other half is none.
    return {key: x for key, x in head.items() if _other_half(key) in head}


def _other_half(key: str) -> str:
    part, _, half = key.partition(".")
    return f"{part}.{'bias' if half == 'weight' else 'weight'}"

"""Labelled samples for a backbone: lines of text, or arrays; and how they are split."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from layoutopt import textdata
from layoutopt.arraydata import read_arrays
from layoutopt.errors import LayoutOptError
from layoutopt.train import Dataset

__all__ = ["Reader", "Samples", "encoded", "read_samples"]


class Reader(Protocol):
    """What samples are for: a backbone, or a fine-tuned model."""

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Shape of one sample, by input."""
        ...

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Texts as inputs."""
        ...


@dataclass(frozen=True, eq=False)
class Samples:
    """What a device knows and a server never sees.

    Attributes:
        data: arrays [n, …] by input of the backbone, and "labels" int32 [n].
        classes: labels in the order of their numbers.
        fingerprint: short hash of everything, in order.
    """

    data: Dataset
    classes: tuple[str, ...]
    fingerprint: str

    def split(self, held_out: float, seed: int) -> tuple[Dataset, Dataset | None]:
        """Training and held-out samples; a seed always gives the same split. None where nothing is held out."""
        return self.data.split(held_out, seed) if held_out else (self.data, None)


def encoded(
    texts: Sequence[str], tokenizer: Path | None, inputs: Mapping[str, tuple[int, ...]], model: str
) -> dict[str, np.ndarray]:
    """Texts as a graph's inputs, int32 [n, seq] by name.

    Args:
        texts: n strings.
        tokenizer: its file; None: the checkpoint has none.
        inputs: shape of one sample, by input.
        model: for the message.

    Raises:
        LayoutOptError: the model takes no text, or there is no tokenizer.
    """
    if "input_ids" not in inputs:
        raise LayoutOptError(f"{model} takes no text: give arrays of {', '.join(inputs)}")
    if tokenizer is None:
        raise LayoutOptError(f"the weights of {model} come without tokenizer.json: text cannot be read")
    found = textdata.encode(texts, tokenizer, inputs["input_ids"][0])
    return {name: x for name, x in found.items() if name in inputs}


def read_samples(backbone: Reader, data: str, classes: Sequence[str] = ()) -> Samples:
    """The labelled samples in a file.

    Args:
        backbone: what they are for; its tokenizer and number of tokens are used.
        data: of a text model a file of label<TAB>text lines; else, and where it ends in .npz, arrays by input and
            "labels"; or "digits".
        classes: labels in the order of their numbers; those of the file, sorted, by default.

    Raises:
        LayoutOptError: the file is missing or damaged, or a label is not among ``classes``.
    """
    if "input_ids" in backbone.inputs and not data.endswith(".npz"):
        return _of_text(backbone, data, classes)
    arrays = read_arrays(data, {**backbone.inputs, "labels": ()})
    labels = arrays["labels"]
    if labels.dtype.kind not in "iu" or labels.min(initial=0) < 0:
        raise LayoutOptError(f"{data}: labels are whole numbers from 0 up, got {labels.dtype} from {labels.min()}")
    count = len(classes) or int(labels.max(initial=0)) + 1
    if labels.max(initial=0) >= count:
        raise LayoutOptError(f"{data} has the label {labels.max()}: the model knows 0 to {count - 1}")
    named = tuple(classes) or tuple(str(i) for i in range(count))
    arrays["labels"] = labels.astype(np.int32)
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return Samples(Dataset(arrays), _enough(named, data), digest.hexdigest()[:16])


def _of_text(backbone: Reader, data: str, classes: Sequence[str]) -> Samples:
    text = textdata.read_labelled_text(Path(data))
    named = _enough(tuple(classes) or text.classes, data)
    labels = textdata.label_ids(text.labels, named, data)
    return Samples(Dataset({**backbone.encode(text.texts), "labels": labels}), named, text.fingerprint)


def _enough(classes: tuple[str, ...], data: str) -> tuple[str, ...]:
    if len(classes) < 2:
        raise LayoutOptError(f"{data} has only the label {classes[0]!r}: a classifier needs at least two")
    return classes

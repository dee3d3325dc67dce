"""What a device and a server agree on, and what a device sends for a step: values that are checked where they arrive.

A :class:`Task` says everything that the weights of a training depend on, beside the batches. A :class:`Batch` is a
step's activations. A device may be foreign or broken: :meth:`Batch.check` holds every array against the task, and what
it lets pass can harm nothing but the training that it belongs to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, cast

import msgspec
import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.quantize import Format, groups_per_row, words_per_row

__all__ = ["IGNORED", "LARGEST_BATCH_BYTES", "WINDOW_STEPS", "Batch", "Tap", "Task"]

Tap = tuple[np.ndarray, np.ndarray]
"""words int32[rows, words_per_row] and scales float32[rows, groups_per_row] of a tap."""

IGNORED = -100
"""The target of a sample that the loss leaves out."""

WINDOW_STEPS = 8
"""Steps that may be accepted and not yet applied."""

LARGEST_BATCH_BYTES = 1 << 28
LARGEST_PARAMETERS = 1 << 27
_LARGEST_VALUE = 1e15  # squares and their sums stay finite in float32
_LONGEST_NAME = 200
_CHOICES = {
    "tokens": ("all", "pivot"),
    "pooling": ("first", "last", "mean"),
    "mode": ("labels", "private"),
    "optimizer": ("adamw", "sgd"),
    "schedule": ("constant", "linear", "cosine"),
}
_COUNTS = {
    "width": (1, 1 << 16),
    "seq": (0, 1 << 16),
    "batch": (1, 1 << 14),
    "classes": (2, 1 << 16),
    "rank": (1, 1 << 12),
    "warmup": (0, 1 << 31),
    "steps": (1, 1 << 31),
    "seed": (0, (1 << 63) - 1),
}
_NUMBERS = {"lr": (0.0, 100.0), "weight_decay": (0.0, 100.0), "gate": (0.0, 1.0)}


def _refuse(message: str) -> LayoutOptError:
    return LayoutOptError(message)


@dataclass(frozen=True)
class Task:
    """A training of a side network.

    Attributes:
        model: name of the backbone.
        graph: hash of its captured graph.
        width: numbers of a row of a tap.
        taps: tapped modules in order; the last is the backbone's final result.
        format: of the taps, as :meth:`layoutopt.quantize.Format.parse` takes it.
        tokens: "pivot": a batch has a row per sample, of the token that the loss uses; "all": of every token.
        seq: tokens of a sample; not used with "pivot".
        batch: samples of a step at most (the last of an epoch may have fewer).
        classes: of the classifier.
        mode: "labels": cross-entropy with labels; "private": squared error to the differences between the right answer
            and the backbone's probabilities.
        pooling: the token that the head sees: the first, the last real one, or the mean of all real ones. "pivot"
            tokens are pooled already.
        pooler: whether a dense layer with tanh stands before the classifier.
        rank: of an adapter.
        gate: share of the running state in an adapter's input at the start, between 0 and 1.
        optimizer: "adamw" or "sgd".
        lr: learning rate at its highest.
        weight_decay: of matrices.
        schedule: of the learning rate after the warm-up: constant, or linear or cosine to 0 at the last step.
        warmup: steps in which the learning rate rises from 0.
        steps: of the whole training.
        seed: of the initial weights.

    Raises:
        LayoutOptError: a field is out of range.
    """

    model: str
    graph: str
    width: int
    taps: tuple[str, ...]
    format: str
    tokens: Literal["all", "pivot"]
    seq: int
    batch: int
    classes: int
    mode: Literal["labels", "private"]
    pooling: Literal["first", "last", "mean"] = "first"
    pooler: bool = False
    rank: int = 16
    gate: float = 0.5
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.01
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup: int = 0
    steps: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _refuse(f"a task's {name} is one of {', '.join(choices)}, got {_short(getattr(self, name))}")
        for name, (least, most) in _COUNTS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise _refuse(f"a task's {name} is a whole number from {least} to {most}, got {_short(value)}")
        for name, (low, high) in _NUMBERS.items():
            value = getattr(self, name)
            if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
                raise _refuse(f"a task's {name} is a number from {low:g} to {high:g}, got {_short(value)}")
        self._check_names()
        self._check_together()

    def _check_names(self) -> None:
        names = (self.model, self.graph, self.format, *(self.taps if type(self.taps) is tuple else (None,)))
        for name in names:
            if type(name) is not str or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
                raise _refuse(
                    f"names in a task are 1 to {_LONGEST_NAME} printable characters, taps a tuple of them, "
                    f"got {_short(name)}"
                )
        if not 1 <= len(self.taps) <= 1000 or len(set(self.taps)) < len(self.taps):
            raise _refuse(f"a task has 1 to 1000 different taps, got {_short(self.taps)}")
        Format.parse(self.format)

    def _check_together(self) -> None:
        if type(self.pooler) is not bool:
            raise _refuse(f"a task's pooler is true or false, got {_short(self.pooler)}")
        if self.lr == 0 or self.gate in (0, 1):
            raise _refuse(f"a task's lr is above 0 and its gate between 0 and 1, got {self.lr} and {self.gate}")
        if self.warmup > self.steps:
            raise _refuse(f"a task's warmup ends within its {self.steps} steps, got {self.warmup}: give fewer")
        if self.tokens == "all" and not self.seq:
            raise _refuse("a task whose batches have all tokens says how many a sample has: seq is 0")
        if self.tokens == "pivot" and self.pooling == "mean":
            raise _refuse('the mean of all tokens needs them: a task with pooling "mean" has tokens "all"')
        if self.batch_bytes > LARGEST_BATCH_BYTES:
            raise _refuse(
                f"a batch of this task has {self.batch_bytes} bytes, more than {LARGEST_BATCH_BYTES}: "
                "take fewer samples, fewer taps, or pivot tokens"
            )
        if self.parameters > LARGEST_PARAMETERS:
            raise _refuse(
                f"the side network has {self.parameters} parameters, more than {LARGEST_PARAMETERS}: take a lower rank"
            )

    @classmethod
    def decode(cls, data: bytes | str) -> Task:
        """A task from JSON.

        Raises:
            LayoutOptError: it is none.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _refuse(f"this is no task: {str(error)[:_LONGEST_NAME]}") from error

    def encode(self) -> bytes:
        """It as JSON."""
        return msgspec.json.encode(self)

    def differs(self, other: Task) -> tuple[str, ...]:
        """Names of the fields in which another task differs."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))

    @property
    def fmt(self) -> Format:
        """The taps' format."""
        return Format.parse(self.format)

    @property
    def rows_per_sample(self) -> int:
        """Rows of a tap for one sample."""
        return self.seq if self.tokens == "all" else 1

    @property
    def words(self) -> int:
        """int32 words of a row of a tap."""
        return words_per_row(self.fmt, self.width)

    @property
    def groups(self) -> int:
        """Scales of a row of a tap."""
        return groups_per_row(self.fmt, self.width)

    @property
    def target_dtype(self) -> type[np.generic]:
        """Of a batch's targets."""
        return np.int32 if self.mode == "labels" else np.float32

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's taps, mask and target."""
        mask = self.seq if self.tokens == "all" else 0
        target = 4 if self.mode == "labels" else 4 * self.classes
        return len(self.taps) * self.rows_per_sample * 4 * (self.words + self.groups) + mask + target

    @property
    def batch_bytes(self) -> int:
        """Bytes of the arrays of a whole batch."""
        return self.batch * self.sample_bytes

    @property
    def parameters(self) -> int:
        """Numbers that are trained."""
        taps = len(self.taps)
        adapters = taps * 2 * self.width * self.rank + taps - 1  # a gate to each but the first
        pooler = self.width * (self.width + 1) if self.pooler else 0
        return adapters + pooler + self.classes * (self.width + 1) + 1

    @property
    def training_bytes(self) -> int:
        """Memory of a training on the server, estimated: weights and optimizer, a checkpoint, a step, a batch."""
        copies = 4 + 9  # weight, gradient, two moments; and what a checkpoint needs while it is written
        rows = self.batch * self.rows_per_sample
        # Taps, states and what the backward pass keeps of each adapter.
        step = rows * 4 * (len(self.taps) * (4 * self.width + 3 * self.rank) + 2 * self.width)
        return 4 * copies * self.parameters + step + (WINDOW_STEPS + 2) * self.batch_bytes


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


@dataclass(frozen=True, eq=False)
class Batch:
    """A step's samples.

    Attributes:
        step: its place in the training, from 0.
        samples: an id for each, numbers that mean something on the device only.
        taps: words and scales per tap, sample by sample; () where the server is to take these samples from its store,
            with masks and targets.
        mask: uint8[samples, seq], 1 where a token is real; None with pivot tokens, and where ``taps`` is ().
        targets: labels int32[samples], -100 for a sample that the loss leaves out; or differences
            float32[samples, classes] (mode "private"); None where ``taps`` is ().
    """

    step: int
    samples: tuple[int, ...]
    taps: tuple[Tap, ...] = ()
    mask: np.ndarray | None = None
    targets: np.ndarray | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the server is to take the samples from its store."""
        return not self.taps

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = [a for tap in self.taps for a in tap] + [a for a in (self.mask, self.targets) if a is not None]
        return sum(a.nbytes for a in arrays)

    def check(self, task: Task) -> None:
        """See that it is a batch of this task, in every number.

        Raises:
            LayoutOptError: it is not; the sentence says what of it.
        """
        if type(self.step) is not int or not 0 <= self.step < task.steps:
            raise _refuse(f"a batch of this task has a step from 0 to {task.steps - 1}, got {_short(self.step)}")
        if type(self.samples) is not tuple or not 1 <= len(self.samples) <= task.batch:
            raise _refuse(f"step {self.step}: expected 1 to {task.batch} samples, got {_short(self.samples)}")
        for sample in self.samples:
            if type(sample) is not int or not 0 <= sample < 1 << 63:
                raise _refuse(f"step {self.step}: a sample's id is a number from 0 to 2^63 - 1, got {_short(sample)}")
        if type(self.taps) is not tuple:
            raise _refuse(f"step {self.step}: taps are a tuple, got {type(self.taps).__name__}")
        if self.is_stored:
            if self.mask is not None or self.targets is not None:
                raise _refuse(f"step {self.step}: a batch without taps has neither mask nor targets")
            return
        if len(self.taps) != len(task.taps):
            raise _refuse(f"step {self.step}: expected {len(task.taps)} taps, got {len(self.taps)}")
        for name, tap in zip(task.taps, self.taps, strict=True):
            self._check_tap(task, name, tap)
        self._check_mask(task)
        self._check_targets(task)

    def _array(self, value: object, what: str, dtype: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
        got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        expected = f"{np.dtype(dtype)}{list(shape)}"
        if got != expected:
            raise _refuse(f"step {self.step}: {what} are {got}, expected {expected}")
        return cast(np.ndarray, value)

    def _check_tap(self, task: Task, name: str, tap: object) -> None:
        if type(tap) is not tuple or len(tap) != 2:
            raise _refuse(f"step {self.step}: tap {name} is no pair of words and scales")
        rows = len(self.samples) * task.rows_per_sample
        words = self._array(tap[0], f"the words of tap {name}", np.int32, (rows, task.words))
        scales = self._array(tap[1], f"the scales of tap {name}", np.float32, (rows, task.groups))
        fmt = task.fmt
        if fmt.kind == "float32":
            self._check_range(words.view(np.float32) if words.size else words, f"numbers of tap {name}", _LARGEST_VALUE)
            return
        self._check_range(scales, f"the scales of tap {name}", _LARGEST_VALUE / fmt.peak)
        if ((scales != 0) & (scales < np.finfo(np.float32).tiny)).any():
            raise _refuse(f"step {self.step}: the scales of tap {name} are 0 or positive normal numbers, got another")
        if fmt.kind in ("int8", "int4") and _has_least_code(words, fmt):
            raise _refuse(f"step {self.step}: codes of tap {name} are from -{fmt.peak:g} to {fmt.peak:g}, got another")
        used = task.width % fmt.codes_per_word
        if used and (words[:, -1].view(np.uint32) >> np.uint32(used * 32 // fmt.codes_per_word)).any():
            raise _refuse(f"step {self.step}: the last word of a row of tap {name} is not 0 beyond its values")

    def _check_range(self, values: np.ndarray, what: str, largest: float) -> None:
        # NaN compares false, and is refused.
        if not (np.abs(values) <= largest).all():
            raise _refuse(f"step {self.step}: {what} are finite and at most {largest:g}, got another")

    def _check_mask(self, task: Task) -> None:
        if task.tokens == "pivot":
            if self.mask is not None:
                raise _refuse(f"step {self.step}: a batch of pivot tokens has no mask")
            return
        mask = self._array(self.mask, "masks", np.uint8, (len(self.samples), task.seq))
        if (mask > 1).any() or not mask.any(axis=1).all():
            raise _refuse(f"step {self.step}: a mask is of zeros and ones, with a one in every sample")

    def _check_targets(self, task: Task) -> None:
        n = len(self.samples)
        if task.mode == "private":
            targets = self._array(self.targets, "targets", np.float32, (n, task.classes))
            if not (np.abs(targets) <= 1).all():
                raise _refuse(f"step {self.step}: differences of probabilities are from -1 to 1, got another")
            return
        labels = self._array(self.targets, "targets", np.int32, (n,))
        if (((labels < 0) | (labels >= task.classes)) & (labels != IGNORED)).any():
            raise _refuse(f"step {self.step}: labels are from 0 to {task.classes - 1}, or {IGNORED}, got another")
        if (labels == IGNORED).all():
            raise _refuse(f"step {self.step}: every sample is left out of the loss: send one that is not")


def _has_least_code(words: np.ndarray, fmt: Format) -> bool:
    """Whether a code is the one two's complement number that no value has (-128, -8)."""
    bits = 32 // fmt.codes_per_word
    codes = words.view(np.uint32)
    mask, least = np.uint32((1 << bits) - 1), np.uint32(1 << (bits - 1))
    return any(bool((codes >> np.uint32(k * bits) & mask == least).any()) for k in range(fmt.codes_per_word))

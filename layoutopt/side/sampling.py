"""Which samples make which step of a training, and the numbers by which a server knows them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.side.task import Tap

__all__ = ["Activations", "Arrays", "Sampling"]


@dataclass(frozen=True, eq=False)
class Arrays:
    """What a device computed of some samples: a :class:`~layoutopt.side.task.Batch` without step and numbers."""

    taps: tuple[Tap, ...]
    mask: np.ndarray | None
    targets: np.ndarray


class Activations(Protocol):
    """Where batches come from: a backbone with a data set, or a test's stand-in."""

    @property
    def samples(self) -> int:
        """How many there are."""

    def run(self, samples: np.ndarray) -> Arrays:
        """Compute what crosses of some samples, the same whenever it is asked for.

        Args:
            samples: indices, at most a batch of them.
        """


class Sampling:
    """The order of samples in every epoch: a function of seed, epoch and a secret.

    The seed is known to the server. The secret is not, so that neither the order in which samples come nor their
    numbers tell the server which samples of the device's files they are.

    Args:
        samples: how many there are.
        batch: of a step; the last step of an epoch may have fewer.
        seed: of the order.
        secret: the device's.

    Raises:
        LayoutOptError: there are no samples.
    """

    def __init__(self, samples: int, batch: int, seed: int, secret: bytes) -> None:
        if samples < 1:
            raise LayoutOptError("there are no samples to train on: the data are empty")
        self.samples, self._batch = samples, batch
        self._key = list(hashlib.sha256(b"layoutopt side-tuning %d " % seed + secret).digest())
        self._numbers = np.random.default_rng([*self._key, 0]).permutation(samples)
        self._indices = np.argsort(self._numbers)
        self._epoch = -1
        self._order = np.empty(0, np.int64)
        self.steps_per_epoch = -(-samples // batch)

    def epoch(self, step: int) -> int:
        """The epoch that a step is in."""
        return step // self.steps_per_epoch

    def indices(self, step: int) -> np.ndarray:
        """The samples of a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([*self._key, 1 + epoch]).permutation(self.samples)
            self._epoch = epoch
        return self._order[position * self._batch : (position + 1) * self._batch]

    def numbers(self, step: int) -> tuple[int, ...]:
        """Their numbers on the wire."""
        return tuple(self._numbers[self.indices(step)].tolist())

    def of_numbers(self, numbers: Sequence[int]) -> np.ndarray:
        """The samples that have these numbers.

        Raises:
            LayoutOptError: there is no such sample.
        """
        if not all(number < self.samples for number in numbers):
            raise LayoutOptError("the server asks for samples that this device does not have: it is no such server")
        return self._indices[list(numbers)]

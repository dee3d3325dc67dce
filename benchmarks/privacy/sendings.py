"""Everything that a device might send for its labels, plain or disguised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from sklearn.linear_model import LogisticRegression

from benchmarks.privacy import labels as attacks
from layoutopt.side.label_noise import randomised

__all__ = ["EPSILONS", "Device", "Sending", "linear_head", "sendings"]

EPSILONS = (4.0, 2.0, 1.0, 0.5)
_SHARES, _CODE = 4, 8

Outputs = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Device:
    """A device's data.

    Attributes:
        labels: int [n].
        states: pivots of its messages as they arrive, float32 [taps, n, width].
        held_out: pivots of others, of which it wants the classes.
        classes: how many there are.
    """

    labels: np.ndarray
    states: np.ndarray
    held_out: np.ndarray
    classes: int


@dataclass(frozen=True)
class Sending:
    """What a device sends for its labels, and what it makes of the network that the server trains on it.

    Attributes:
        name: of the variant.
        targets: int [n] (cross-entropy), or float32 [n, c] (squared error).
        decide: the device's answers, int [m], from the network's outputs [m, c] on its held-out messages.
        others: attacks made for this variant: found groups, int [n], from the network's outputs on what was sent.
        groups: numbers that ``targets`` [n] may have; 0: as many as there are classes.
    """

    name: str
    targets: np.ndarray
    decide: Outputs
    others: dict[str, Outputs] = field(default_factory=dict)
    groups: int = 0

    @property
    def read(self) -> np.ndarray:
        """What the targets say as they are, int [n]."""
        return self.targets if self.targets.ndim == 1 else self.targets.argmax(1)


def linear_head(rows: np.ndarray, labels: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """A classifier of pivots: probabilities [m, classes] of rows [m, width]."""
    return LogisticRegression(C=0.1, max_iter=500).fit(rows, labels).predict_proba


def sendings(device: Device, draw: np.random.Generator) -> Iterator[Sending]:
    """Every variant; secrets are drawn anew for each."""
    rows, classes, y = device.states[-1], device.classes, device.labels
    yield Sending("labels", y, _largest)
    weight = draw.normal(0, 0.02, (rows.shape[1], classes))
    trained = linear_head(rows, y)
    fresh, own = ((lambda x: attacks.softmax(x @ weight)), "head at random"), (trained, "head trained on the device")
    for head, name in (fresh, own):
        yield _differences(f"differences, {name}", device, y, head)
    yield from _disguised(device, trained, draw)
    for epsilon in EPSILONS:
        noisy = randomised(y, classes, epsilon, draw.bytes(32))
        yield Sending(f"labels, randomised response, epsilon {epsilon:g}", noisy, _largest)
    noisy = randomised(y, classes, 1.0, draw.bytes(32))
    yield _differences("differences of randomised labels, epsilon 1, head trained on true ones", device, noisy, trained)
    for epsilon in EPSILONS:
        plain = _differences(f"differences, Laplace noise, epsilon {epsilon:g}", device, y, fresh[0])
        noise = draw.laplace(0, 2 / epsilon, plain.targets.shape)
        yield Sending(plain.name, (plain.targets + noise).astype(np.float32), plain.decide)


def _largest(outputs: np.ndarray) -> np.ndarray:
    return outputs.argmax(1)


def _differences(name: str, device: Device, y: np.ndarray, head: Outputs) -> Sending:
    targets = attacks.differences(y, head(device.states[-1]))
    there = head(device.held_out[-1])
    return Sending(
        name,
        targets,
        lambda outputs: (there + outputs).argmax(1),
        {"the head's own answers": lambda _: attacks.by_magnitude(targets)},
    )


def _disguised(device: Device, head: Outputs, draw: np.random.Generator) -> Iterator[Sending]:
    """Secret codes, secret shares of classes, secret masks."""
    classes, y = device.classes, device.labels
    plain, there = attacks.differences(y, head(device.states[-1])), head(device.held_out[-1])
    order = draw.permutation(classes)
    back = np.argsort(order)
    yield Sending("differences, classes permuted", plain[:, order], lambda out: (there + out[:, back]).argmax(1))

    code, offset = draw.normal(0, 0.3, (classes, _CODE)), draw.normal(0, 0.3, _CODE)
    undo = np.linalg.pinv(code)
    coded, rows = (plain @ code + offset).astype(np.float32), device.states[-1]
    yield Sending(
        "differences in a secret code",
        coded,
        lambda out: (there + (out - offset) @ undo).argmax(1),
        {"a head that fits": lambda _: attacks.by_consistent_head(coded, rows)},
    )

    names = draw.permutation(classes * _SHARES)
    shares = names[y * _SHARES + draw.integers(0, _SHARES, len(y))]
    owner = np.argsort(names) // _SHARES
    yield Sending(
        f"labels, each class cut into {_SHARES} at random",
        shares,
        lambda out: (attacks.softmax(out) @ np.eye(classes)[owner]).argmax(1),
        {"shares that look alike": lambda out: attacks.by_groups(shares, attacks.softmax(out), classes, 0)},
        classes * _SHARES,
    )

    secret = draw.normal(0, 1, (rows.shape[1], classes))
    secret /= (rows @ secret).std(0)
    masked = (np.eye(classes)[y] - rows @ secret).astype(np.float32)
    yield Sending(
        "classes less a secret linear map of the pivot",
        masked,
        lambda out: (out + device.held_out[-1] @ secret).argmax(1),
        {"clusters, corrected": lambda _: attacks.by_sparse_errors(masked, rows, attacks.by_clusters(rows, 2, 0))},
    )

"""``layoutopt side device``: a backbone and a data set on one side, a server on the other."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.files import check_folder, write_atomic
from layoutopt.side.backbone import Backbone, Planning, Wanted
from layoutopt.side.client import Remote, Report, Settings, train
from layoutopt.side.device_head import DeviceHead, fit_head
from layoutopt.side.evaluate import save_device_head
from layoutopt.side.label_noise import check_epsilon, randomised
from layoutopt.side.samples import Samples, read_samples
from layoutopt.side.sampling import Arrays
from layoutopt.side.task import Task
from layoutopt.train import Dataset

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = ["HEAD_FILE", "NETWORK_FILE", "BackboneSource", "Job", "Outcome", "run_job"]

NETWORK_FILE, HEAD_FILE, _SECRET_FILE = "side.safetensors", "device-head.safetensors", "samples.key"
_ALL_TOKENS = "activations of all tokens tell the server what is in the samples: pivot tokens tell far less"
_HEAD_SAMPLES = 512
"""That the device's own head is fitted to, at most."""


@dataclass(frozen=True)
class Job:
    """A training as a device is asked for it.

    Attributes:
        wanted: the backbone.
        data: labelled samples, as :func:`layoutopt.side.samples.read_samples` takes them.
        out: folder for the side network, and for what makes a training go on: the secret of its sample numbers.
        mode: "labels" or "private".
        epochs: over the training samples.
        lr: learning rate at its highest.
        rank: of an adapter.
        optimizer: "adamw" or "sgd".
        schedule: "linear", "cosine" or "constant".
        warmup: share of the steps.
        weight_decay: of matrices.
        held_out: share of the samples that is kept for evaluation.
        seed: of the split, the order and the network's fresh weights.
        max_steps: to stop after; None: all epochs.
        label_epsilon: of the labels that are trained on (:mod:`layoutopt.side.label_noise`); None: the true ones.
    """

    wanted: Wanted
    data: str
    out: Path
    mode: str = "labels"
    epochs: int = 3
    lr: float = 1e-3
    rank: int = 16
    optimizer: str = "adamw"
    schedule: str = "linear"
    warmup: float = 0.1
    weight_decay: float = 0.01
    held_out: float = 0.2
    seed: int = 0
    max_steps: int | None = None
    label_epsilon: float | None = None

    def __post_init__(self) -> None:
        if self.label_epsilon is not None:
            check_epsilon(self.label_epsilon)


@dataclass
class Outcome:
    """What came of a job.

    Attributes:
        report: of the training.
        task: what was trained.
        samples: for training.
        network: file of the side network.
        weights_bytes: of the backbone, on the device.
        peak_bytes: of all of the device's buffers.
        prepare_s: seconds before the first connection: capture, planning, reading data.
    """

    report: Report
    task: Task
    samples: int
    network: Path
    weights_bytes: int
    peak_bytes: int
    prepare_s: float = field(default=0.0)


class BackboneSource:
    """Activations of a backbone and samples.

    Args:
        backbone: that runs.
        data: samples with "labels".
        head: of the mode "private": the device's own.
    """

    def __init__(self, backbone: Backbone, data: Dataset, head: DeviceHead | None = None) -> None:
        self._backbone, self._data, self._head = backbone, data, head
        self._inputs = {name: x for name, x in data.inputs.items() if name != data.target}

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self._data)

    def run(self, samples: np.ndarray) -> Arrays:
        """Taps, mask and targets of some samples."""
        inputs = {name: x[samples] for name, x in self._inputs.items()}
        labels = self._data.inputs[self._data.target][samples].astype(np.int32)
        taps = self._backbone.run(inputs)
        mask = self._backbone.mask(inputs) if self._backbone.rows_per_sample > 1 else None
        if self._head is None:
            return Arrays(taps, mask, labels)
        return Arrays(taps, mask, self._head.differences(self._backbone.features(taps, inputs), labels))

    def features(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Final features and labels of the first samples."""
        found = []
        count = min(most, self.samples)
        for start in range(0, count, self._backbone.wanted.batch):
            rows = np.arange(start, min(start + self._backbone.wanted.batch, count))
            inputs = {name: x[rows] for name, x in self._inputs.items()}
            found.append(self._backbone.features(self._backbone.run(inputs), inputs))
        return np.concatenate(found), self._data.inputs[self._data.target][:count]


def run_job(
    job: Job,
    remote: Remote,
    runtime: Runtime,
    planning: Planning,
    settings: Settings,
    *,
    announce: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Outcome:
    """Open the backbone, train with the server, write the side network.

    Args:
        job: what to train.
        remote: the server.
        runtime: the device.
        planning: of the backbone.
        settings: of the connection.
        announce: told in one sentence what happens.
        progress: told how many steps are done.

    Raises:
        LayoutOptError: bad data, a backbone that cannot be had, a server that refuses or stays away.
    """
    began = time.perf_counter()
    check_folder(job.out)
    backbone = Backbone.open(job.wanted, runtime, planning)
    try:
        if backbone.rows_per_sample > 1:
            announce(_ALL_TOKENS)
        samples = read_samples(backbone, job.data, backbone.classes)
        training = samples.split(job.held_out, job.seed)[0]
        job.out.mkdir(parents=True, exist_ok=True)
        secret = _secret(job.out / _SECRET_FILE)
        if job.label_epsilon is not None:
            training = _with_noise(training, len(samples.classes), job.label_epsilon, secret)
        source, head = _source(job, backbone, training, samples)
        task = _task(job, backbone, training, samples, head)
        footprint = backbone.footprint()
        prepared = time.perf_counter() - began
        report = train(task, source, remote, settings, secret=secret, head=head, announce=announce, progress=progress)
    finally:
        backbone.close()
    network = job.out / NETWORK_FILE
    write_atomic(network, report.weights)
    return Outcome(report, task, len(training), network, footprint.weights_bytes, footprint.peak_bytes, prepared)


def _with_noise(training: Dataset, classes: int, epsilon: float, secret: bytes) -> Dataset:
    """Before anything is made of the labels: a head that was fitted to the true ones would give them away."""
    noisy = randomised(training.inputs[training.target], classes, epsilon, secret)
    return Dataset({**training.inputs, training.target: noisy}, training.target)


def _source(
    job: Job, backbone: Backbone, training: Dataset, samples: Samples
) -> tuple[BackboneSource, dict[str, np.ndarray]]:
    """Where activations come from, and the parts of the network's head that the server starts from."""
    head = dict(backbone.head)
    classifier = {key: head.pop(key) for key in list(head) if key.startswith("classifier.")}
    fits = len(classifier) == 2 and len(classifier["classifier.bias"]) == len(samples.classes)
    if job.mode != "private":
        return BackboneSource(backbone, training), head | (classifier if fits else {})
    file = job.out / HEAD_FILE
    if fits:
        own = DeviceHead.of(backbone.head)
    else:
        own = fit_head(*BackboneSource(backbone, training).features(_HEAD_SAMPLES), len(samples.classes))
    save_device_head(file, own)
    return BackboneSource(backbone, training, own), head


def _task(job: Job, backbone: Backbone, training: Dataset, samples: Samples, head: dict[str, np.ndarray]) -> Task:
    wanted = job.wanted
    steps = -(-len(training) // wanted.batch) * job.epochs
    return Task(
        model=wanted.model,
        graph=backbone.graph.hash,
        width=backbone.width,
        taps=backbone.taps,
        format=str(wanted.format),
        tokens="pivot" if backbone.rows_per_sample == 1 else "all",
        seq=wanted.seq if backbone.rows_per_sample == 1 else backbone.rows_per_sample,
        batch=wanted.batch,
        classes=len(samples.classes),
        mode="private" if job.mode == "private" else "labels",
        pooling="last" if backbone.pivot == "last" else "first",
        pooler="pooler.weight" in head,
        rank=job.rank,
        optimizer=job.optimizer,  # type: ignore[arg-type]
        lr=job.lr,
        weight_decay=job.weight_decay,
        schedule=job.schedule,  # type: ignore[arg-type]
        warmup=round(steps * job.warmup),
        steps=min(steps, job.max_steps or steps),
        seed=job.seed,
    )


def _secret(file: Path) -> bytes:
    """The secret of an earlier run in this folder, or a new one."""
    try:
        if file.exists():
            return file.read_bytes()
        secret = secrets.token_bytes(32)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
            handle.write(secret)
            handle.flush()
            os.fsync(handle.fileno())
        return secret
    except OSError as error:
        raise LayoutOptError(f"cannot keep the secret of sample numbers in {file}: {error.strerror}") from error

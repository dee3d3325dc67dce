"""A microbenchmark's run, and rounds over many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from costmodel.device import Probe
from layoutopt.errors import DeviceError

if TYPE_CHECKING:
    from kernels.runtime import Runtime

__all__ = ["Run", "time_runs"]


@dataclass(frozen=True)
class Run:
    """One launch to be timed.

    Attributes:
        name: of the probe.
        what: it measures, for people.
        work: of one run, in ``unit``.
        unit: "bytes", "flop", "atomics".
        call: (kernel with its arguments set, global size, local size).
        holds: what has to live as long: a kernel does not keep its arguments alive.
    """

    name: str
    what: str
    work: float
    unit: str
    call: tuple[Any, tuple[int, ...], tuple[int, ...]]
    holds: Any = None


def time_runs(runtime: Runtime, runs: Sequence[Run], rounds: int) -> dict[str, Probe]:
    """Time every run in turn, round after round, by the device's events.

    Args:
        runtime: the device.
        runs: whose buffers the caller holds.
        rounds: kept; one more goes before them and compiles.

    Raises:
        DeviceError: the device refuses a kernel.
    """
    times: dict[str, list[int]] = {run.name: [] for run in runs}
    for number in range(rounds + 1):
        for run in runs:
            try:
                event = runtime.launch_timed(*run.call)
                event.wait()
            except RuntimeError as error:  # pyopencl's errors derive from it
                raise DeviceError(f"microbenchmark {run.name} was refused: {error}") from error
            if number:
                times[run.name].append(int(event.profile.end - event.profile.start))
    return {run.name: Probe(run.what, run.work, run.unit, tuple(times[run.name])) for run in runs}

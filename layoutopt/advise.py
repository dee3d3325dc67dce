"""Which way of fine-tuning fits a device and a link: everything on the device, or side-tuning with a server.

Each way is planned as it would run: full fine-tuning, LoRA and a head alone with their backward passes, and by the
levers of ``--memory`` (recomputation, micro-batches) where they do not fit as they are; side-tuning as a forward pass
whose activations ("taps") are stored in few bits and sent. Plans say memory and predict time; what is sent follows from
the taps' formats. What the server takes is not known here, nor how well each way learns.

Part of the face: it joins capture, planner and device model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from layoutopt.assembly import assemble
from layoutopt.collector import collector_paused
from layoutopt.energy import Energy, energy
from layoutopt.errors import DeviceError, GraphError, InfeasibleError, LayoutOptError
from layoutopt.facade import capture_model, check_request
from layoutopt.graph import TrainingGraph
from layoutopt.microbatch import samples as samples_of
from layoutopt.plan import Plan
from layoutopt.planner import assign, fastest, plan, tabulate, validate
from layoutopt.pricing import Pricer
from layoutopt.quantize import Format, row_bytes
from layoutopt.rewrites import SMALLER, alternatives, planned_graph
from layoutopt.stepcost import predict_step

if TYPE_CHECKING:
    from costmodel.device import DeviceModel
    from costmodel.model import CostModel

__all__ = ["MODES", "TAPS", "TOKENS", "WEIGHTS", "Advice", "Ask", "Way", "advise", "link_bits_per_s", "sample_bytes"]

MODES = ("full", "lora", "head")
"""What is trained on the device (see ``layoutopt/modes.py``)."""
WEIGHTS = ("fp32", "int8", "nf4")
"""Storages of a backbone's weights."""
TAPS = ("float32", "int8:64", "int4:64", "fp4:64")
"""Formats of taps."""
TOKENS = ("all", "pivot")
"""Which tokens' taps are sent."""

ID_BYTES, TARGET_BYTES = 8, 4
"""What goes along with a sample's taps: its number and its label; masks besides where all tokens are sent."""
_LEVERS = ("anew", "micro", "pieces")
_ROOMY_BYTES = 1 << 40
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Ask:
    """What is asked.

    Attributes:
        model: of the zoo.
        link_bits_per_s: from the device to the server.
        memory_bytes: that fine-tuning may take on the device; None: what the device model says there is.
        batch: samples a step; None: as the zoo has it.
        seq: tokens a sample; None: as the zoo has it, or none.
        labels: classes; None: as the zoo has it, or none.
        epoch_samples: samples of an epoch.
        window: batches that may wait to be sent or acknowledged.
        strategy: of the plans.
        time_limit_s: for the exact solver, a plan.
    """

    model: str
    link_bits_per_s: float
    memory_bytes: int | None = None
    batch: int | None = None
    seq: int | None = None
    labels: int | None = None
    epoch_samples: int = 1000
    window: int = 4
    strategy: str = "greedy"
    time_limit_s: float = 5.0


@dataclass(frozen=True)
class Way:
    """One way to fine-tune, planned.

    Attributes:
        name: "full", "lora", "head" or "side".
        within: planned within memory, by levers where it takes some; else as fast as it goes.
        levers: rewrites that saved memory, such as ``micro:2`` and ``anew:3-9``.
        weights: how the device holds them.
        taps: format of what is sent; empty where nothing is.
        tokens: "all" or "pivot"; empty where nothing is sent.
        plan: of the step on the device; None where none was found within memory.
        arena_bytes: of the plan: all device memory of a step. Parameters lie in it.
        parameter_bytes: of the arena, what holds parameters.
        unsent_bytes: taps of the batches that may wait to be sent.
        fits: within what was asked for.
        why_not: in one sentence, where it does not.
        device_s: predicted time of a step on the device.
        link_s: to send what a step sends.
        sample_bytes: sent for a sample, the first time.
        first_epoch_bytes: sent in the first epoch.
        later_epoch_bytes: sent in each further one, by number, with the server's cache.
        energy: of a step.
    """

    name: str
    within: bool
    levers: tuple[str, ...]
    weights: str
    taps: str
    tokens: str
    plan: Plan | None
    arena_bytes: int
    parameter_bytes: int
    unsent_bytes: int
    fits: bool
    why_not: str
    device_s: float
    link_s: float
    sample_bytes: float
    first_epoch_bytes: float
    later_epoch_bytes: float
    energy: Energy | None

    @property
    def memory_bytes(self) -> int:
        """On the device: the arena, and what waits to be sent."""
        return self.arena_bytes + self.unsent_bytes

    @property
    def step_s(self) -> float:
        """A step of the first epoch where device, link and server overlap and the server is the slowest of none."""
        return max(self.device_s, self.link_s)


@dataclass(frozen=True)
class Advice:
    """The ways, and what they were judged by: sizes of a step, bytes of memory, name of the device model."""

    ask: Ask
    device: str
    batch: int
    limit_bytes: int
    ways: tuple[Way, ...]


def link_bits_per_s(text: str) -> float:
    """``20Mbps`` or ``100 Mbit/s`` as bits a second.

    Raises:
        LayoutOptError: not a rate.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)(?:bps|bit/s|bits/s)\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise LayoutOptError(f"link {text!r} is not a rate: expected a number with kbps, Mbps or Gbps, such as 20Mbps")
    return float(match[1]) * _UNITS[match[2].lower()]


def sample_bytes(taps: int, rows: int, width: int, fmt: Format, tokens: str) -> int:
    """What is sent for one sample: words and scales of its taps, its number and label, and a mask with all tokens.

    What gRPC and TLS put around it is not counted.

    Args:
        taps: how many.
        rows: of a tap, a sample: its tokens, or 1.
        width: numbers of a row.
        fmt: how rows are stored.
        tokens: "all" or "pivot".
    """
    mask = rows if tokens == "all" else 0
    return taps * rows * row_bytes(fmt, width) + mask + TARGET_BYTES + ID_BYTES


@collector_paused()
def advise(ask: Ask, model: DeviceModel, progress: Progress | None = None) -> Advice:
    """Plan every way on a device model.

    Args:
        ask: what is asked.
        model: of the device.
        progress: told what is planned.

    Raises:
        LayoutOptError: torch is not installed; an unknown model, strategy or size.
    """
    advisor = _Advisor(ask, model, progress or (lambda *_: None))
    ways = (*advisor.on_the_device(), *advisor.with_a_server())
    return Advice(ask, model.name, advisor.batch, advisor.limit_bytes, ways)


class _Advisor:
    """Plans of one question, which share prices of kernels."""

    def __init__(self, ask: Ask, model: DeviceModel, progress: Progress) -> None:
        from costmodel.model import CostModel

        limits = model.limits
        most = min(limits.global_mem_bytes, limits.max_alloc_bytes)
        self.ask, self.progress = ask, progress
        self.limit_bytes = most if ask.memory_bytes is None else min(most, ask.memory_bytes)
        # Ways that are too large are planned all the same: how much they would need is what is asked.
        roomy = replace(limits, global_mem_bytes=_ROOMY_BYTES, max_alloc_bytes=_ROOMY_BYTES)
        self.model = replace(model, limits=roomy)
        self.costs: CostModel = CostModel(self.model)
        self.pricer = Pricer(self.costs)
        self.batch = 0
        self.done = 0

    def on_the_device(self) -> Iterator[Way]:
        """Training of all, of adapters, of a head; a second time within memory where that is short."""
        for mode in MODES:
            graph = self._captured(mode)
            self.batch = samples_of(graph)
            self._tell(f"{mode} as it is")
            whole = self._local(mode, graph, self._planned(graph, "fp32"))
            yield whole
            if not whole.fits:
                self._tell(f"{mode} within memory")
                yield self._within(mode, graph)

    def with_a_server(self) -> Iterator[Way]:
        """Side-tuning, by weights, taps and tokens; a model that cannot be tapped says so."""
        from layoutopt.side.backbone import Wanted, capture_wanted

        ask, captured = self.ask, {}
        for tokens in TOKENS:
            try:
                wanted = Wanted(ask.model, batch=self.batch, seq=ask.seq or 0, tokens=tokens)
                captured[tokens] = capture_wanted(wanted)
            except GraphError as error:
                yield _impossible("side", str(error))
                return
        for weights, tokens, taps in product(WEIGHTS, TOKENS, TAPS):
            self._tell(f"side-tuning, {weights}, {taps}, {tokens}")
            yield self._side(captured[tokens], weights, taps, tokens)

    def _tell(self, what: str) -> None:
        most = 2 * len(MODES) + len(WEIGHTS) * len(TOKENS) * len(TAPS)
        self.done += 1
        self.progress(what, min(self.done / most, 1.0))

    def _captured(self, mode: str) -> TrainingGraph:
        ask = self.ask
        return capture_model(ask.model, batch=ask.batch, seq=ask.seq, labels=ask.labels, mode=mode)[0]

    def _planned(self, graph: TrainingGraph, storage: str) -> Plan:
        """The fastest plan, whatever memory it needs."""
        found = []
        for candidate in alternatives(graph, None, storage):
            tables = tabulate(candidate, self.costs, pricer=self.pricer)
            assignment = assign(tables, self.ask.strategy, self.ask.time_limit_s)
            made = assemble(tables, self.costs, assignment, self.ask.strategy)
            validate(made, candidate, self.costs)
            found.append((tables, made))
        return fastest(found)[1]

    def _within(self, mode: str, graph: TrainingGraph) -> Way:
        """With recomputation, micro-batches and layouts without padding, as ``layoutopt plan --memory`` has it."""
        ask = self.ask
        try:
            check_request([], f"{self.limit_bytes}B", graph)  # what no lever saves
            made = plan(graph, self.costs, ask.strategy, self.limit_bytes, ask.time_limit_s)
        except (InfeasibleError, DeviceError, GraphError) as error:
            return _impossible(mode, str(error))
        return replace(self._local(mode, graph, made), within=True)

    def _local(self, mode: str, graph: TrainingGraph, made: Plan) -> Way:
        return self._way(mode, graph, made, "fp32", "", "", 0)

    def _side(self, graph: TrainingGraph, weights: str, taps: str, tokens: str) -> Way:
        """A backbone's forward pass that stores its taps.

        Args:
            graph: it, with its taps in float32.
            weights: storage of its weights.
            taps: format of what is sent.
            tokens: whose taps it gives.
        """
        from layoutopt.side.backbone import sending
        from layoutopt.side.graphs import facts_of

        facts, fmt = facts_of(graph), Format.parse(taps)
        rows, width, names = (facts[key] for key in ("rows", "width", "taps"))
        storing = sending(graph, fmt)
        sent = sample_bytes(len(names), rows // self.batch, width, fmt, tokens)
        return self._way("side", storing, self._planned(storing, weights), weights, taps, tokens, sent)

    def _way(self, name: str, graph: TrainingGraph, made: Plan, weights: str, taps: str, tokens: str, sent: int) -> Way:
        """A planned way.

        Args:
            name: of it.
            graph: as captured.
            made: its plan.
            weights: how they are stored.
            taps: format of what is sent.
            tokens: whose taps are sent.
            sent: bytes a sample.
        """
        ask = self.ask
        device_s = predict_step(made, graph, self.model).step_s
        unsent = ask.window * self.batch * sent
        need = made.arena_bytes + unsent
        fits = need <= self.limit_bytes
        return Way(
            name,
            False,
            tuple(r for r in made.rewrites if r in SMALLER or r.partition(":")[0] in _LEVERS),
            weights,
            taps,
            tokens,
            made,
            made.arena_bytes,
            parameter_bytes(graph, made),
            unsent,
            fits,
            "" if fits else f"it needs {need} bytes of device memory, there are {self.limit_bytes}",
            device_s,
            sent * self.batch * 8 / ask.link_bits_per_s,
            sent,
            sent * ask.epoch_samples,
            ID_BYTES * ask.epoch_samples if sent else 0,
            energy(made, graph, self.model, device_s, sent * self.batch),
        )


def _impossible(name: str, why: str) -> Way:
    return Way(name, True, (), "fp32", "", "", None, 0, 0, 0, False, why, 0.0, 0.0, 0.0, 0.0, 0.0, None)


def parameter_bytes(graph: TrainingGraph, made: Plan) -> int:
    """Of a plan's arena, what holds parameters and constants, in all layouts that it keeps them in."""
    storages = planned_graph(made, graph).storages
    held = (slot for slot in made.arena if slot.name.rpartition("#")[0] in storages)
    return sum(s.size_bytes for s in held if storages[s.name.rpartition("#")[0]].role in ("parameter", "constant"))

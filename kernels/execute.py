"""Runs a Plan: one arena on the device, every kernel built and bound to its buffers once, then steps without waiting.

An :class:`Executor` is the only thing here that has state. A step uploads the inputs, enqueues every launch in the
plan's order on one in-order queue and returns; reading a tensor waits for what was enqueued before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kernels.bind import bind, slot_name
from kernels.feed import Feed, cast
from kernels.launches import Call, Launches, Part
from kernels.pack import STORAGE_DTYPES, pack, poison_padding, unpack
from kernels.regions import Regions
from kernels.runtime import Runtime
from kernels.spec import DeviceLimits
from kernels.stage import Input, Inputs, staging_bytes
from layoutopt.checkpoint import initial_value
from layoutopt.codes import code_of, decode, encode
from layoutopt.errors import DeviceError, GraphError
from layoutopt.graph import Tensor, TrainingGraph
from layoutopt.pass_views import overwrites
from layoutopt.plan import ArenaSlot, Plan
from layoutopt.rewrite_quantize import weights_of
from layoutopt.rewrites import planned_graph

__all__ = ["Executor"]

_STAGING_ALIGN = 4096
"""Of the region behind the arena, in bytes: a multiple of whatever a device's vectors and copies like."""


class Executor:
    """A training step on a device.

    Args:
        runtime: the device.
        graph: the step.
        plan: its layouts, kernels and arena.
        values: starting parameters and state by tensor name; what is absent starts by ``Tensor.init``. Weights that
            the plan stores in few bits come under their own names, or quantised, as ``values()`` gives them.
        keep: further tensors that ``read`` must be able to give after a step.
        seed: of the random starting values.
        limits: what the plan must fit; the device's own by default.
        poison: fill the arena, and the padding of everything uploaded, with NaN bytes, so that a kernel that reads what
            nobody wrote is seen.
        share: let steps share launches where they may: results are the same bit by bit.

    Attributes:
        memory_bytes: of the device buffers that it made: the arena with the region behind it where inputs arrive, and
            tables of launches. Steps make none.

    Raises:
        GraphError: the plan is for another graph or damaged, a value is unknown or missing, or a kept tensor's memory
            is reused before the step ends.
        DeviceError: the plan does not fit the device, or a kernel does not build.
    """

    def __init__(
        self,
        runtime: Runtime,
        graph: TrainingGraph,
        plan: Plan,
        values: Mapping[str, np.ndarray] | None = None,
        *,
        keep: Iterable[str] = (),
        seed: int = 0,
        limits: DeviceLimits | None = None,
        poison: bool = False,
        share: bool = True,
    ) -> None:
        graph = planned_graph(plan, graph)
        self.runtime, self.graph, self.plan = runtime, graph, plan
        self.limits = limits or runtime.limits
        self._poison = poison
        self._feed = Feed(graph)
        self._ops = {op.name: op for op in graph.ops}
        self._layouts = {name: tuple(doc.layout() for doc in docs) for name, docs in plan.layouts.items()}
        self._slots = {slot.name: slot for slot in plan.arena}
        self._overwritten = overwrites(graph)
        self._idle: dict[str, np.ndarray] = {}
        self._weights = weights_of(graph)
        self._check_plan()
        self._check_fit()
        for name in values or {}:
            if name not in self._weights:
                self._held(name)
        for name in (*graph.outputs, *keep):
            self._alive_slot(name)
        sent = {
            tensor.name: Input(self._layouts[storage][0], tensor.dtype, self._slots[slot_name(storage, 0)])
            for tensor in graph.by_role("input")
            if (storage := graph.storage_of[tensor.name]) in self._layouts
        }
        begin, size = self._staging(staging_bytes(sent, self.limits))
        self._parts: list[Part] = []
        self._calls: list[Call] = []
        self._forward_calls: list[Call] = []
        self._tables: list[Any] = []
        self._images: list[Any] = []
        before = runtime.allocated_bytes
        self._arena = runtime.allocate(size)
        if poison:
            runtime.fill(self._arena, 0xFF)
        self._regions = Regions(runtime, self._arena, self._slots)
        self._inputs = Inputs(runtime, sent, self._arena, begin, self.limits, poison)
        self.steps = bind(graph, plan, self.limits)
        wanted, self._forward_inputs = self._forward_part()
        launches = Launches(
            runtime,
            self.steps,
            self._slots,
            self._arena,
            self._regions,
            self.limits,
            share=share,
            subset=wanted,
            beside=self._inputs.sources,
        )
        self._inputs.build()
        self._parts += launches.all
        self._tables += launches.tables
        self._images += launches.images
        self._calls += [call for part in launches.all for call in part.calls]
        self._forward_calls += [call for part in launches.some for call in part.calls]
        for tensor in graph.by_role("constant"):
            if graph.storage_of[tensor.name] in self._layouts:
                value = np.broadcast_to(np.asarray(graph.constants[tensor.name]), tensor.shape)
                self._store(tensor.name, value.astype(STORAGE_DTYPES[tensor.dtype]))
        self._start(values or {}, seed)
        self.memory_bytes = runtime.allocated_bytes - before

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _check_plan(self) -> None:
        plan, graph = self.plan, self.graph
        planned = [plan.ops[i].op for kind, i in plan.steps if kind == "op"]
        if planned != [op.name for op in graph.ops]:
            raise GraphError(f"the plan of {graph.name!r} does not run its {len(graph.ops)} ops in order: plan it anew")
        for planned_op in plan.ops:
            op = self._ops[planned_op.op]
            if len(planned_op.layouts) != len(op.operands):
                raise GraphError(f"the plan gives op {op.name} {len(planned_op.layouts)} layouts: plan the graph anew")
            if any(planned_op.layouts[len(op.inputs) :]):
                raise GraphError(f"the plan lets op {op.name} write a copy, not the primary: plan the graph anew")
        for storage, layouts in self._layouts.items():
            item_bytes = STORAGE_DTYPES[graph.storages[storage].dtype].itemsize
            for position, layout in enumerate(layouts):
                slot = self._slots.get(slot_name(storage, position))
                if slot is None or slot.size_bytes < layout.size_elems * item_bytes:
                    raise GraphError(
                        f"the plan's arena has no room for {slot_name(storage, position)}: plan the graph anew"
                    )

    def _check_fit(self) -> None:
        need, limits = self.plan.arena_bytes, self.limits
        if need > min(limits.max_alloc_bytes, limits.global_mem_bytes):
            raise DeviceError(
                f"the plan of {self.graph.name!r} needs an arena of {need} bytes; device {self.runtime.info.name} "
                f"allows {limits.max_alloc_bytes} bytes in one buffer and has {limits.global_mem_bytes} in all: "
                "plan with a smaller batch or a --memory budget"
            )
        for slot in self.plan.arena:
            if slot.offset_bytes % limits.base_align_bytes:
                raise DeviceError(
                    f"the plan puts {slot.name} at byte {slot.offset_bytes}; device {self.runtime.info.name} needs "
                    f"multiples of {limits.base_align_bytes}: plan for this device"
                )
            if slot.offset_bytes + slot.size_bytes > need:
                raise GraphError(f"the plan's slot {slot.name} ends beyond its arena of {need} bytes: plan anew")

    def _alive_slot(self, name: str) -> ArenaSlot:
        """The slot of a tensor's primary layout, which nothing overwrites before the step ends."""
        if name not in self.graph.tensors:
            raise GraphError(f"graph {self.graph.name!r} has no tensor {name!r}")
        storage = self.graph.storage_of[name]
        slot = self._slots.get(slot_name(storage, 0))
        if slot is None:
            raise GraphError(f"tensor {name!r} is not in the plan: no op uses it")
        if name in self._overwritten and self.graph.tensors[name].role not in ("parameter", "state"):
            raise GraphError(f"tensor {name!r} is overwritten within the step: plan with this tensor in `keep`")
        for other in self.plan.arena:
            apart = (
                other.offset_bytes >= slot.offset_bytes + slot.size_bytes
                or slot.offset_bytes >= other.offset_bytes + other.size_bytes
            )
            if other.first > slot.last and not apart:
                raise GraphError(
                    f"tensor {name!r} does not live to the end of the step: {other.name} reuses its memory; "
                    "plan with this tensor in `keep`"
                )
        return slot

    # ---- building ---------------------------------------------------------------------------------------------------

    def _staging(self, size_bytes: int) -> tuple[int | None, int]:
        """Where behind the plan's arena the staging region begins, if there is room for one, and the bytes of both."""
        begin = -(-self.plan.arena_bytes // _STAGING_ALIGN) * _STAGING_ALIGN
        if size_bytes and begin + size_bytes <= min(self.limits.max_alloc_bytes, self.limits.global_mem_bytes):
            return begin, begin + size_bytes
        return None, self.plan.arena_bytes

    def _forward_part(self) -> tuple[frozenset[int], frozenset[str]]:
        """Positions of the steps that forward and loss outputs need, and the inputs these read."""
        wanted_ops: set[str] = set()
        inputs: set[str] = set()
        pending = list(self.graph.outputs)
        while pending:
            tensor = pending.pop()
            if self.graph.tensors[tensor].role == "input":
                inputs.add(tensor)
            op = self.graph.producer.get(tensor)
            if op is None or op.name in wanted_ops or op.phase not in ("forward", "loss"):
                continue
            wanted_ops.add(op.name)
            pending += [operand.tensor for operand in op.inputs]
        steps: set[int] = set()
        made_by: dict[tuple[str, int], int] = {}
        for i, (kind, index) in enumerate(self.plan.steps):
            if kind == "relayout":
                relayout = self.plan.relayouts[index]
                made_by[relayout.storage, relayout.target] = i
                continue
            planned = self.plan.ops[index]
            if planned.op in wanted_ops:
                steps.add(i)
                op = self._ops[planned.op]
                used = zip(op.inputs, planned.layouts[: len(op.inputs)], strict=True)
                steps |= {made_by[self.graph.storage_of[o.tensor], p] for o, p in used if p}
        return frozenset(steps), frozenset(inputs)

    # ---- values -----------------------------------------------------------------------------------------------------

    def _start(self, values: Mapping[str, np.ndarray], seed: int) -> None:
        """Give every parameter and state its starting value, one after the other: the host keeps none of them."""
        packed = {name for weight in self._weights.values() for name in weight.names}
        for name, weight in self._weights.items():
            given = [part for part in weight.names if part in values]
            if len(given) == 1:
                raise GraphError(f"of parameter {name!r} only {given[0]!r} is given: give words and scales, or neither")
            for part in given:
                self.write(part, values[part])
            if not given:
                self.write(name, values[name] if name in values else initial_value(weight.tensor, seed))
        for tensor in self.graph.by_role("parameter", "state"):
            if tensor.name in packed:
                continue
            value = values[tensor.name] if tensor.name in values else initial_value(tensor, seed)
            self.write(tensor.name, value)

    def _held(self, name: str) -> Tensor:
        """A parameter or state, which steps leave behind."""
        tensor = self.graph.tensors.get(name)
        if tensor is None or tensor.role not in ("parameter", "state"):
            raise GraphError(f"graph {self.graph.name!r} has no parameter or state {name!r}")
        return tensor

    def _cast(self, tensor: Tensor, value: np.ndarray) -> np.ndarray:
        coded = code_of(self.graph, tensor.name) is not None
        return cast(replace(tensor, dtype="float32") if coded else tensor, value)

    def _store(self, name: str, array: np.ndarray) -> None:
        code = code_of(self.graph, name)
        if code is not None:
            array = encode(code, array)
        storage = self.graph.storage_of[name]
        packed = pack(self._layouts[storage][0], array, self.graph.tensors[name].dtype)
        if self._poison:
            poison_padding(self._layouts[storage][0], packed)
        self.runtime.upload(self._arena, packed, offset_bytes=self._slots[slot_name(storage, 0)].offset_bytes)

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a parameter or state tensor; a weight that is stored in few bits is quantised here.

        Raises:
            GraphError: no such tensor, or the array does not fit it.
        """
        if name in self._weights:
            weight = self._weights[name]
            for part, stored in zip(weight.names, weight.pack(cast(weight.tensor, array)), strict=True):
                self.write(part, stored)
            return
        value = self._cast(self._held(name), array)
        if self.graph.storage_of[name] in self._layouts:
            self._store(name, value)
        else:  # no op uses it: the host keeps what a checkpoint will want back
            self._idle[name] = np.array(value)

    def read(self, name: str) -> np.ndarray:
        """The logical value of a parameter, state, output or kept tensor, after everything enqueued.

        What is stored as float16 is given as float32, coded state decoded, a quantised weight as kernels see it.

        Raises:
            GraphError: no such tensor, or its memory is reused within the step.
        """
        if name in self._weights:
            weight = self._weights[name]
            return weight.unpack(*(self.read(part) for part in weight.names))
        if name in self._idle:
            value = self._idle[name].copy()
            return value.astype(np.float32) if value.dtype == np.float16 else value
        slot = self._alive_slot(name)
        tensor = self.graph.tensors[name]
        layout = self._layouts[self.graph.storage_of[name]][0]
        storage = np.empty(layout.size_elems, STORAGE_DTYPES[tensor.dtype])
        self.runtime.download(self._arena, storage, slot.offset_bytes)
        value, code = unpack(layout, storage, tensor.dtype), code_of(self.graph, name)
        if code is not None:
            return decode(code, value)
        return value.astype(np.float32) if tensor.dtype == "float16" else value

    def values(self) -> dict[str, np.ndarray]:
        """All parameters and state."""
        return {t.name: self.read(t.name) for t in self.graph.by_role("parameter", "state")}

    def loss(self) -> float:
        """The first output of the last step."""
        return float(self.read(self.graph.outputs[0]))

    # ---- running ----------------------------------------------------------------------------------------------------

    @property
    def launches(self) -> int:
        """Kernel launches in a step; one of them may be that which spreads its inputs."""
        return len(self._calls) + self._inputs.launches

    @property
    def shared(self) -> dict[str, int]:
        """How many steps share a launch, by label of each step that does."""
        parts = [part for part in self._parts if len(part.members) > 1]
        return {self.steps[i].label: len(part.members) for part in parts for i in part.members}

    def step(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Enqueue one training step.

        Args:
            inputs: an array per input of the graph; free to change when this returns.

        Raises:
            GraphError: an input is missing, unknown, of a wrong shape or dtype, or holds an id out of range.
        """
        self._run(inputs, None, self._calls)

    def forward(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Enqueue only what the outputs need: parameters and state stay as they are.

        Args:
            inputs: those that forward and loss read; others may be given.

        Raises:
            GraphError: as ``step``.
        """
        self._run(inputs, self._forward_inputs, self._forward_calls)

    def _run(self, inputs: Mapping[str, np.ndarray], required: frozenset[str] | None, calls: list[Call]) -> None:
        self._send(inputs, required)
        self.runtime.enqueue(calls)
        self.runtime.flush()

    def _send(self, inputs: Mapping[str, np.ndarray], required: frozenset[str] | None) -> None:
        arrays = self._feed.check(inputs, required)
        self._inputs.send({n: array for n, array in arrays.items() if self.graph.storage_of[n] in self._layouts})

    def profile(self, inputs: Mapping[str, np.ndarray]) -> list[tuple[str, int]]:
        """Run one step, launch by launch on a profiling queue.

        Args:
            inputs: as ``step``.

        Returns:
            (op name or ``relayout:STORAGE#POSITION``, device nanoseconds of its launches) in the plan's order. Steps
            that ``shared`` names have parts of one launch's time, by their bytes.
        """
        times = self.launch_times(inputs)
        return [
            (step.label, sum(end - start for start, end in launched))
            for step, launched in zip(self.steps, times, strict=True)
        ]

    def launch_times(self, inputs: Mapping[str, np.ndarray]) -> list[list[tuple[int, int]]]:
        """Run one step as ``profile`` does.

        Args:
            inputs: as ``step``.

        Returns:
            (start, end) of each launch on the device's clock, in nanoseconds, by step of the plan. A launch that steps
            share is cut up among them, by their bytes.
        """
        self._send(inputs, None)
        self.runtime.finish()
        events = [[self.runtime.launch_timed(*call) for call in part.calls] for part in self._parts]
        self.runtime.profiling_queue.finish()
        times: list[list[tuple[int, int]]] = [[] for _ in self.steps]
        for part, launched in zip(self._parts, events, strict=True):
            cut = part.intervals([(e.profile.start, e.profile.end) for e in launched])
            for position, mine in zip(part.members, cut, strict=True):
                times[position] = mine
        return times

    def finish(self) -> None:
        """Wait for every enqueued step."""
        self.runtime.finish()
        self._inputs.finished()

    def close(self) -> None:
        """Give the device's memory back; the executor is of no further use.

        In an order of our own, the last made first: kernels, images over the regions that they are bound to, these
        regions, the arena that they lie in. NVIDIA's driver (580) crashes the process when regions go in the order in
        which they were made.
        """
        if self.__dict__.get("_arena") is None:
            return
        self.runtime.finish()
        if "_inputs" in self.__dict__:  # not where building failed before
            self._inputs.close()
        self._forward_calls.clear()
        self._calls.clear()
        while self._parts:
            self._parts.pop()
        self._tables.clear()
        while self._images:
            self._images.pop()
        if "_regions" in self.__dict__:
            self._regions.close()
        self._arena = None

    def __del__(self) -> None:
        self.close()

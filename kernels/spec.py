"""The frozen values that kernels are described by: what an op needs, what a variant is, what a launch looks like."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

from kernels.nest import Nest
from layoutopt.graph import DTYPES, Expr, Op, TrainingGraph
from layoutopt.layout import Layout

__all__ = [
    "DeviceLimits",
    "Family",
    "Kernel",
    "KernelVariant",
    "Launch",
    "OpSpec",
    "Scratch",
    "Text",
    "op_spec",
]


@dataclass(frozen=True)
class DeviceLimits:
    """What a device allows, as OpenCL reports it; part of every device model, so that planning needs no device.

    Attributes:
        kind: "cpu" or "gpu": CPUs get one fat work item a group, GPUs many thin ones.
        compute_units: cores.
        max_work_group_size: work items.
        local_mem_bytes: local memory of a work group.
        global_mem_bytes: device memory.
        max_alloc_bytes: largest single buffer.
        base_align_bytes: alignment that sub-buffers need.
        simd_width: float32 lanes of a native vector (CPU) or lanes of a wave (GPU).
        image_support: whether 2-D float images exist, and their limits in texels.
        image_max_buffer_texels: length of an image over a buffer (``image1d_buffer_t``) for kernels to read through;
            0: there are none, or nothing is gained by them.
    """

    kind: str = "cpu"
    compute_units: int = 2
    max_work_group_size: int = 1024
    local_mem_bytes: int = 32768
    global_mem_bytes: int = 4 << 30
    max_alloc_bytes: int = 1 << 30
    base_align_bytes: int = 128
    simd_width: int = 16
    image_support: bool = False
    image_max_width: int = 0
    image_max_height: int = 0
    image_max_buffer_texels: int = 0

    @property
    def idle_units(self) -> int:
        """Compute units that a small kernel leaves idle: those of a GPU; on a CPU its groups are few fat items."""
        return self.compute_units if self.kind == "gpu" else 0


@dataclass(frozen=True)
class OpSpec:
    """An op without names: equal specs have equal kernels, costs and traces, however often a block repeats.

    Attributes:
        kind: the op's kind.
        shapes: viewed shape per operand (inputs then outputs).
        dtypes: dtype per operand.
        inputs: number of inputs.
        attrs: sorted (key, value) pairs; values hashable.
        inplace: pairs (output index, input index).
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    inputs: int
    attrs: tuple[tuple[str, Any], ...] = ()
    inplace: tuple[tuple[int, int], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # The hash of text differs from process to process: what is remembered stays here.
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.shapes, self.dtypes, self.inputs, self.attrs, self.inplace))

    def attr(self, key: str, default: Any = None) -> Any:
        """The value of an attribute."""
        return next((value for name, value in self.attrs if name == key), default)

    @property
    def expr(self) -> Expr:
        """The program of a pointwise op."""
        return self.attr("expr")


def op_spec(graph: TrainingGraph, op: Op) -> OpSpec:
    """The spec of an op of ``graph``."""
    tensors = [graph.tensors[o.tensor] for o in op.operands]
    return OpSpec(
        op.kind,
        tuple(graph.operand_shape(o) for o in op.operands),
        tuple(t.dtype for t in tensors),
        len(op.inputs),
        frozen_attrs(op.attrs),
        op.inplace,
    )


@dataclass(frozen=True)
class KernelVariant:
    """What a kernel is: a family, a name within it, and its parameters (register tile, vector width, …)."""

    family: str
    name: str
    params: tuple[tuple[str, int], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @cached_property
    def _hash(self) -> int:
        return hash((self.family, self.name, self.params))

    def param(self, key: str) -> int:
        """The value of a parameter."""
        return dict(self.params)[key]

    @cached_property
    def label(self) -> str:
        """``contraction.outer(mr=8,nv=2,v=16)``: unique, and what plans and device models store."""
        args = ",".join(f"{k}={v}" for k, v in self.params)
        return f"{self.family}.{self.name}({args})"


@dataclass(frozen=True)
class Scratch:
    """A workspace buffer that a kernel needs while it runs, appended to the op's operands."""

    dtype: str
    layout: Layout


class Text:
    """C that is written when a program is made of it: planning looks at kernels by the thousand and runs a few."""

    def __init__(self, write: Callable[[], str]) -> None:
        self._write = write

    def __str__(self) -> str:
        return self._write()


@dataclass(frozen=True)
class Launch:
    """One enqueue.

    Attributes:
        body: file in ``kernels/cl``.
        entry: kernel function in it.
        operands: (C name, operand position) per argument, in argument order.
        nest: what it touches; the operand macros come from it.
        global_size: NDRange, fastest dimension first.
        local_size: work group, same rank.
        defines: further ``#define``s: sizes, unroll factors.
        preamble: generated C (a pointwise expression as a function), placed after the macros; perhaps written later.
        views: (operand position, layout) of operands that this launch indexes under other axes than the kernel's.
        images: positions of operands that it reads through images over their buffers: only ever read, by aligned
            vectors of four.
    """

    body: str
    entry: str
    operands: tuple[tuple[str, int], ...]
    nest: Nest
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    defines: tuple[tuple[str, str | int | float], ...] = ()
    preamble: str | Text = ""
    views: tuple[tuple[int, Layout], ...] = ()
    images: tuple[int, ...] = ()


@lru_cache(maxsize=1 << 14)
def _text(value: OpSpec | Layout) -> str:
    return json.dumps(asdict(value), default=str)


@dataclass(frozen=True)
class Kernel:
    """A variant specialised for an op's shapes and its operands' layouts: one or more launches in order.

    Attributes:
        layouts: the operands as the op sees them: how data is put into them and read back.
        launches: in order.
        scratch: workspace buffers, positions after the operands.
        views: the same storages under the axes that the launches index, where a family merges or reorders axes
            (pointwise kernels do); empty where they are ``layouts``.
        memo: what is worked out from the kernel and worth keeping with it: its key, its features on a machine.
    """

    spec: OpSpec
    variant: KernelVariant
    layouts: tuple[Layout, ...]
    launches: tuple[Launch, ...]
    scratch: tuple[Scratch, ...] = ()
    views: tuple[Layout, ...] = ()
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, hash=False, repr=False)

    @property
    def key(self) -> str:
        """A stable hash of everything the generated code depends on: what measurements are filed under."""
        if "key" not in self.memo:
            # The text of json.dumps([spec, label, layouts]), whose parts many kernels share.
            layouts = ", ".join(_text(x) for x in self.layouts)
            text = f"[{_text(self.spec)}, {json.dumps(self.variant.label)}, [{layouts}]]"
            self.memo["key"] = hashlib.sha256(text.encode()).hexdigest()[:24]
        return str(self.memo["key"])

    def operand_layout(self, position: int) -> Layout:
        """Layout of an operand or scratch buffer over the axes that the launches index (nests, macros, traces)."""
        n = len(self.layouts)
        return (self.views or self.layouts)[position] if position < n else self.scratch[position - n].layout

    def launch_layout(self, launch: Launch, position: int) -> Layout:
        """Layout of an operand or scratch buffer over the axes that one launch indexes."""
        for own, view in launch.views:
            if own == position:
                return view
        return self.operand_layout(position)

    def buffer_layout(self, position: int) -> Layout:
        """Layout of an operand or scratch buffer over the op's own axes (allocation, packing, reading back)."""
        n = len(self.layouts)
        return self.layouts[position] if position < n else self.scratch[position - n].layout

    def buffer_bytes(self, position: int) -> int:
        """What an operand or scratch buffer takes in memory, padding included."""
        return self.buffer_layout(position).size_elems * DTYPES[self.operand_dtype(position)]

    def operand_dtype(self, position: int) -> str:
        """Dtype of an operand or scratch buffer."""
        n = len(self.layouts)
        return self.spec.dtypes[position] if position < n else self.scratch[position - n].dtype


class Family(Protocol):
    """A group of kernels for some op kinds. Implementations are modules' singletons in ``kernels/families``."""

    name: str
    kinds: tuple[str, ...]

    def variants(self, spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
        """Variants worth trying for this op on such a device (whatever the layouts)."""
        ...

    def build(self, variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel | None:
        """The specialised kernel, or None where the variant does not accept these layouts."""
        ...


def frozen_attrs(attrs: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Attributes as sorted, hashable pairs."""
    return tuple(sorted(attrs.items()))

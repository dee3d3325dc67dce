"""Equal kernels on different buffers as one launch.

All buffers of a plan lie in one arena. Neighbouring steps whose kernels are the same (one key) and that touch nothing
which another of them writes need not be launched one by one: their grids are stacked along a third dimension, and each
instance finds its buffers by offsets into the arena from a small table. The kernel's body is unchanged: what it asks
about the third dimension is answered for its own instance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from kernels.bind import BoundStep
from kernels.spec import Launch
from layoutopt.plan import ArenaSlot

__all__ = ["alike_steps", "stacked_size", "stacked_source"]

_MOST_GROUPS = 65535
"""Work groups along the third dimension that every GPU takes."""


def alike_steps(steps: Sequence[BoundStep], slots: Mapping[str, ArenaSlot]) -> Iterator[range]:
    """Steps by position in runs that one launch may do; a step without equals is a run of its own."""
    start = 0
    for position in range(1, len(steps) + 1):
        if position < len(steps) and _joins(steps[start:position], steps[position], slots):
            continue
        yield range(start, position)
        start = position


def _joins(run: Sequence[BoundStep], step: BoundStep, slots: Mapping[str, ArenaSlot]) -> bool:
    kernel = run[0].kernel
    if step.kernel.key != kernel.key or any(launch.images for launch in kernel.launches):
        return False  # an image is no place in the arena
    count = len(run) + 1
    if any(_third(launch)[0] * count > _MOST_GROUPS for launch in kernel.launches):
        return False
    written = _written(step)
    for other in run:
        theirs = _written(other)
        for i, name in enumerate(step.slots):
            for j, their_name in enumerate(other.slots):
                if (i in written or j in theirs) and _meet(slots[name], slots[their_name]):
                    return False
    return True


def _written(step: BoundStep) -> frozenset[int]:
    return frozenset(
        access.operand
        for launch in step.kernel.launches
        for phase in launch.nest.phases
        for access in phase.accesses
        if access.write
    )


def _meet(a: ArenaSlot, b: ArenaSlot) -> bool:
    return a.offset_bytes < b.offset_bytes + b.size_bytes and b.offset_bytes < a.offset_bytes + a.size_bytes


def _third(launch: Launch) -> tuple[int, int]:
    """Work groups along the third dimension, and items of one."""
    if len(launch.global_size) < 3:
        return 1, 1
    return launch.global_size[2] // launch.local_size[2], launch.local_size[2]


def stacked_size(launch: Launch, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Global and local size of ``count`` instances."""
    flat = (*launch.global_size, 1, 1)[:3]
    return (*flat[:2], flat[2] * count), (*launch.local_size, 1, 1)[:3]


def stacked_source(source: str, launch: Launch) -> str:
    """The program whose entry finds its operands by instance, from a table of byte offsets behind its other arguments.

    Each operand's argument is the whole arena. Pointers that begin as arguments keep their promise not to overlap,
    which a compiler forgets about pointers that begin in a table: large contractions took 6% longer on an H200 then.

    Args:
        source: of the launch alone, from ``program_source``.
        launch: what it is for.
    """
    groups, items = _third(launch)
    number = {
        "get_group_id": groups,
        "get_global_id": groups * items,
    }
    size = {"get_num_groups": groups, "get_global_size": groups * items}
    macros = [f"#define {name}(d) ((d) == 2 ? {name}(2) % {n} : {name}(d))" for name, n in number.items()]
    macros += [f"#define {name}(d) ((d) == 2 ? {n} : {name}(d))" for name, n in size.items()]
    entry = re.compile(rf"(__kernel\b[^;{{}}]*?\b{launch.entry}\s*\([^)]*)\)\s*\{{")
    if len(entry.findall(source)) != 1:
        raise ValueError(f"{launch.body} has {len(entry.findall(source))} kernels called {launch.entry}")
    names = [name for name, _ in launch.operands]
    places = f"    __global const ulong *places_ = table_ + instance_() * {len(names)};\n"
    moves = [f"    {x} = (__global void *)((__global uchar *){x} + places_[{i}]);\n" for i, x in enumerate(names)]
    begin = ", __global const ulong *table_) {\n" + places + "".join(moves)
    text = entry.sub(lambda found: found[1] + begin, source)
    # Before the macros, which answer for an instance: its number.
    instance = f"inline size_t instance_(void) {{ return get_group_id(2) / {groups}; }}"
    return "\n".join([instance, *macros, text])

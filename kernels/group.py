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
    """The program whose entry takes the arena and a table of byte offsets: operands by instance.

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
    entry = re.compile(rf"(__kernel\b[^;{{}}]*?\b){launch.entry}\s*\(([^)]*)\)\s*\{{")
    found = entry.findall(source)
    if len(found) != 1:
        raise ValueError(f"{launch.body} has {len(found)} kernels called {launch.entry}")
    head, parameters = found[0]
    names = [name for name, _ in launch.operands]
    signature = f"{head}{launch.entry}(__global uchar *arena_, __global const ulong *table_) {{\n"
    places = f"    __global const ulong *places_ = table_ + instance_() * {len(names)};\n"
    at = [f"(__global void *)(arena_ + places_[{i}])" for i in range(len(names))]
    if "__local" in source:  # only a kernel may declare local memory
        pointers = "".join(f"    {name}_ARG = {place};\n" for name, place in zip(names, at, strict=True))
        text = entry.sub(lambda _: signature + places + pointers, source)
    else:  # as parameters, pointers keep their promise not to overlap
        text = entry.sub(lambda _: f"inline void {launch.entry}_one({parameters}) {{", source)
        text += f"\n{signature}{places}    {launch.entry}_one({', '.join(at)});\n}}\n"
    # Before the macros, which answer for an instance: its number.
    instance = f"inline size_t instance_(void) {{ return get_group_id(2) / {groups}; }}"
    return "\n".join([instance, *macros, text])

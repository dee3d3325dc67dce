"""What the caches of a hierarchy hold that memory does not have yet.

A store that stays in a cache is written to memory when its line has to go, as a rule while other kernels run. So what
is written during a sample says little of what the sample stored. What it has *dirtied* does: the bytes that it wrote to
memory and those by which the caches hold more of such than before it. Summed over all that runs, less what is left in
the caches, the two are the same.
"""

from __future__ import annotations

import numpy as np

from simulator.hierarchy import State
from simulator.lanes import compiled, load
from simulator.sets import APART, CORES, EMPTY, FIRST, LEVELS, LINE, SECTORS, SETS, UNIT, WAYS, of, seek

__all__ = ["dirty_bytes"]


def dirty_bytes(state: State) -> int:
    """Bytes that would be written to memory if the caches were emptied; what several caches hold dirty counts once."""
    return int(_dirty(state.lines, state.geometry))


@compiled
def _dirty(lines: np.ndarray, geometry: np.ndarray) -> int:
    cells, table, total = lines.ctypes.data, geometry.ctypes.data, 0
    for level in range(of(table, 0, LEVELS)):
        cores = of(table, 0, CORES) if of(table, level, APART) else 1
        sectors, ways = of(table, level, SECTORS), of(table, level, WAYS)
        for core in range(cores):
            start = of(table, level, FIRST) + core * of(table, level, APART)
            for cell in range(start, start + of(table, level, SETS) * ways):
                entry = load(cells, cell)
                dirty = entry >> sectors & ((1 << sectors) - 1)
                if entry == EMPTY or dirty == 0:
                    continue
                first = (entry >> 2 * sectors) << of(table, level, LINE)
                for sector in range(sectors):
                    address = first + (sector << of(table, level, UNIT))
                    if dirty >> sector & 1 and not _elsewhere(cells, table, level, core, address):
                        total += 1 << of(table, level, UNIT)
    return total


@compiled
def _elsewhere(cells: int, table: int, level: int, core: int, address: int) -> bool:
    """Whether a further level, or this one of a core before, has what lies at an address dirty too."""
    found = False
    for outer in range(level + 1, of(table, 0, LEVELS)):
        found |= _is_dirty(cells, table, outer, core, address)
    if not found and of(table, level, APART):
        for other in range(core):
            found |= _is_dirty(cells, table, level, other, address)
    return found


@compiled
def _is_dirty(cells: int, table: int, level: int, core: int, address: int) -> bool:
    sectors = of(table, level, SECTORS)
    first, position = seek(cells, table, level, core, address >> of(table, level, LINE))
    if position == of(table, level, WAYS):
        return False
    sector = address >> of(table, level, UNIT) & (sectors - 1)
    return load(cells, first + position) >> (sectors + sector) & 1 != 0

"""Prices that the rows of a sweep share: a graph on a device model is priced once for all budgets and strategies.

A row goes on from what every row begins with, the prices of the rewritten graphs that planning tries first, and leaves
them as they are for the next. So its plan is the one that it would have by itself, whichever rows came before.

Part of the face: the costs are of a device model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from layoutopt.graph import TrainingGraph
from layoutopt.pricer import Pricer
from layoutopt.rewrites import origin_of

if TYPE_CHECKING:
    from costmodel.cost import Costs

__all__ = ["pricer_of", "prices_kept"]

MOST_KEPT = 2
"""Graphs on a device model whose prices are kept: rows come in order, with all of one graph after each other."""

_kept: OrderedDict[Hashable, Pricer] = OrderedDict()
_keeping = False


@contextmanager
def prices_kept() -> Iterator[None]:
    """What is planned meanwhile shares prices with what was and will be planned so in this process."""
    global _keeping
    before, _keeping = _keeping, True
    try:
        yield
    finally:
        _keeping = before


def pricer_of(
    costs: Costs, graphs: Sequence[TrainingGraph], price: Callable[[TrainingGraph, Pricer], object]
) -> Pricer:
    """A pricer for some graphs, in this order; where prices are kept, one that knows them already.

    Args:
        costs: of a device model.
        graphs: that are priced first.
        price: prices one of them.
    """
    if not _keeping:
        return Pricer(costs)
    key = type(costs), costs.hash, getattr(costs, "caution", None), tuple(map(origin_of, graphs))
    if key not in _kept:
        pricer = Pricer(costs)
        for graph in graphs:
            price(graph, pricer)
        _kept[key] = pricer
        if len(_kept) > MOST_KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return _kept[key].branch()

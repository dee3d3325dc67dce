"""Pricing by several processes: a large graph's ops are shared out among this one and helpers on other cores.

What different specs cost does not depend on each other, so that the tables are the same however they are shared out.
What belongs to one spec stays in order; specs of one shape stay together, as their kernels are much alike. A helper is
a Python of its own that is told everything by value; what it finds is entered into the books here. If it fails, its
part is priced here after all.

Part of the face: it starts processes that import ``kernels`` and ``costmodel``.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layoutopt.asked import Asked, Moves
from layoutopt.collector import collector_paused
from layoutopt.pricer import Noted, Pricer
from layoutopt.problem import Choice

if TYPE_CHECKING:
    from kernels.spec import OpSpec

__all__ = ["in_one_process", "serve", "share_out"]

MOST_PROCESSES = 4
"""A helper takes half a second to begin, and what it found takes time to read: many are not worth it."""
WORTH_TUPLES = 8000
"""Tuples (of a contraction; others weigh less) that a process should have to price: a second or two."""
BEGIN_TUPLES = 5000
HELPER_SHARE = 1.25
"""What a helper could have priced while it begins, and by how much longer it takes for the rest: it works out anew what
this process knows, and writes down what it finds."""
_WEIGHTS = {"contraction": 1.0, "conv": 3.5, "conv_grad_input": 3.5, "conv_grad_weight": 3.5, "pointwise": 0.7}
_OTHER_WEIGHT, _MOVE_WEIGHT = 0.3, 3.0

_LOG = logging.getLogger(__name__)
_alone = False


@contextmanager
def in_one_process() -> Iterator[None]:
    """No helpers meanwhile: for work that keeps all cores busy by itself."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


@dataclass
class _Group:
    """What is asked of one spec, of which so many run at once; in order."""

    count: int
    spec: OpSpec
    asked: list[Asked] = field(default_factory=list)
    moves: list[Moves] = field(default_factory=list)

    @property
    def weight(self) -> float:
        """Tuples to price, about, in those of a contraction."""
        tuples = sum(min(prod(map(len, one.slots.seen)), 2 * one.limit) for one in self.asked)
        moves = sum(len(one.pairs) for one in self.moves)
        return _WEIGHTS.get(self.spec.kind, _OTHER_WEIGHT) * tuples + _MOVE_WEIGHT * moves

    def answer(self, pricer: Pricer) -> None:
        """Price it all."""
        for one in self.asked:
            one.answer(pricer)
        for moves in self.moves:
            moves.answer(pricer)


@dataclass(frozen=True)
class _Found:
    """What a helper found of a group: everything in the group's order, choices as plain tuples."""

    choices: list[list[tuple[tuple[int, ...], int, str]]]
    relayouts: list[dict[tuple[int, int], int]]
    noted: Noted
    priced: int


def share_out(
    pricer: Pricer,
    asked: Sequence[Asked],
    moves: Sequence[Moves],
    progress: Callable[[str, float], None] | None = None,
) -> None:
    """Price with all cores what is asked, where it is so much that this is worth it; else nothing is done.

    Args:
        pricer: remembers what is found.
        asked: of ops.
        moves: of storages.
        progress: told after each spec.
    """
    groups = _groups(pricer, asked, moves)
    parts = _parts(groups, 1 if _alone or not sys.executable else _cores())
    if len(parts) < 2:
        return
    own, *others = parts
    helpers: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(len(others)) as threads:
        try:
            for _ in others:
                helpers.append(_start())
            # Written down first: while threads wait for helpers, this one prices, and what it remembers grows.
            told = [pickle.dumps((pricer.costs, list(part))) for part in others]
            answers = [threads.submit(_told, h, what) for h, what in zip(helpers, told, strict=True)]
            for done, group in enumerate(own):
                group.answer(pricer)
                if progress:
                    progress("pricing kernels", 0.6 * (done + 1) / len(own))
            for part, answer in zip(others, answers, strict=True):
                _enter(pricer, part, answer)
        except OSError as error:
            _LOG.warning("no helper that prices kernels can be started (%s): going on without", error)
        finally:
            for helper in helpers:
                helper.kill()
                helper.wait()


def _cores() -> int:
    known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(known, MOST_PROCESSES)


def _groups(pricer: Pricer, asked: Sequence[Asked], moves: Sequence[Moves]) -> list[_Group]:
    """What is asked by spec, but for specs of which something is known already."""
    from kernels.bind import relayout_spec

    out: dict[tuple[int, OpSpec], _Group] = {}
    for one in {id(one): one for one in asked}.values():
        out.setdefault((one.count, one.spec), _Group(one.count, one.spec)).asked.append(one)
    for own in dict.fromkeys(moves):
        spec = relayout_spec(own.shape, own.dtype)
        out.setdefault((1, spec), _Group(1, spec)).moves.append(own)
    return [group for (count, spec), group in out.items() if not pricer.together(count).knows(spec)]


def _parts(groups: Sequence[_Group], most: int) -> list[list[_Group]]:
    """Parts of about the same weight, at most so many and none too light to be worth a process; this process' first."""
    alike: dict[Hashable, list[_Group]] = {}
    for group in groups:
        alike.setdefault((group.spec.kind, group.spec.shapes[:2]), []).append(group)
    weights = {key: sum(group.weight for group in own) for key, own in alike.items()}
    number = min(most, int(sum(weights.values()) / WORTH_TUPLES))
    if number < 2:
        return []
    parts: list[list[_Group]] = [[] for _ in range(number)]
    loads = [0.0] + [float(BEGIN_TUPLES)] * (number - 1)
    for key in sorted(alike, key=lambda key: -weights[key]):
        least = loads.index(min(loads))
        parts[least] += alike[key]
        loads[least] += weights[key] * (HELPER_SHARE if least else 1.0)
    return parts


# ---- helpers --------------------------------------------------------------------------------------------------------


def _start() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, "-c", "from layoutopt.pricing_apart import serve; serve()"]
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )


def _told(helper: subprocess.Popen[bytes], what: bytes) -> list[_Found]:
    """What a helper finds; it is told the costs and its part.

    Raises:
        EOFError: it died.
    """
    out, _ = helper.communicate(what)
    with collector_paused():
        found: list[_Found] = pickle.loads(out)
    return found


def _enter(pricer: Pricer, part: Sequence[_Group], answer: Future[list[_Found]]) -> None:
    """Into the books what a helper found; where it failed, this process prices its part."""
    try:
        found = answer.result()
    except (EOFError, OSError, pickle.PickleError, AttributeError, TypeError) as error:
        _LOG.warning("a helper that prices kernels failed (%s): going on without it", error)
        for group in part:
            group.answer(pricer)
        return
    for group, one in zip(part, found, strict=True):
        own = pricer.together(group.count)
        own.priced += one.priced
        book = own.enter(group.spec, one.noted)
        for asked, rows in zip(group.asked, one.choices, strict=True):
            own.choices[asked.key] = tuple(Choice(*row) for row in rows), book
        own.relayouts.update(zip(group.moves, one.relayouts, strict=True))


@collector_paused()
def serve() -> None:
    """A helper's work: read what to price from standard input, write what was found to standard output."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    costs, groups = pickle.load(sys.stdin.buffer)
    pickle.dump(_served(Pricer(costs), groups), sys.stdout.buffer)
    sys.stdout.buffer.flush()


def _served(pricer: Pricer, groups: Sequence[_Group]) -> list[_Found]:
    out = []
    for group in groups:
        own = pricer.together(group.count)
        before: Any = own.priced
        group.answer(pricer)
        choices = [[(c.layouts, c.cost_ns, c.variant) for c in own.choices[one.key][0]] for one in group.asked]
        relayouts = [own.relayouts[one] for one in group.moves]
        out.append(_Found(choices, relayouts, own.book(group.spec).noted(), own.priced - before))
    return out

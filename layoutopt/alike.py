"""Equal neighbours decided alike: what the price of a shared launch takes for granted, said to the solver.

Equal ops that stand side by side and may run at once share a launch if they run the same kernel over the same layouts
(``kernels/group.py``), and tables price them at their part of it. A solver that does not know the condition gives each
of them the layouts that serve its own neighbours best, and the launch is lost. So their storages are tied: operand for
operand, those of one op have the primary layouts of the other's. A tie is an op that costs nothing and reads two
storages in equal layouts; tables and integer program need know nothing else, and what is proven is proven over all
assignments that decide such ops alike. On a CPU none are to share (``rewrite_neighbours.sharing``): nothing is tied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from layoutopt.errors import InfeasibleError
from layoutopt.layout import Layout
from layoutopt.problem import Assignment, Choice, OpNode, Problem
from layoutopt.strategies import prefer

__all__ = ["projected", "tied", "untied"]


def tied(problem: Problem, groups: Iterable[Sequence[int]]) -> Problem:
    """The problem with its ties behind its ops; the problem itself where there are none.

    Args:
        problem: as priced.
        groups: equal ops by position that are to share a launch; most are by themselves.
    """
    equal: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], tuple[Choice, ...]] = {}
    ties = []
    for a, b in _pairs(problem, groups):
        one, other = problem.storages[a], problem.storages[b]
        key = one.candidates, other.candidates
        if key not in equal:
            equal[key] = _equal(*key)
        ties.append(OpNode(f"alike:{one.name}={other.name}", (a, b), 2, equal[key], (0, 1)))
    return replace(problem, ops=problem.ops + tuple(ties)) if ties else problem


def untied(problem: Problem, found: Assignment) -> Assignment:
    """An assignment of ``tied`` tables as one of the problem without ties: these cost nothing."""
    return replace(found, choice=found.choice[: len(problem.ops)])


def projected(problem: Problem, start: Assignment) -> Assignment | None:
    """An assignment of tied tables near one of the problem without ties; None where it meets a dead end.

    Args:
        problem: with ties.
        start: without.
    """
    wanted = list(start.primary)
    for node in problem.ops[len(start.choice) :]:
        a, b = node.operands
        partner = {choice.layouts[0]: choice.layouts[1] for choice in node.choices}
        wanted[b] = partner.get(wanted[a], wanted[b])
    try:
        return prefer(problem, wanted, start.method, stay=False)
    except InfeasibleError:
        return None


def _pairs(problem: Problem, groups: Iterable[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Storages to tie, none of which follows from others; the one that is used first leads."""
    group = list(range(len(problem.storages)))

    def leader(s: int) -> int:
        while group[s] != s:
            s = group[s]
        return s

    for ops in groups:
        first = problem.ops[ops[0]].operands
        for o in ops[1:]:
            for pair in zip(first, problem.ops[o].operands, strict=True):
                a, b = sorted(map(leader, pair))
                if a != b and problem.storages[a].primary < 0:
                    group[b] = a
                    yield a, b


def _equal(one: Sequence[Layout], other: Sequence[Layout]) -> tuple[Choice, ...]:
    """A choice for each layout that both storages may have."""
    place = {layout: i for i, layout in enumerate(other)}
    return tuple(Choice((i, place[x]), 0, "alike") for i, x in enumerate(one) if x in place)

"""Random layout assignment problems, and exhaustive search for those small enough."""

from __future__ import annotations

import itertools
import random

from layoutopt.layout import Layout
from layoutopt.problem import Choice, OpNode, Problem, StorageNode


def candidates(count: int) -> tuple[Layout, ...]:
    """Row-major and further distinct layouts of one shape."""
    shape = (32, 48)
    every = (
        Layout.row_major(shape),
        Layout.row_major(shape, (1, 0)),
        Layout.r_tile(shape, 4, 4),
        Layout.r_tile(shape, 8, 8),
        Layout.r_tile(shape, 16, 4),
        Layout.tiled(shape, {1: 16}),
    )
    return every[:count]


def random_problem(seed: int, ops: int = 4, width: int = 3, dense: bool = False, hostile: bool = False) -> Problem:
    """A chain with skips, weights (persistent, updated in place at the end) and fixed inputs and outputs.

    Args:
        seed: of everything.
        ops: forward ops; about as many update ops follow.
        width: candidates of a storage at most.
        dense: every layout tuple is a choice (like a real table) rather than a sample.
        hostile: half of the pairs cannot be converted and an op may have no kernel for row-major, so that there may be
            no assignment at all.
    """
    draw = random.Random(seed)
    storages: list[StorageNode] = []

    def storage(name: str, persistent: bool = False, primary: int = -1) -> int:
        layouts = candidates(draw.randint(2, width))
        storages.append(StorageNode(name, layouts, tuple(4 * x.size_elems for x in layouts), persistent, primary))
        return len(storages) - 1

    def choices(operands: tuple[int, ...], ties: tuple[tuple[int, int], ...] = ()) -> tuple[Choice, ...]:
        tuples = list(itertools.product(*(range(len(storages[s].candidates)) for s in operands)))
        tuples = [t for t in tuples if all(t[a] == t[b] for a, b in ties)]
        if not dense:
            safe = [] if hostile else [t for t in tuples if not any(t)]
            tuples = safe + draw.sample(tuples, min(len(tuples), 4))
        return tuple(Choice(t, draw.randint(1, 100), f"v{n}") for n, t in enumerate(dict.fromkeys(tuples)))

    nodes: list[OpNode] = []
    live = [storage("in", primary=0)]
    for i in range(ops):
        reads = [live[-1]]
        if draw.random() < 0.4 and len(live) > 1:
            reads.append(draw.choice(live[:-1]))
        updated = draw.random() < 0.4
        if updated:
            reads.append(storage(f"w{i}", persistent=True))
        out = storage(f"t{i}", primary=0 if i == ops - 1 else -1)
        operands = (*reads, out)
        nodes.append(OpNode(f"op{i}", operands, len(reads), choices(operands)))
        if updated:
            weight = (reads[-1], live[-1], reads[-1])
            nodes.append(OpNode(f"update{i}", weight, 2, choices(weight, ((0, 2),))))
            if draw.random() < 0.3:
                again = (reads[-1], out, storage(f"norm{i}"))
                nodes.append(OpNode(f"after{i}", again, 2, choices(again), pinned=(0,)))
        live.append(out)
    relayouts = {
        (s, a, b): draw.randint(1, 60)
        for s, node in enumerate(storages)
        for a, b in itertools.permutations(range(len(node.candidates)), 2)
        if not hostile or draw.random() < 0.5
    }
    return Problem(tuple(storages), tuple(nodes), relayouts)


def exhaustive(problem: Problem) -> int | None:
    """The least cost over every primary and every choice, or None where there is no assignment."""
    best: int | None = None
    free = [range(len(n.candidates)) if n.primary < 0 else [n.primary] for n in problem.storages]
    for primary in itertools.product(*free):
        rows = []
        for op in problem.ops:
            tied = (*op.pinned, *range(op.inputs, len(op.operands)))
            row = [c for c in op.choices if all(c.layouts[k] == primary[op.operands[k]] for k in tied)]
            rows.append([(c, op) for c in row])
        for picks in itertools.product(*rows):
            copies = {
                (s, layout)
                for c, op in picks
                for s, layout in zip(op.operands, c.layouts, strict=True)
                if layout != primary[s]
            }
            prices = [problem.relayout_ns.get((s, primary[s], layout)) for s, layout in copies]
            if None not in prices:
                cost = sum(c.cost_ns for c, _ in picks) + sum(p for p in prices if p is not None)
                best = cost if best is None else min(best, cost)
    return best


def block_problem(seed: int, blocks: int = 3, width: int = 4) -> Problem:
    """Repeated blocks, forward and backward: every block has the same tables, activations are read again on the way
    back, skips join block ends, one input is read by every block (so that its copies are shared by all of them).
    """
    draw = random.Random(seed)
    layouts = candidates(width)
    size = tuple(4 * x.size_elems for x in layouts)
    every = {n: list(itertools.product(range(width), repeat=n)) for n in (2, 3, 4)}

    def table(arity: int, keep: float, ties: tuple[tuple[int, int], ...] = ()) -> tuple[Choice, ...]:
        rows = [t for t in every[arity] if all(t[a] == t[b] for a, b in ties) and (not any(t) or draw.random() < keep)]
        return tuple(Choice(t, draw.randint(50, 150), f"v{n}") for n, t in enumerate(rows))

    names: dict[str, int] = {}
    nodes: list[StorageNode] = []

    def storage(name: str, persistent: bool = False, primary: int = -1) -> int:
        if name not in names:
            names[name] = len(nodes)
            nodes.append(StorageNode(name, layouts, size, persistent, primary))
        return names[name]

    tables = {
        "mul": table(4, 0.5),
        "act": table(2, 0.8),
        "add": table(3, 0.7),
        "dact": table(3, 0.6),
        "dmul": table(3, 0.5),
        "dw": table(3, 0.5),
        "update": table(3, 0.6, ((0, 2),)),
    }
    ops: list[OpNode] = []

    def op(kind: str, name: str, *operands: int, inputs: int = -1, pinned: tuple[int, ...] = ()) -> None:
        ops.append(OpNode(name, operands, len(operands) - 1 if inputs < 0 else inputs, tables[kind], pinned))

    mask = storage("mask", primary=0)
    x = storage("x0", primary=0)
    for b in range(blocks):
        h, a, y = storage(f"h{b}"), storage(f"a{b}"), storage(f"x{b + 1}")
        op("mul", f"mul{b}", x, storage(f"w{b}", persistent=True), mask, h)
        op("act", f"act{b}", h, a)
        op("add", f"add{b}", a, x, y)
        x = y
    g = storage("loss")
    op("act", "loss", x, g)
    for b in reversed(range(blocks)):
        dh, dw, dx = storage(f"dh{b}"), storage(f"dw{b}"), storage(f"dx{b}")
        w = storage(f"w{b}")
        op("dact", f"dact{b}", g, storage(f"h{b}"), dh)
        op("dw", f"grad{b}", dh, storage(f"x{b}"), dw)
        op("dmul", f"back{b}", dh, w, dx)
        op("update", f"update{b}", w, dw, w, inputs=2)
        g = dx
    prices = {(a, b): draw.randint(20, 80) for a, b in itertools.permutations(range(width), 2)}
    relayouts = {
        (s, a, b): price for s, n in enumerate(nodes) for (a, b), price in prices.items() if n.primary in (-1, a)
    }
    return Problem(tuple(nodes), tuple(ops), relayouts)

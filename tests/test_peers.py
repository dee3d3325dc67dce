"""The peers' policies: their layouts, the copies they make on a transformer, and the steps they lead to."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from graphs import Sketch, attention_step, linear_step, permute, random_values, reshape

from costmodel.model import CostModel
from kernels import reference
from kernels.execute import Executor
from kernels.runtime import Runtime, devices
from layoutopt import baselines, planner
from layoutopt import plan as plans
from layoutopt.check import check
from layoutopt.compare import gap_to_exact
from layoutopt.errors import InfeasibleError
from layoutopt.graph import TrainingGraph
from layoutopt.layout import Layout
from layoutopt.models import uncalibrated
from layoutopt.passes import run_passes
from layoutopt.peers import PeerTables, applied
from layoutopt.planner import plan_all, tabulate
from layoutopt.policies import POLICIES, wish
from layoutopt.pricer import Book
from layoutopt.pricing import Tables
from layoutopt.problem import Assignment
from layoutopt.rewrites import rewritten
from tests.fake_costs import FakeCosts

COSTS = FakeCosts()
BATCH, SEQ, HEADS, SIZE = 2, 13, 4, 8
ROWS, WIDTH = BATCH * SEQ, HEADS * SIZE


@lru_cache
def transformer(fused: bool = False) -> TrainingGraph:
    graph = run_passes(attention_step(BATCH, SEQ, HEADS, SIZE))[0]
    return rewritten(graph, ["attention"]) if fused else graph


@lru_cache
def tables(fused: bool = False) -> Tables:
    return tabulate(transformer(fused), COSTS)


@lru_cache
def made(name: str, fused: bool = False) -> tuple[PeerTables, Assignment]:
    return applied(tables(fused), name)


def primary(name: str, storage: str, fused: bool = False) -> Layout:
    own, assignment = made(name, fused)
    s = own.index[storage]
    return own.problem.storages[s].candidates[assignment.primary[s]]


def copied(name: str, fused: bool = False) -> dict[str, list[Layout]]:
    """The relayouts of a policy, by storage."""
    own, assignment = made(name, fused)
    pairs = zip(own.problem.storages, assignment.copies, strict=True)
    return {node.name: [node.candidates[c] for c in copies] for node, copies in pairs if copies}


def storage(name: str, fused: bool = False) -> str:
    return transformer(fused).storage_of[name]


def by_head(last: Layout) -> Layout:
    """What a layout of [batch·heads, tokens, size] is over the storage, [tokens, width]."""
    split = last.reshape((BATCH, HEADS, SEQ, SIZE))
    assert split is not None
    out = split.permute((0, 2, 1, 3)).reshape((ROWS, WIDTH))
    assert out is not None
    return out


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_what_a_policy_leads_to_is_an_assignment(name: str, fused: bool) -> None:
    own, assignment = made(name, fused)
    assert check(own.problem, assignment) == assignment.cost_ns
    assert (assignment.status, assignment.method) == ("HEURISTIC", name)
    assert all(len(op.choices) == 1 for op in own.problem.ops)
    assert own.graph is transformer(fused)
    again = applied(tabulate(transformer(fused), COSTS), name)
    assert (again[0].problem, again[1].copies) == (own.problem, assignment.copies)


# ---- layouts --------------------------------------------------------------------------------------------------------


def test_linear_layers_have_the_peers_activations_and_weights() -> None:
    activations = {
        "mnn-image": Layout.row_major((ROWS, WIDTH), pad={1: 4}),
        "mnn-buffer": baselines.mnn_buffer((ROWS, WIDTH)),
        "tflite": baselines.tflite_phwc4((ROWS, WIDTH)),
        "tvm-flat": Layout.row_major((ROWS, WIDTH)),
    }
    weights = {
        "mnn-image": Layout.row_major((WIDTH, WIDTH), pad={1: 4}),
        "mnn-buffer": baselines.mnn_matmul_weights((WIDTH, WIDTH)),
        "tflite": baselines.tflite_weights((WIDTH, WIDTH)),
        "tvm-flat": Layout.row_major((WIDTH, WIDTH)),
    }
    for name in POLICIES:
        assert primary(name, storage("q.mm")).reshape((ROWS, WIDTH)) == activations[name]
        assert primary(name, storage("wq")) == weights[name]


def test_texels_of_an_image_follow_each_other_row_after_row() -> None:
    shape = (3, 10)
    ours, theirs = POLICIES["mnn-image"].matrix(shape), baselines.mnn_image(shape)
    assert not ours.is_image
    row, column, lane = np.moveaxis(theirs.offsets(), -1, 0) if theirs.offsets().shape[-1] == 3 else theirs.offsets()
    np.testing.assert_array_equal(ours.linear_offsets().ravel(), ((row * theirs.size[1] + column) * 4 + lane).ravel())
    assert ours.size_elems == 3 * 3 * 4


def test_weights_that_are_stored_by_inputs_are_laid_out_by_outputs_all_the_same() -> None:
    """As in GPT-2, whose linear layers keep [inputs, outputs]."""
    s = Sketch()
    s.tensor("x", (32, 16), "input")
    s.tensor("w", (16, 24), "parameter")
    s.op("contraction", [("x", reshape(1, 32, 16)), ("w", reshape(1, 16, 24))], {"y": (1, 32, 24)})
    graph = run_passes(s.graph("linear", "y"))[0]
    found = wish(graph, POLICIES["tflite"]).primary[graph.storage_of["w"]]
    assert found == baselines.tflite_weights((24, 16)).permute((1, 0))
    s.tensors.pop("y")
    s.ops.clear()
    s.tensor("w", (24, 16), "parameter")
    s.op("contraction", [("x", reshape(1, 32, 16)), ("w", permute(1, 0), reshape(1, 16, 24))], {"y": (1, 32, 24)})
    graph = run_passes(s.graph("linear", "y"))[0]
    assert wish(graph, POLICIES["tflite"]).primary[graph.storage_of["w"]] == baselines.tflite_weights((24, 16))


def test_small_tensors_and_what_the_host_sees_stay_row_major() -> None:
    graph = run_passes(linear_step())[0]
    for policy in POLICIES.values():
        found = wish(graph, policy)
        assert all(layout == Layout.row_major(layout.shape) for layout in found.primary.values())
        assert not found.extras
    for name in POLICIES:
        assert primary(name, "x") == Layout.row_major((BATCH, SEQ, WIDTH))


# ---- copies ---------------------------------------------------------------------------------------------------------

SPLIT = ("q.mm", "k.mm", "v.mm", "out")
"""Read by head: queries, keys, values, and (as the gradient of the loss) what the squares were taken of."""
MERGED = ("ctx", "dq", "dk", "dv")
"""Written by head and read as tokens × features: the context and three gradients."""


def as_tokens(layout: Layout) -> Layout:
    """A layout of a storage, whatever its shape, over [tokens, width]."""
    if layout.shape == (BATCH * HEADS, SEQ, SIZE):
        split = layout.reshape((BATCH, HEADS, SEQ, SIZE))
        assert split is not None
        layout = split.permute((0, 2, 1, 3))
    out = layout.reshape((ROWS, WIDTH))
    assert out is not None
    return out


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["tvm-flat", "mnn-image"])
def test_heads_are_copied_to_be_split_and_merged_and_nothing_else_is(name: str, fused: bool) -> None:
    flat = Layout.row_major((ROWS, WIDTH))
    heads = by_head(Layout.row_major((BATCH * HEADS, SEQ, SIZE)))
    copies = copied(name, fused)
    assert set(copies) == {storage(x, fused) for x in (*SPLIT, *MERGED)}
    for x in SPLIT:
        assert [as_tokens(c) for c in copies[storage(x, fused)]] == [heads]
        assert as_tokens(primary(name, storage(x, fused), fused)) == flat
    for x in MERGED:
        assert [as_tokens(c) for c in copies[storage(x, fused)]] == [flat]
        assert as_tokens(primary(name, storage(x, fused), fused)) == heads
    assert made(name, fused)[0].not_run.copies == 0


@pytest.mark.parametrize("fused", [False, True])
def test_mnn_keeps_linear_layers_in_blocks_of_four_and_attention_row_major(fused: bool) -> None:
    blocks = baselines.mnn_buffer((ROWS, WIDTH))
    heads = by_head(Layout.row_major((BATCH * HEADS, SEQ, SIZE)))
    copies = copied("mnn-buffer", fused)
    (given,) = copies.pop("x")  # the host's input, converted once for three linear layers and their gradients
    assert as_tokens(given) == blocks
    assert set(copies) == {storage(x, fused) for x in (*SPLIT, *MERGED)}
    assert all(as_tokens(c) == heads for x in SPLIT for c in copies[storage(x, fused)])
    assert all(as_tokens(c) == blocks for x in MERGED for c in copies[storage(x, fused)])


def test_tflite_converts_the_second_operand_of_every_batched_product() -> None:
    """By a kernel after the one that splits heads: of tensors whose heads are split, that second kernel is not run."""
    wishes = wish(transformer(), POLICIES["tflite"])
    converted = {(extra.op, extra.tensor) for extra in wishes.extras}
    products = [op for op in transformer().ops if op.kind == "contraction" and op.inputs[1].view.steps]
    batched = [op for op in products if transformer().operand_shape(op.inputs[1])[0] > 1]
    assert converted == {(op.name, op.inputs[1].tensor) for op in batched}
    assert len(batched) == 6
    policy = POLICIES["tflite"]
    assert policy.second
    for extra in wishes.extras:
        assert extra.target == policy.second(extra.shape, False)
    own = made("tflite")[0].not_run
    moved = sum(2 * 4 * int(np.prod(extra.shape)) for extra in wishes.extras)
    assert (own.copies, own.bytes_moved) == (6, moved)
    pricer = tables().pricer
    prices = [pricer.relayout(e.shape, "float32", e.source, e.target) for e in wishes.extras]
    assert own.cost_ns == sum(round(p[1].total_ns) for p in prices if p) > 0


def test_an_operand_that_is_batched_as_it_lies_is_converted_by_a_relayout() -> None:
    s = Sketch()
    s.tensor("x", (8, 16, 12), "input")
    s.tensor("y", (8, 12, 16), "input")
    s.op("contraction", ["x", "y"], {"z": (8, 16, 16)})
    s.op("contraction", ["z", "x"], {"out": (8, 16, 12)})
    graph = run_passes(s.graph("products", "out"))[0]
    wishes = wish(graph, POLICIES["tflite"])
    assert wishes.reads[0][1] == Layout.tiled((8, 12, 16), {1: 4, 2: 4})
    assert wishes.reads[1][1] == Layout.tiled((8, 16, 12), {1: 4, 2: 4})
    assert not wishes.extras
    own, assignment = applied(tabulate(graph, COSTS), "tflite")
    assert len(assignment.copies[own.index["x"]]) == 2  # as the first operand of one product, the second of another


def test_slices_that_a_peer_copies_are_priced_and_not_run() -> None:
    """Queries, keys and values from one matrix product, as in GPT-2."""
    s = Sketch()
    s.tensor("x", (ROWS, WIDTH), "input")
    s.tensor("w", (3 * WIDTH, WIDTH), "parameter")
    weight = ("w", permute(1, 0), reshape(1, WIDTH, 3 * WIDTH))
    s.op("contraction", [("x", reshape(1, ROWS, WIDTH)), weight], {"qkv": (1, ROWS, 3 * WIDTH)})

    def part(i: int) -> tuple[object, ...]:
        where = ("slice", (2, i * WIDTH, (i + 1) * WIDTH, 1))
        return "qkv", where, reshape(BATCH, SEQ, HEADS, SIZE), permute(0, 2, 1, 3), reshape(BATCH * HEADS, SEQ, SIZE)

    s.op("contraction", [part(0), (*part(1), permute(0, 2, 1))], {"scores": (BATCH * HEADS, SEQ, SEQ)})
    s.op("contraction", ["scores", part(2)], {"out": (BATCH * HEADS, SEQ, SIZE)})
    graph = run_passes(s.graph("sliced", "out"))[0]
    own, assignment = applied(tabulate(graph, COSTS), "tvm-flat")
    assert own.not_run.copies == 3
    assert own.not_run.bytes_moved == 3 * 2 * 4 * ROWS * WIDTH
    assert own.not_run.cost_ns > 3 * 2000  # a launch each, by these prices
    assert not any(assignment.copies)


def test_an_updated_value_is_never_read_from_a_copy() -> None:
    """Updates write parameters in the weights' layout, with no copy of a parameter in any policy."""
    parameters = {t.name for t in transformer().by_role("parameter")}
    for name in POLICIES:
        assert not parameters & set(copied(name))
        own, assignment = made(name)
        for op, node in zip(own.graph.ops, own.problem.ops, strict=True):
            if op.phase == "update":
                assert node.choices[0].layouts[0] == node.choices[0].layouts[-1] == assignment.primary[node.operands[0]]


# ---- what no kernel accepts ------------------------------------------------------------------------------------------


def refuse_blocks(monkeypatch: pytest.MonkeyPatch, operand: int) -> None:
    """From now on no contraction has this operand with its columns in blocks."""
    cheapest = Book.cheapest

    def picky(book: Book, layouts: tuple[Layout, ...]) -> tuple[str, int] | None:
        blocked = book.spec.kind == "contraction" and len(layouts[operand].axis_modes(2)) > 1
        return None if blocked else cheapest(book, layouts)

    monkeypatch.setattr(Book, "cheapest", picky)


def test_where_no_kernel_writes_a_layout_the_output_is_row_major(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tables()
    assert primary("mnn-buffer", storage("q.mm")) != Layout.row_major((ROWS, WIDTH))
    refuse_blocks(monkeypatch, 2)
    own, assignment = applied(before, "mnn-buffer")
    assert check(own.problem, assignment) == assignment.cost_ns
    for name in (*(f"{x}.mm" for x in "qkv"), *(f"dw{x}" for x in "qkv")):
        s = own.index[storage(name)]
        shape = own.problem.storages[s].candidates[0].shape
        assert own.problem.storages[s].candidates[assignment.primary[s]] == Layout.row_major(shape)


def test_where_no_kernel_reads_a_layout_the_input_is_read_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tables()
    assert copied("mnn-buffer")["x"]
    refuse_blocks(monkeypatch, 0)
    own, assignment = applied(before, "mnn-buffer")
    assert check(own.problem, assignment) == assignment.cost_ns
    first = own.problem.ops[0]
    assert own.graph.ops[0].kind == "contraction"
    assert first.choices[0].layouts[0] == 0  # the host's input, row-major


def test_no_kernel_at_all_is_an_error_that_names_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    own = tables()
    monkeypatch.setattr(Book, "cheapest", lambda *_: None)
    with pytest.raises(InfeasibleError, match=r"has no kernel for the layouts of tflite.*ilp") as caught:
        applied(own, "tflite")
    assert caught.value.conflict


# ---- plans ----------------------------------------------------------------------------------------------------------

NAMES = ("ilp", "bfs", "majority", "chaindp", *POLICIES)


def test_plans_say_what_is_not_run_and_survive_their_file() -> None:
    made_plans = plan_all(transformer(), COSTS, NAMES, rewrites=[])
    assert set(NAMES) <= set(planner.STRATEGIES)
    least = made_plans["ilp"].solver.objective_ns
    for name, plan in made_plans.items():
        report = plan.solver
        assert report.objective_ns >= least
        gap = gap_to_exact(plan, made_plans)
        assert gap == pytest.approx((report.objective_ns + report.not_run_ns) / least - 1)
        assert (report.not_run_copies > 0) == (name == "tflite")
        assert plans.decode(plans.encode(plan)) == plan
    assert len(made_plans["tvm-flat"].relayouts) == len(SPLIT) + len(MERGED)
    assert gap_to_exact(made_plans["ilp"], made_plans) == 0
    assert gap_to_exact(made_plans["bfs"], {"bfs": made_plans["bfs"]}) is None


@lru_cache
def odd_step() -> TrainingGraph:
    """Nothing divides anything: 13 tokens, heads of 7, a width of 21."""
    return run_passes(attention_step(3, 13, 3, 7))[0]


@pytest.mark.parametrize("rewrites", [(), ("attention",)], ids=["as captured", "attention"])
@pytest.mark.parametrize("name", NAMES[1:])
def test_steps_compute_what_the_interpreter_does(name: str, rewrites: tuple[str, ...], device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    graph, values = odd_step(), random_values(odd_step())
    plan = planner.plan(graph, CostModel(uncalibrated(runtime)), name, rewrites=rewrites)
    inputs = {t.name: values[t.name] for t in graph.by_role("input")}
    start = {t.name: values[t.name].astype(np.float32) for t in graph.by_role("parameter", "state")}
    executor = Executor(runtime, graph, plan, start, poison=True)
    known = {name: value.astype(np.float64) for name, value in start.items()}
    for _ in range(2):
        executor.step(inputs)
        expected = reference.run(graph, known | inputs)
        assert executor.loss() == pytest.approx(float(expected["loss"]), rel=1e-5)
        known = {name: expected[f"{name}.new"] for name in known}
        for name_, value in known.items():  # the parameters after the update: gradients, to the last one
            np.testing.assert_allclose(executor.read(name_), value, rtol=1e-4, atol=1e-5, err_msg=name_)
    executor.close()

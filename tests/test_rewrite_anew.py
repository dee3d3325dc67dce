"""Results made anew in the backward pass: the same numbers, less memory, names that say all; and which are chosen."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest

from kernels import reference
from layoutopt.errors import LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.recompute_search import Recomputation, frontier, thinned
from layoutopt.rewrite_anew import SUFFIX, made_anew, may_run_again, name_of, positions_of
from layoutopt.rewrite_updates import peak_bytes, with_groups
from layoutopt.rewrites import alternatives, before_family, in_order, origin_of, rewritten
from tests.test_rewrite_recompute import graphs, values_of
from tests.test_rewrite_updates import overwriting


def costs_of(graph: TrainingGraph) -> dict[str, int]:
    """A nanosecond an element that an op touches."""
    return {op.name: sum(graph.tensors[o.tensor].size_elems for o in op.operands) for op in graph.ops}


def again(graph: TrainingGraph) -> list[str]:
    return [op.name for op in graph.ops if op.name.endswith(SUFFIX)]


def eager_peak(graph: TrainingGraph) -> int:
    """With every update where it may run at the earliest."""
    return peak_bytes(with_groups(graph, 1 << 40))


@lru_cache(maxsize=4)
def choices(name: str) -> tuple[Recomputation, ...]:
    graph = graphs(name)
    return tuple(frontier(graph, costs_of(graph)))


# ---- the rewrite ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "attention", "vit-digits"])
def test_the_same_numbers_to_the_last_bit(name: str) -> None:
    """Every value of the step, whatever is dropped: all that may be, every second op, what was chosen."""
    graph = graphs(name)
    free = may_run_again(graph)
    values = values_of(graph)
    before = overwriting(graph, values)
    texts = [name_of(free), name_of(free[::2]), *(c.name for c in choices(name)[1::20])]
    assert any(again(rewritten(graph, [text])) for text in texts)
    for text in texts:
        changed = rewritten(graph, [text])
        after = overwriting(changed, values)
        assert before.keys() <= after.keys()
        for tensor, value in after.items():
            np.testing.assert_array_equal(before[tensor.removesuffix(SUFFIX)], value, err_msg=tensor)


def test_in_float64_too() -> None:
    graph = graphs("vit-digits")
    values = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in values_of(graph).items()}
    changed = rewritten(graph, [choices("vit-digits")[-1].name])
    before, after = (reference.run(g, values, np.float64) for g in (graph, changed))
    for tensor in (*graph.outputs, *(t.name for t in graph.tensors.values() if t.of)):
        np.testing.assert_array_equal(before[tensor], after[tensor], err_msg=tensor)


def test_the_backward_pass_reads_what_was_made_anew() -> None:
    graph = graphs("vit-digits")
    changed = rewritten(graph, [choices("vit-digits")[-1].name])
    made = again(changed)
    assert len(made) > 20
    position = {op.name: at for at, op in changed.walk()}
    for name in made:
        op = changed.ops[position[name]]
        assert op.phase == "backward"
        for operand in op.outputs:
            kept = operand.tensor.removesuffix(SUFFIX)
            assert all(position[reader.name] < position[name] for reader in changed.consumers[kept])
            assert all(reader.phase != "forward" for reader in changed.consumers[operand.tensor])


def test_after_all_other_rewrites() -> None:
    """Updates that the contractions make (``apply``) overwrite weights: nothing runs again on those."""
    graph = graphs("vit-digits")
    values = values_of(graph)
    before = overwriting(graph, values)
    # The gradient of a key's bias is zero: what AdamW makes of its rounding is not to be compared.
    updated = [op.outputs[0].tensor for op in graph.ops if op.phase == "update" and "k_proj.bias" not in op.name]
    for candidate in alternatives(graph):
        names = origin_of(candidate)[1]
        bare = rewritten(graph, before_family(names, "anew"))
        changed = rewritten(graph, [*names, name_of(may_run_again(bare))])
        assert again(changed)
        after = overwriting(changed, values)
        for name in updated:
            np.testing.assert_allclose(before[name], after[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_what_reads_weights_after_their_update_is_not_made_anew() -> None:
    """An update that runs first takes the weight away: the op is left as it was."""
    graph = graphs("linear")
    free = may_run_again(graph)
    text = name_of(free)
    assert again(made_anew(graph, positions_text(text)))
    update = [op for op in graph.ops if op.phase == "update"]
    forward = [op for op in graph.ops if op.phase in ("forward", "loss")]
    weights = {o.tensor for op in update for o in op.inputs if graph.tensors[o.tensor].role == "parameter"}
    readers = {op.name for op in forward for o in op.inputs if o.tensor in weights}
    changed = made_anew(graph, positions_text(text))
    position = {op.name: at for at, op in changed.walk()}
    gone = {op.inputs[i].tensor: position[op.name] for op in changed.ops for _, i in op.inplace}
    for name in again(changed):
        if name.removesuffix(SUFFIX) in readers:
            op = changed.ops[position[name]]
            assert all(position[name] < gone.get(o.tensor, len(position)) for o in op.inputs)


def positions_text(name: str) -> str:
    return name.partition(":")[2]


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [[0], [3, 4, 5], [1, 2, 3, 9, 11, 12], list(range(40))])
def test_names_say_which_ops(positions: list[int]) -> None:
    assert list(positions_of(positions_text(name_of(positions)))) == positions


@pytest.mark.parametrize("text", ["3-", "a", "5-3", "4,4", "7,3", "1,,2", "-1", "1-9999999999"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(LayoutOptError, match=r"anew:.*ascending positions.*plan the graph anew"):
        positions_of(text)


def test_ops_that_may_not_run_again_are_refused() -> None:
    graph = graphs("vit-digits")
    late = next(at for at, op in graph.walk() if op.phase == "backward")
    for text in (str(late), str(len(graph.ops))):
        with pytest.raises(LayoutOptError, match=r"no forward op that may run again; plan the graph anew"):
            made_anew(graph, text)


def test_families_have_their_place_among_the_others() -> None:
    assert in_order(["reuse", "anew:3-4", "apply", "recompute"]) == ("recompute", "apply", "anew:3-4", "reuse")
    assert before_family(["reuse", "apply", "recompute"], "anew") == ("recompute", "apply")
    for wrong in ("anew", "anew:", "apply:3", "imagined:3"):
        with pytest.raises(LayoutOptError, match=r"unknown rewrite.*anew:….*plan the graph anew"):
            in_order([wrong])


# ---- what is chosen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit-digits", "minilm", "llama-3.2-1b"])
def test_each_choice_needs_less_memory_for_more_time(name: str) -> None:
    graph, found = graphs(name), choices(name)
    assert found[0].name == ""
    assert found[0].extra_ns == 0
    for one, other in pairwise(found):
        assert one.extra_ns < other.extra_ns
        assert one.peak_bytes > other.peak_bytes
    for choice in found[1 :: max(len(found) // 4, 1)]:
        made = rewritten(graph, [choice.name])
        # What the search says a step needs is what the rewritten graph needs.
        assert eager_peak(made) == pytest.approx(choice.peak_bytes, rel=0.01)
        assert peak_bytes(made) <= peak_bytes(graph)
        ran = [op.removesuffix(SUFFIX) for op in again(made)]
        assert choice.extra_ns == sum(costs_of(graph)[op] for op in ran)


def test_whole_blocks_are_among_the_choices() -> None:
    """Six blocks' activations shrink to one block's and what the blocks begin with: to less than half of all."""
    graph = graphs("vit-digits")
    held = sum(t.size_elems * t.item_bytes for t in graph.by_role("parameter", "state", "constant", "input"))
    found = choices("vit-digits")
    assert found[-1].peak_bytes - held < 0.4 * (found[0].peak_bytes - held)
    # All of the forward pass once more at most.
    assert found[-1].extra_ns <= sum(costs_of(graph)[op.name] for op in graph.ops if op.phase == "forward")


def test_nothing_to_choose() -> None:
    """Ops without a price are never run again."""
    graph = graphs("vit-digits")
    assert [c.name for c in frontier(graph, {})] == [""]


def test_a_frontier_thins_to_its_ends_and_what_is_between() -> None:
    found = choices("vit-digits")
    few = thinned(found, 5)
    assert few[0] == found[0]
    assert few[-1] == found[-1]
    assert 3 <= len(few) <= 7
    assert few == sorted(few, key=lambda c: c.extra_ns)
    assert thinned(found, len(found)) == list(found)

"""Tasks and batches: what fits passes, and whatever does not is one sentence."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutopt.errors import LayoutOptError
from layoutopt.quantize import Format, quantise
from layoutopt.side.records import decode_batch, encode_batch, join_samples, sample_bytes
from layoutopt.side.task import IGNORED, Batch, Task
from layoutopt.side.weights import SideWeights, initial_weights, pack, unpack, weight_shapes
from tests.side_cases import TASK, batch_of, same, task_of

VARIANTS = [
    TASK,
    task_of(tokens="all"),
    task_of(tokens="all", pooling="mean", format="fp4:16", mode="private"),
    task_of(format="int4", mode="private", pooler=True),
    task_of(format="float32", taps=("only",)),
    task_of(format="nf4:64", tokens="all", pooling="last", width=7),
]


@pytest.mark.parametrize("task", VARIANTS, ids=lambda t: f"{t.format} {t.tokens} {t.mode}")
def test_a_batch_of_the_task_passes_and_survives_bytes(task: Task) -> None:
    batch = batch_of(task, 3)
    batch.check(task)
    assert batch.nbytes == task.batch_bytes
    again = decode_batch(task, encode_batch(batch))
    again.check(task)
    assert encode_batch(again) == encode_batch(batch)
    parts = [sample_bytes(task, batch, i) for i in range(task.batch)]
    assert encode_batch(join_samples(task, 3, batch.samples, parts)) == encode_batch(batch)
    assert {len(p) for p in parts} == {task.sample_bytes}


def test_a_task_survives_json() -> None:
    for task in VARIANTS:
        assert Task.decode(task.encode()) == task
    assert TASK.differs(task_of(lr=0.5, rank=3)) == ("rank", "lr")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"width": 0}, "width is a whole number from 1"),
        ({"width": True}, "width is a whole number"),
        ({"rank": 10**9}, "rank is a whole number"),
        ({"taps": ()}, "1 to 1000 different taps"),
        ({"taps": ("a", "a")}, "different taps"),
        ({"taps": ["a"]}, "taps a tuple"),
        ({"taps": ("x" * 300,)}, "1 to 200 printable"),
        ({"model": "a\nb"}, "printable"),
        ({"format": "int9"}, "int9"),
        ({"format": "int8:7"}, "multiple of 8"),
        ({"tokens": "some"}, "tokens is one of all, pivot"),
        ({"mode": []}, "mode is one of"),
        ({"lr": float("nan")}, "lr is a number"),
        ({"lr": 0.0}, "lr is above 0"),
        ({"gate": 1.0}, "gate between 0 and 1"),
        ({"warmup": 13}, "warmup ends within its 12 steps"),
        ({"steps": 0}, "steps is a whole number from 1"),
        ({"seed": -1}, "seed is a whole number"),
        ({"pooler": 1}, "pooler is true or false"),
        ({"pooling": "mean"}, 'has tokens "all"'),
        ({"tokens": "all", "seq": 0}, "seq is 0"),
        ({"tokens": "all", "seq": 60000, "width": 60000, "batch": 9999}, "fewer samples, fewer taps, or pivot"),
        ({"width": 60000, "rank": 4000}, "take a lower rank"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(LayoutOptError, match=said):
        task_of(**changed)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"model": 3}', b"\xff", TASK.encode().replace(b"20", b'"20"')])
def test_bytes_that_are_no_task_are_refused(data: bytes) -> None:
    with pytest.raises(LayoutOptError, match="no task"):
        Task.decode(data)


def _changed_tap(batch: Batch, words: np.ndarray | None = None, scales: np.ndarray | None = None) -> Batch:
    first = (batch.taps[0][0] if words is None else words, batch.taps[0][1] if scales is None else scales)
    return replace(batch, taps=(first, *batch.taps[1:]))


def _wrong_batches() -> list[tuple[Task, Batch, str]]:
    good, everything, private = batch_of(TASK, 1), task_of(tokens="all"), task_of(mode="private")
    whole, differences = batch_of(everything, 1), batch_of(private, 1)
    words, scales = good.taps[0]
    labels, mask = good.targets, whole.mask
    assert labels is not None
    assert mask is not None
    assert differences.targets is not None
    inf = np.full_like(scales, np.inf)
    number = task_of(format="float32")
    plain = batch_of(number, 1)
    int4 = task_of(format="int4")
    tail = task_of(format="int8", width=18)
    dirty = batch_of(tail, 0)
    dirty.taps[0][0][:, -1] |= np.int32(1 << 24)
    return [
        (TASK, replace(good, step=-1), "step from 0 to 11"),
        (TASK, replace(good, step=12), "step from 0 to 11"),
        (TASK, replace(good, step=1.0), "step from 0"),
        (TASK, replace(good, samples=()), "1 to 4 samples"),
        (TASK, replace(good, samples=(1, 2, 3, 4, 5)), "1 to 4 samples"),
        (TASK, replace(good, samples=(1, 2, 3, -4)), "id is a number"),
        (TASK, replace(good, samples=(1, 2, 3, 1 << 63)), "id is a number"),
        (TASK, replace(good, samples=(1, 2, 3)), r"int32\[4, 5\], expected int32\[3, 5\]"),
        (TASK, replace(good, taps=list(good.taps)), "taps are a tuple"),
        (TASK, replace(good, taps=good.taps[:2]), "expected 3 taps, got 2"),
        (TASK, replace(good, taps=(good.taps[0], good.taps[1], good.taps[2][0])), "no pair"),
        (TASK, replace(good, taps=()), "neither mask nor targets"),
        (TASK, _changed_tap(good, words=words.astype(np.int64)), "expected int32"),
        (TASK, _changed_tap(good, words=words.astype(">i4")), "expected int32"),
        (TASK, _changed_tap(good, words=words[:, :4]), "words of tap block.0"),
        (TASK, _changed_tap(good, words=words.tolist()), "words of tap block.0 are list"),
        (TASK, _changed_tap(good, words=np.full_like(words, -128 & 0xFF)), "from -127 to 127"),
        (TASK, _changed_tap(good, scales=scales[:, :1]), "scales of tap block.0"),
        (TASK, _changed_tap(good, scales=-scales), "0 or positive"),
        (TASK, _changed_tap(good, scales=inf), "finite"),
        (TASK, _changed_tap(good, scales=np.full_like(scales, np.nan)), "finite"),
        (TASK, _changed_tap(good, scales=np.full_like(scales, 1e30)), "at most"),
        (TASK, _changed_tap(good, scales=np.full_like(scales, 1e-40)), "normal"),
        (int4, _changed_tap(batch_of(int4, 1), words=np.full((4, 3), 8, np.int32)), "from -7 to 7"),
        (number, _changed_tap(plain, words=np.full((4, 20), np.nan, np.float32).view(np.int32)), "finite"),
        (tail, dirty, "not 0 beyond"),
        (TASK, replace(good, mask=mask), "no mask"),
        (everything, replace(whole, mask=None), "masks are NoneType"),
        (everything, replace(whole, mask=mask.astype(bool)), r"bool\[4, 5\]"),
        (everything, replace(whole, mask=mask * 2), "zeros and ones"),
        (everything, replace(whole, mask=mask * 0), "a one in every sample"),
        (TASK, replace(good, targets=None), "targets are NoneType"),
        (TASK, replace(good, targets=labels + 3), "from 0 to 2"),
        (TASK, replace(good, targets=labels * 0 - 1), "from 0 to 2"),
        (TASK, replace(good, targets=np.full_like(labels, IGNORED)), "every sample is left out"),
        (TASK, replace(good, targets=differences.targets), "expected int32"),
        (private, replace(differences, targets=labels), "expected float32"),
        (private, replace(differences, targets=np.full_like(differences.targets, np.nan)), "from -1 to 1"),
        (private, replace(differences, targets=differences.targets + 3), "from -1 to 1"),
    ]


@pytest.mark.parametrize(("task", "batch", "said"), _wrong_batches())
def test_a_batch_that_does_not_fit_is_refused(task: Task, batch: Batch, said: str) -> None:
    with pytest.raises(LayoutOptError, match=said):
        batch.check(task)


@given(st.sampled_from(VARIANTS), st.data())
def test_bytes_that_were_changed_are_refused_or_a_batch_that_passes_or_fails_in_a_sentence(
    task: Task, data: st.DataObject
) -> None:
    encoded = bytearray(encode_batch(batch_of(task, 2)))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(LayoutOptError):
        batch = decode_batch(task, bytes(encoded))
        batch.check(task)
        assert len(encode_batch(batch)) <= len(encoded) + 32


def test_ignored_labels_and_short_batches_pass() -> None:
    batch = batch_of(TASK, 1, samples=(5, 5))
    assert batch.targets is not None
    replace(batch, targets=np.array([IGNORED, 2], np.int32)).check(TASK)
    Batch(1, (7, 8, 9)).check(TASK)
    assert Batch(1, (7,)).is_stored
    assert not batch.is_stored


def test_every_code_of_four_bits_but_the_least_passes() -> None:
    x = np.random.default_rng(0).standard_normal((4, 20), np.float32)
    for kind in ("fp4:8", "nf4:16", "int4:8"):
        task = task_of(format=kind)
        tap = quantise(x, Format.parse(kind))
        Batch(0, (1, 2, 3, 4), (tap,) * 3, None, np.zeros(4, np.int32)).check(task)


# ---- weights --------------------------------------------------------------------------------------------------------


def test_weights_start_as_they_should_and_survive_their_file() -> None:
    task = task_of(pooler=True, gate=0.25)
    values = initial_weights(task)
    assert {n: v.shape for n, v in values.items()} == weight_shapes(task)
    assert sum(v.size for v in values.values()) == task.parameters
    assert not values["mix"].any()
    assert not values["adapters.1.up"].any()
    assert values["adapters.2.down"].std() == pytest.approx(task.width**-0.5, rel=0.3)
    assert 1 / (1 + np.exp(-values["adapters.1.gate"][0])) == pytest.approx(0.25)
    assert values["classifier.weight"].any()
    assert not initial_weights(task_of(mode="private"))["classifier.weight"].any()
    assert same(values, initial_weights(task))
    assert not same(values, initial_weights(replace(task, seed=1)))
    again = unpack(pack(SideWeights(task, 5, values)))
    assert (again.task, again.steps) == (task, 5)
    assert same(again.values, values)


def test_a_head_that_does_not_fit_is_refused() -> None:
    task = task_of(pooler=True)
    weight = np.ones((3, 20), np.float32)
    assert initial_weights(task, {"classifier.weight": weight})["classifier.weight"].all()
    for head, said in [
        ({"mix": np.ones(1, np.float32)}, "has 'mix'"),
        ({"classifier.weight": weight.T}, r"float32\[20, 3\], expected float32\[3, 20\]"),
        ({"classifier.weight": weight.astype(np.float64)}, "float64"),
        ({"classifier.weight": weight * np.float32(np.inf)}, "not finite"),
        ({"classifier.bias": [1, 2, 3]}, "classifier.bias is list"),
    ]:
        with pytest.raises(LayoutOptError, match=said):
            initial_weights(task, head)
    with pytest.raises(LayoutOptError, match="starts at 0"):
        initial_weights(task_of(mode="private"), {"classifier.weight": weight})
    with pytest.raises(LayoutOptError, match=r"has 'pooler\.bias'"):
        initial_weights(TASK, {"pooler.bias": np.zeros(20, np.float32)})


def test_a_file_that_is_no_side_network_is_refused() -> None:
    from safetensors.numpy import save

    good = pack(SideWeights(TASK, 5, initial_weights(TASK)))
    for data in (b"", b"x" * 100, good[:-4], save({"a": np.ones(1)}), good.replace(b'"steps":"5"', b'"steps":"x"')):
        with pytest.raises(LayoutOptError, match="side network"):
            unpack(data)
    short = initial_weights(TASK)
    del short["mix"]
    with pytest.raises(LayoutOptError, match="lacks mix"):
        unpack(pack(SideWeights(TASK, 5, short)))

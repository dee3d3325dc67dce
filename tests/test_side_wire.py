"""Messages of side-tuning: what goes in comes out; what is wrong is refused in one sentence before it costs much."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutopt.errors import LayoutOptError
from layoutopt.side import wire
from layoutopt.side.sampling import Sampling
from layoutopt.side.task import Task
from layoutopt.side.wire import RefusedError, decode, encode_rows, encode_task, read_head, read_orders, read_rows
from tests.side import FakeBackbone, small_task

pytest.importorskip("google.protobuf", reason="needs the extra 'side'")

PB = wire.messages()
TASKS = [
    small_task(),
    small_task(format="int4:16", mode="private"),
    small_task(format="float32", tokens="all", pooling="mean"),
    small_task(format="fp4", tokens="all", pooling="last", mode="private", width=21),
]


def sent(task: Task, count: int = 3) -> Any:
    return encode_rows(FakeBackbone(task).batch(0, tuple(range(7, 7 + count))))


# ---- generated code -------------------------------------------------------------------------------------------------


def test_generated_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("needs the extra 'dev'")
    from layoutopt.side.generate import HERE

    # The compiler's own protobuf library does not get on with others in one process.
    subprocess.run([sys.executable, "-m", "layoutopt.side.generate", str(tmp_path)], cwd=HERE.parents[1], check=True)
    for name in ("side_pb2.py", "side_pb2.pyi"):
        made, committed = ((folder / name).read_text() for folder in (tmp_path, HERE))
        assert _unversioned(made) == _unversioned(committed), "run python -m layoutopt.side.generate"


def _unversioned(code: str) -> str:
    """Without the compiler's version, which differs between machines."""
    code = re.sub(r"# Protobuf Python Version: .*", "", code)
    return re.sub(r"Domain\.PUBLIC,\s*\d+,\s*\d+,\s*\d+,", "", code)


def test_a_task_is_the_same_on_the_wire() -> None:
    assert [f.name for f in PB.Task.DESCRIPTOR.fields] == [f.name for f in fields(Task)]


def test_what_the_code_was_generated_with_is_what_the_extra_asks_for() -> None:
    head = (Path(wire.__file__).parent / "side_pb2.py").read_text()
    (version,) = re.findall(r"# Protobuf Python Version: (.*)", head)
    asked = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f"protobuf>={version}," in asked


# ---- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=lambda t: f"{t.format} {t.tokens} {t.mode}")
def test_batches_cross_unchanged(task: Task) -> None:
    batch = FakeBackbone(task).batch(5, (3, 1 << 62, 0))
    data = PB.FromDevice(step=PB.Step(step=5, rows=encode_rows(batch))).SerializeToString()
    kind, message = decode(data, "FromDevice", wire.batch_limit(task))
    assert kind == "step"
    got = read_rows(task, message.step, message.rows)
    assert (got.step, got.samples) == (batch.step, batch.samples)
    for (words, scales), (w, s) in zip(got.taps, batch.taps, strict=True):
        np.testing.assert_array_equal(words, w)
        np.testing.assert_array_equal(scales, s)
    assert (got.mask is None) == (batch.mask is None)
    if batch.mask is not None:
        np.testing.assert_array_equal(got.mask, batch.mask)
    np.testing.assert_array_equal(got.targets, batch.targets)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: f"{t.format} {t.tokens} {t.mode}")
def test_the_limit_of_a_batch_is_just_above_its_size(task: Task) -> None:
    batch = FakeBackbone(task).batch(task.steps - 1, tuple(range((1 << 63) - 4, 1 << 63)))
    data = PB.FromDevice(step=PB.Step(step=task.steps - 1, rows=encode_rows(batch))).SerializeToString()
    assert len(data) <= wire.batch_limit(task) < len(data) + 32 * (8 + 3 * len(task.taps)) + 1


@given(
    st.builds(
        small_task,
        width=st.integers(1, 4096),
        rank=st.integers(1, 64),
        classes=st.integers(2, 100),
        format=st.sampled_from(["int8", "int4:64", "fp4:32", "nf4:64", "float32"]),
        mode=st.sampled_from(["labels", "private"]),
        lr=st.floats(1e-9, 10),
        seed=st.integers(0, (1 << 63) - 1),
        pooler=st.booleans(),
        schedule=st.sampled_from(["linear", "cosine", "constant"]),
    )
)
def test_tasks_cross_unchanged(task: Task) -> None:
    assert wire.read_task(PB.Task.FromString(encode_task(task).SerializeToString())) == task


def test_heads_cross_unchanged() -> None:
    rng = np.random.default_rng(1)
    head = {"pooler.weight": rng.random((4, 4), np.float32), "pooler.bias": rng.random(4, np.float32)}
    got = read_head(wire.encode_tensors(head))
    assert got.keys() == head.keys()
    for name, value in head.items():
        np.testing.assert_array_equal(got[name], value)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_size_is_seen_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "messages", lambda: pytest.fail("decoded"))
    with pytest.raises(RefusedError, match="a message of 11 bytes, where at most 10 are expected"):
        decode(b"x" * 11, "FromDevice", 10)


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"\xff\xff\xff", "no message"), (b"", "says nothing"), (b"\xa2\x06\x01x", "says nothing")],
    ids=["noise", "empty", "a field of the future"],
)
def test_what_is_no_message_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        decode(data, "FromDevice", 100)


def _more_samples(rows: Any) -> None:
    rows.samples.extend([1000, 1001])


def _short_words(rows: Any) -> None:
    rows.taps[1].words = rows.taps[1].words[:-1]


def _long_scales(rows: Any) -> None:
    rows.taps[2].scales += b"\0\0\0\0"


def _bad_scale(rows: Any) -> None:
    rows.taps[0].scales = b"\0\0\x80\x7f" + rows.taps[0].scales[4:]


def _other_targets(rows: Any) -> None:
    rows.differences = b"\0" * 36


def _bad_label(rows: Any) -> None:
    rows.labels = np.array([0, 3, 1], "<i4").tobytes()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda rows: rows.ClearField("samples"), "expected 1 to 4 samples, got 0"),
        (_more_samples, "expected 1 to 4 samples, got 5"),
        (lambda rows: rows.samples.__setitem__(0, 8), "a sample comes twice"),
        (lambda rows: rows.samples.__setitem__(0, 1 << 63), "a sample's id is a number"),
        (lambda rows: rows.taps.__delitem__(0), "expected 3 taps, got 2"),
        (_short_words, "the words of tap two has 95 bytes, expected 96"),
        (_long_scales, "the scales of tap three has 52 bytes, expected 48"),
        (_bad_scale, "finite"),
        (lambda rows: setattr(rows, "mask", b"\1" * 24), "has no mask"),
        (lambda rows: rows.ClearField("labels"), "has labels, got None"),
        (_other_targets, "has labels, got differences"),
        (_bad_label, "labels are from 0 to 2"),
    ],
)
def test_wrong_batches_are_refused(spoil: Callable[[Any], None], says: str) -> None:
    rows = sent(small_task())
    spoil(rows)
    with pytest.raises(RefusedError, match=re.escape(says)):
        read_rows(small_task(), 2, rows)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"width": 0}, "width"),
        ({"format": "int3"}, "int3"),
        ({"mode": "secret"}, "mode"),
        ({"lr": float("nan")}, "lr"),
        ({"batch": 1 << 14, "width": 1 << 16, "format": "float32"}, "fewer samples"),
        ({"model": "x" * 300}, "names in a task"),
    ],
)
def test_wrong_tasks_are_refused(values: dict[str, Any], says: str) -> None:
    message = encode_task(small_task())
    for name, value in values.items():
        setattr(message, name, value)
    with pytest.raises(RefusedError, match=says):
        wire.read_task(message)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ({"shape": (2, 2), "data": b"\0" * 15}, "15 bytes are no float32"),
        ({"shape": (1 << 31, 1 << 31), "data": b"\0" * 4}, "are no float32"),
        ({"shape": (1, 1, 1), "data": b"\0" * 4}, "are no float32"),
        ({"shape": (1,), "data": b"\0\0\xc0\x7f"}, "not finite"),
        ({"name": "n" * 81, "shape": (1,), "data": b"\0" * 4}, "longer than 80"),
    ],
)
def test_wrong_heads_are_refused(tensor: dict[str, Any], says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        read_head([PB.Tensor(**{"name": "pooler.bias", **tensor})])
    with pytest.raises(RefusedError, match="at most 16"):
        read_head([PB.Tensor(name=str(i)) for i in range(17)])


@pytest.mark.parametrize(
    ("first", "orders", "says"),
    [
        (0, [], "0 orders"),
        (0, [[1]] * 6, "where 1 to 5 are expected"),
        (23, [[1], [2]], "a step from 0 to 23"),
        (1, [[1, 2, 3, 4, 5]], "expected 1 to 4 samples"),
        (1, [[]], "expected 1 to 4 samples"),
        (1, [[2, 2]], "a sample comes twice"),
    ],
)
def test_wrong_orders_are_refused(first: int, orders: list[list[int]], says: str) -> None:
    message = PB.TrainFromCache(first_step=first, orders=[PB.Order(samples=o) for o in orders])
    with pytest.raises(RefusedError, match=says):
        read_orders(small_task(), message, 5)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(LayoutOptError, match=re.escape("side-tuning needs google: pip install 'layoutopt[side]'")):
        wire.messages()


# ---- the order of samples -------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 2**63 - 1), st.binary(max_size=40))
def test_every_epoch_has_every_sample_once(samples: int, batch: int, seed: int, secret: bytes) -> None:
    sampling = Sampling(samples, batch, seed, secret)
    for epoch in (0, 3, 1):
        steps = range(epoch * sampling.steps_per_epoch, (epoch + 1) * sampling.steps_per_epoch)
        indices = [int(i) for step in steps for i in sampling.indices(step)]
        assert sorted(indices) == list(range(samples))
        assert all(sampling.epoch(step) == epoch for step in steps)
        numbers = [n for step in steps for n in sampling.numbers(step)]
        assert sampling.of_numbers(numbers).tolist() == indices


def test_a_restarted_device_goes_on_in_the_same_order() -> None:
    first, second = (Sampling(50, 8, 3, b"secret") for _ in range(2))
    for step in (20, 3, 11):
        assert second.numbers(step) == first.numbers(step)
        assert second.indices(step).tolist() == first.indices(step).tolist()


def test_order_and_numbers_hang_on_the_secret() -> None:
    """The server knows the seed: by it alone it could tell which line of a file a sample is."""
    one, other = (Sampling(200, 200, 3, secret) for secret in (b"one", b"other"))
    assert one.indices(0).tolist() != other.indices(0).tolist()
    assert one.numbers(0) != tuple(one.indices(0).tolist())
    shown = [dict(zip(s.numbers(0), s.indices(0).tolist(), strict=True)) for s in (one, other)]
    same = sum(shown[0][n] == shown[1][n] for n in shown[0])
    assert same < 20


def test_numbers_that_were_never_given_out_are_refused() -> None:
    with pytest.raises(LayoutOptError, match="does not have"):
        Sampling(5, 2, 0, b"").of_numbers([5])
    with pytest.raises(LayoutOptError, match="no samples"):
        Sampling(0, 2, 0, b"")

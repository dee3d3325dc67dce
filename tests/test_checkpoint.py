"""Initial values and safetensors files, torch-free."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layoutopt.checkpoint import initial_values, load_safetensors, save_safetensors
from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.graph import Tensor, TrainingGraph

st = pytest.importorskip("safetensors.numpy")


def graph(**more: Tensor) -> TrainingGraph:
    tensors = {
        "body.w": Tensor("body.w", (40, 30), role="parameter", init="normal:0.02"),
        "body.b": Tensor("body.b", (30,), role="parameter", init="zeros"),
        "head.w": Tensor("head.w", (2, 30), role="parameter", init="constant:0.5"),
        "norm": Tensor("norm", (30,), role="parameter", init="ones"),
        "body.w.m": Tensor("body.w.m", (40, 30), role="state", init="zeros", of="body.w"),
    }
    return TrainingGraph("small", tensors | more, (), ())


def weights(g: TrainingGraph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {t.name: rng.normal(size=t.shape).astype(np.float32) for t in g.by_role("parameter")}


def test_initial_values_follow_the_rules() -> None:
    values = initial_values(graph(), 3)
    assert {n: v.dtype for n, v in values.items()} == dict.fromkeys(values, np.dtype(np.float32))
    assert values["body.w"].std() == pytest.approx(0.02, rel=0.1)
    assert abs(values["body.w"].mean()) < 0.002
    assert not values["body.b"].any()
    assert not values["body.w.m"].any()
    assert (values["norm"] == 1).all()
    assert (values["head.w"] == 0.5).all()


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    first = initial_values(graph(), 3)
    again = initial_values(graph(aaa=Tensor("aaa", (7,), role="parameter", init="normal:1")), 3)
    np.testing.assert_array_equal(first["body.w"], again["body.w"])
    assert (first["body.w"] != initial_values(graph(), 4)["body.w"]).any()
    same_rule = graph(twin=Tensor("twin", (40, 30), role="parameter", init="normal:0.02"))
    assert (initial_values(same_rule, 3)["twin"] != first["body.w"]).any()


def test_what_is_given_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = initial_values(graph(), 3)
    rest = initial_values(graph(), 3, given={"body.w": None, "norm": None})
    assert set(rest) == set(whole) - {"body.w", "norm"}
    for name, value in rest.items():
        np.testing.assert_array_equal(value, whole[name])

    def drawn(*_: object) -> None:
        raise AssertionError("a random number is drawn where nothing asks for one")

    monkeypatch.setattr(np.random, "default_rng", drawn)
    assert set(initial_values(graph(), 3, given={"body.w"})) == set(whole) - {"body.w"}


def test_state_starts_at_zero_and_integers_stay_integers() -> None:
    more = {
        "count": Tensor("count", (2,), "int32", role="state", init="constant:3"),
        "plain": Tensor("plain", (3,), role="state"),
        "scale": Tensor("scale", (2,), role="parameter", init="constant:1e-05"),
    }
    values = initial_values(graph(**more))
    assert values["count"].dtype == np.int32
    assert values["count"].tolist() == [3, 3]
    assert values["plain"].tolist() == [0, 0, 0]
    assert values["scale"].tolist() == [np.float32(1e-5)] * 2


@pytest.mark.parametrize("init", ["uniform", "uniform:1", "normal:", "normal:wide", "constant", "zeros:1"])
def test_unknown_rules_are_refused(init: str) -> None:
    says = f"'odd' starts as '{init}': expected zeros, ones, constant:VALUE or normal:STD"
    with pytest.raises(GraphError, match=says):
        initial_values(graph(odd=Tensor("odd", (2,), role="parameter", init=init)), 0)


def test_a_parameter_without_a_rule_needs_a_value() -> None:
    odd = graph(odd=Tensor("odd", (2,), role="parameter"))
    with pytest.raises(GraphError, match=r"parameter 'odd' \[2\] has no starting value: give it one"):
        initial_values(odd)
    assert "odd" not in initial_values(odd, given={"odd"})


def test_round_trip(tmp_path: Path) -> None:
    g, file = graph(), tmp_path / "a.safetensors"
    values = weights(g)
    save_safetensors(file, values, {"format": "pt"})
    back = load_safetensors(g, file)
    assert back.keys() == values.keys()
    for name in values:
        np.testing.assert_array_equal(back[name], values[name])
    from safetensors import safe_open

    with safe_open(str(file), "numpy") as handle:
        assert handle.metadata() == {"format": "pt"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_state_is_loaded_by_role(tmp_path: Path) -> None:
    g, file = graph(), tmp_path / "s.safetensors"
    save_safetensors(file, {"body.w.m": np.ones((40, 30), np.float32)})
    assert list(load_safetensors(g, file, role="state")) == ["body.w.m"]


def test_renamed_half_precision_encoder_without_a_head(tmp_path: Path) -> None:
    g, file = graph(), tmp_path / "encoder.safetensors"
    values = weights(g)
    inside = {n.removeprefix("body."): v.astype(np.float16) for n, v in values.items() if n.startswith("body.")}
    st.save_file(inside | {"position_ids": np.arange(9)}, file)
    got = load_safetensors(g, file, rename=lambda n: "body." + n, allow_missing=("head.", "norm"))
    assert sorted(got) == ["body.b", "body.w"]
    assert got["body.w"].dtype == np.float32
    np.testing.assert_allclose(got["body.w"], values["body.w"], rtol=1e-3, atol=1e-6)


def test_bad_files_name_the_tensor(tmp_path: Path) -> None:
    g, file = graph(), tmp_path / "bad.safetensors"
    good = weights(g)

    def refused(values: dict[str, np.ndarray], match: str) -> None:
        st.save_file(values, file)
        with pytest.raises(GraphError, match=match):
            load_safetensors(g, file)

    poisoned = good | {"norm": good["norm"].copy()}
    poisoned["norm"][4] = np.nan
    refused(poisoned, "norm holds 1 NaN")
    poisoned["norm"][[4, 5]] = np.inf
    refused(poisoned, "norm holds 2 NaN or infinite")
    refused(good | {"body.b": np.zeros(29, np.float32)}, r"body\.b has shape \(29,\), expected \(30,\)")
    refused({k: v for k, v in good.items() if k != "head.w"}, r"lacks head\.w \(1 such\)")
    refused(good | {"extra.w": np.zeros(2, np.float32)}, r"holds extra\.w \(1 such\), which small does not have")
    refused(good | {"norm": np.arange(30)}, "lacks norm")


def test_extra_tensors_may_be_allowed(tmp_path: Path) -> None:
    g, file = graph(), tmp_path / "more.safetensors"
    st.save_file(weights(g) | {"pooler.w": np.zeros(2, np.float32)}, file)
    assert "pooler.w" not in load_safetensors(g, file, allow_extra=("pooler.",))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="no checkpoint at"):
        load_safetensors(graph(), tmp_path / "absent.safetensors")
    (tmp_path / "text.safetensors").write_text("hello, this is no checkpoint at all")
    with pytest.raises(GraphError, match="not a safetensors file"):
        load_safetensors(graph(), tmp_path / "text.safetensors")
    with pytest.raises(LayoutOptError, match="cannot write"):
        save_safetensors(tmp_path / "no" / "folder.safetensors", weights(graph()))
    save_safetensors(tmp_path / "cut.safetensors", weights(graph()))
    whole = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(GraphError, match="damaged"):
        load_safetensors(graph(), tmp_path / "cut.safetensors")

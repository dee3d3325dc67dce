"""Plan files: what is written is read back; what is missing, damaged or of another time is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layoutopt import plan as plans
from layoutopt.errors import LayoutError, LayoutOptError
from layoutopt.layout import Layout
from layoutopt.plan import (
    PLAN_VERSION,
    ArenaSlot,
    ItemCost,
    LayoutDoc,
    Plan,
    PlannedOp,
    PlannedRelayout,
    SolverReport,
)


def small_plan() -> Plan:
    layouts = (Layout.row_major((6, 9)), Layout.r_tile((6, 9), 4, 4))
    return Plan(
        PLAN_VERSION,
        "g",
        "a" * 64,
        "device",
        "b" * 64,
        {"x": tuple(LayoutDoc.of(x) for x in layouts)},
        (PlannedOp("op", "family.name(v=4)", (1,), ItemCost(12, 3, 4, 5, True)),),
        (PlannedRelayout("x", 1, "op", "pointwise.fat(v=1)", ItemCost(7), 432),),
        (("relayout", 0), ("op", 0)),
        1024,
        (ArenaSlot("x#0", 0, 216, 0, 1), ArenaSlot("x#1", 256, 384, 0, 1)),
        SolverReport("ilp", "highs", "OPTIMAL", 19, 19, 0.0, 0.1, 1, 2, 1),
    )


def test_round_trip(tmp_path: Path) -> None:
    plan = small_plan()
    plans.save(plan, tmp_path / "plan.json")
    assert plans.load(tmp_path / "plan.json") == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_the_file_is_for_people_too(tmp_path: Path) -> None:
    plans.save(small_plan(), tmp_path / "plan.json")
    assert '"strategy": "ilp"' in (tmp_path / "plan.json").read_text()


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([(1, 1), (2, 4), (4, 4)]), st.booleans())
def test_layouts_survive(rows: int, columns: int, tile: tuple[int, int], image: bool) -> None:
    layout = Layout.r_tile_image((rows, columns), tile[0]) if image else Layout.r_tile((rows, columns), *tile)
    assert LayoutDoc.of(layout).layout() == layout


def test_nonsense_layout_is_refused() -> None:
    doc = LayoutDoc((6, 8), ((0, 6, 8, 0),), (48,), (0,))
    with pytest.raises(LayoutError, match="axis 1"):
        doc.layout()


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LayoutOptError, match=r"no plan at .*absent\.json.*layoutopt plan"):
        plans.load(tmp_path / "absent.json")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\x00", b'{"version": 2}', b'{"version": "one"}'])
def test_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(damage)
    with pytest.raises(LayoutOptError, match=r"bad\.json is no plan or is damaged"):
        plans.load(tmp_path / "bad.json")


def test_cut_file_is_damaged(tmp_path: Path) -> None:
    data = plans.encode(small_plan())
    (tmp_path / "cut.json").write_bytes(data[: len(data) // 2])
    with pytest.raises(LayoutOptError, match="damaged"):
        plans.load(tmp_path / "cut.json")


def test_other_version_is_named() -> None:
    data = msgspec.json.encode(msgspec.structs.replace(small_plan(), version=PLAN_VERSION + 1))
    with pytest.raises(LayoutOptError, match=f"plan format {PLAN_VERSION + 1}.*reads {PLAN_VERSION}"):
        plans.decode(data)

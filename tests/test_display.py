"""Rich display in notebooks: well-formed, escaped, short, and true to the object; ``repr`` stays what it was."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from xml.etree import ElementTree as ET

import msgspec
import pytest
from hypothesis import given, settings

from costmodel import device
from costmodel.device import DeviceModel, Fact
from layoutopt.display_layout import LINE_COLOURS, MOST_COLUMNS, MOST_ROWS, kind_of, layout_svg
from layoutopt.display_parts import bytes_text, html, table, time_text
from layoutopt.graph import TrainingGraph
from layoutopt.layout import Layout
from layoutopt.passes import run_passes
from layoutopt.plan import LayoutDoc, Plan, with_report
from simulator.simulate import CacheReport, simulate
from tests.graphs import linear_step
from tests.layout_cases import layouts
from tests.plans import naive_plan, r_tile

SVG = "{http://www.w3.org/2000/svg}"
EVIL = '<script>alert("x")</script>&\x07'
MARKUP = {"div", "table", "caption", "b", "thead", "tbody", "tr", "th", "td"}
"""All that HTML of ours is made of: nothing that GitHub takes out."""


def rows_of(text: str) -> dict[str, list[list[str]]]:
    """Cells by caption, the head left out, of what is well-formed."""
    root = ET.fromstring(text)
    assert {one.tag for one in root.iter()} <= MARKUP
    out = {}
    for one in root.iter("table"):
        body = one.find("tbody")
        assert body is not None
        rows = [["".join(cell.itertext()) for cell in row] for row in body]
        head = one.find("thead")
        assert all(len(row) == (len(head[0]) if head is not None else 2) for row in rows)
        out["".join(one[0].itertext())] = rows
    return out


@lru_cache(maxsize=1)
def made() -> tuple[TrainingGraph, Plan, DeviceModel, CacheReport]:
    graph, model = run_passes(linear_step())[0], device.load("generic-cpu")
    plan = naive_plan(graph, model.limits, r_tile)
    return graph, plan, model, simulate(graph, plan, model)


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_numbers_have_the_unit_that_suits_them() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3 MiB", "5 GiB"]
    assert [time_text(n) for n in (7, 1500, 2.5e6, 3e9)] == ["7 ns", "1.5 µs", "2.5 ms", "3 s"]


def test_a_table_escapes_all_that_it_holds() -> None:
    text = html(table(EVIL, (EVIL,), [(EVIL,)]))
    assert "<script" not in text
    assert "\x07" not in text
    shown = EVIL.replace("\x07", "\ufffd")
    assert rows_of(text) == {shown: [[shown]]}


def test_a_graph_counts_its_ops_by_kind_and_phase() -> None:
    graph = made()[0]
    tables = rows_of(graph._repr_html_())
    ops = tables[f"{graph.name}: {len(graph.ops)} ops"]
    phases = list(dict.fromkeys(op.phase for op in graph.ops))
    for kind, *numbers, total in ops[:-1]:
        assert [int(n or 0) for n in numbers] == [
            sum(op.kind == kind and op.phase == phase for op in graph.ops) for phase in phases
        ]
        assert int(total) == sum(op.kind == kind for op in graph.ops)
    assert ops[-1] == ["all", *(str(sum(op.phase == p for op in graph.ops)) for p in phases), str(len(graph.ops))]
    owned, largest = (rows for name, rows in list(tables.items())[1:])
    assert sum(int(row[1]) for row in owned) == len(graph.storages)
    tensors = [graph.tensors[name] for name in graph.storages]
    assert largest[0][-1] == bytes_text(max(t.size_elems * t.item_bytes for t in tensors))
    assert repr(graph) == f"TrainingGraph({graph.name!r}, {len(graph.ops)} ops, {len(graph.tensors)} tensors)"


def test_a_graph_s_names_are_escaped() -> None:
    graph = made()[0]
    text = graph.with_ops(graph.ops, name=EVIL)._repr_html_()
    assert "<script" not in text
    assert rows_of(text)


def test_a_plan_says_what_was_found_and_counts_its_layouts() -> None:
    _, plan, _, _ = made()
    tables = rows_of(plan._repr_html_())
    facts = dict(tables[f"Plan of {plan.graph_name} ({plan.solver.strategy})"])
    assert facts["status"].startswith(f"{plan.solver.status}, ")
    assert facts["gap"] == "not known"
    proven = with_report(plan, bound_ns=7, gap=0.5)
    assert "50.00% (bound 7 ns)" in proven._repr_html_()
    assert facts["arena"] == bytes_text(plan.arena_bytes)
    assert facts["relayouts"].startswith(f"{len(plan.relayouts)}, ")
    assert facts["predicted kernels"].startswith(time_text(plan.solver.objective_ns))
    layouts = tables["Layouts"]
    assert sum(int(row[1]) for row in layouts) == len(plan.layouts)
    assert sum(int(row[2]) for row in layouts) == sum(len(docs) - 1 for docs in plan.layouts.values())
    dearest = tables[f"Dearest of {len(plan.ops) + len(plan.relayouts)} steps"]
    most = max([*(o.cost.total_ns for o in plan.ops), *(r.cost.total_ns for r in plan.relayouts)])
    assert dearest[0][2] == time_text(most)
    assert repr(plan).startswith("Plan(version=")


def test_a_plan_s_names_are_escaped() -> None:
    _, plan, _, _ = made()
    evil = msgspec.structs.replace(plan, graph_name=EVIL, device_name=EVIL, rewrites=(EVIL,))
    text = evil._repr_html_()
    assert "<script" not in text
    assert rows_of(text)


def test_a_report_has_the_counts_of_every_level_and_phase() -> None:
    report = made()[3]
    tables = rows_of(report._repr_html_())
    title, phases, ops, tensors = tables
    assert [row[0] for row in tables[title]] == list(report.levels)
    for row, hits, misses in zip(tables[title], report.total.hits, report.total.misses, strict=True):
        assert row[1:3] == [f"{hits:,.0f}", f"{misses:,.0f}"]
    assert [row[0] for row in tables[phases]] == [*report.by_phase, "step"]
    for name, *cells in tables[phases][:-1]:
        assert cells[1:-1] == [f"{n:,.0f}" for n in report.by_phase[name].misses]
    worst = max(report.by_step.values(), key=lambda c: c.misses[-1])
    assert tables[ops][0][-2] == f"{worst.misses[-1]:,.0f}"
    assert all(row[0] in report.by_tensor for row in tables[tensors])
    assert repr(report).startswith("CacheReport(levels=")


def test_a_report_s_names_are_escaped() -> None:
    report = made()[3]
    text = replace(report, device=EVIL, by_tensor={EVIL: report.total})._repr_html_()
    assert "<script" not in text
    assert rows_of(text)


@pytest.mark.parametrize("name", device.list_builtin())
def test_a_device_model_lists_its_caches_and_facts(name: str) -> None:
    model = device.load(name)
    tables = rows_of(model._repr_html_())
    about = dict(tables[f"Device model of {model.name}"])
    assert about["origin"].startswith(model.origin)
    assert ("kernels measured" in about) == bool(model.measurements)
    assert [row[0] for row in tables["Caches"]] == [cache.name for cache in model.caches]
    assert [row[0] for row in tables["Facts"]] == list(model.facts)
    assert repr(model).startswith("DeviceModel(name=")


def test_a_device_model_s_words_are_escaped() -> None:
    model = made()[2]
    text = replace(model, name=EVIL, facts={"launch_s": Fact(1e-6, EVIL, "low")})._repr_html_()
    assert "<script" not in text
    assert rows_of(text)["Facts"][0][1] == "1 µs"


# ---- pictures of layouts --------------------------------------------------------------------------------------------


def picture(layout: Layout, line_elems: int = 16) -> ET.Element:
    text = layout_svg(layout, line_elems)
    assert "style" not in text
    assert "script" not in text
    return ET.fromstring(text)


def cells(root: ET.Element) -> list[tuple[str, float, float, str]]:
    """Offset, left, top and colour of every cell, in order."""
    found = []
    children = list(root)
    for box, text in pairwise(children):
        if box.tag == f"{SVG}rect" and box.get("stroke") and text.tag == f"{SVG}text" and (text.text or "").isdigit():
            found.append((text.text or "", float(box.get("x", 0)), float(box.get("y", 0)), box.get("fill", "")))
    return found


def frames(root: ET.Element) -> list[ET.Element]:
    return [one for one in root.iter(f"{SVG}rect") if one.get("fill") == "none"]


def test_a_tile_is_drawn_with_its_offsets_frames_and_lines() -> None:
    layout = Layout.r_tile((6, 8), 2, 4)
    root = picture(layout, line_elems=8)
    drawn = cells(root)
    assert [int(offset) for offset, *_ in drawn] == layout.offsets().ravel().tolist()
    assert len(frames(root)) == 3 * 2
    for offset, _, _, colour in drawn:
        line = int(offset) // 8
        assert (colour == LINE_COLOURS[line]) if line < len(LINE_COLOURS) else (colour not in LINE_COLOURS)
    # The tile of eight elements is one line: its frame holds cells of one colour.
    first = frames(root)[0]
    left, top = float(first.get("x", 0)), float(first.get("y", 0))
    right, bottom = left + float(first.get("width", 0)), top + float(first.get("height", 0))
    assert [int(o) for o, x, y, _ in drawn if left <= x < right and top <= y < bottom] == list(range(8))


def test_padding_is_grey_and_row_major_has_no_tiles() -> None:
    layout = Layout.row_major((2, 5), pad={1: 4})
    drawn = cells(picture(layout))
    assert len(drawn) == 2 * 8
    assert {colour for offset, _, _, colour in drawn if int(offset) % 8 >= 5} == {"#eaeef2"}
    assert not frames(picture(Layout.row_major((6, 8))))


def test_a_large_layout_is_abridged_and_cheap() -> None:
    layout = Layout.r_tile((50_000, 40_000), 4, 4)
    text = layout_svg(layout)
    assert len(text) < 60_000
    drawn = cells(ET.fromstring(text))
    assert len(drawn) == (MOST_ROWS - 1) * (MOST_COLUMNS - 1)
    assert drawn[-1][0] == str(50_000 * 40_000 - 1)
    assert "…" in text


def test_of_more_axes_the_last_two_are_drawn() -> None:
    layout = Layout.row_major((3, 4, 5), order=(2, 0, 1))
    assert [int(offset) for offset, *_ in cells(picture(layout))] == layout.offsets()[0].ravel().tolist()
    assert "at the origin of the rest" in layout_svg(layout)


@pytest.mark.parametrize("layout", [Layout.row_major(()), Layout.row_major((7,)), Layout.row_major((1, 1))])
def test_small_ranks_are_drawn(layout: Layout) -> None:
    assert [int(offset) for offset, *_ in cells(picture(layout))] == layout.linear_offsets().ravel().tolist()


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_every_layout_is_drawn_with_its_own_offsets(layout: Layout) -> None:
    drawn = [int(offset) for offset, *_ in cells(picture(layout))]
    if max(layout.padded_shape[-2:], default=1) <= MOST_ROWS:
        assert drawn == layout.linear_offsets(padded=True)[(0,) * max(layout.rank - 2, 0)].ravel().tolist()
    assert len(drawn) <= MOST_ROWS * MOST_COLUMNS
    assert kind_of(layout)


def test_kinds_are_named() -> None:
    named = {
        "row-major": Layout.row_major((6, 8)),
        "tile 2×4": Layout.r_tile((6, 8), 2, 4),
        "tile ·×4": Layout.tiled((6, 8), {1: 4}, outer=(1, 0)),
        "tile 3×·": Layout.tiled((5, 6, 8), {1: 3}),
        "other order": Layout.row_major((6, 8), order=(1, 0)),
        "padded": Layout.row_major((6, 13), pad={1: 8}),
        "image": Layout.r_tile_image((8, 8), 4),
    }
    assert {kind_of(layout): layout for layout in named.values()} == named


def test_a_layout_offers_its_picture_and_keeps_its_repr() -> None:
    layout = Layout.r_tile((6, 8), 2, 4)
    assert set(layout._repr_mimebundle_()) == {"image/svg+xml"}
    assert ET.fromstring(layout._repr_mimebundle_()["image/svg+xml"]).tag == f"{SVG}svg"
    assert re.match(r"Layout\(shape=\(6, 8\), modes=\(Mode", repr(layout))
    assert LayoutDoc.of(layout)._repr_mimebundle_() == layout._repr_mimebundle_()

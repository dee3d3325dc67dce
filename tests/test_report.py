"""`layoutopt report`: what it says is what the plan holds, names cannot leave their places, bad input is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from costmodel import device as device_models
from kernels.runtime import Runtime, devices
from layoutopt import graphfile
from layoutopt import plan as plans
from layoutopt.cli import main
from layoutopt.graph import TrainingGraph
from layoutopt.layout import Layout
from layoutopt.memory import Buffer, fullest_bytes
from layoutopt.plan import ItemCost, Plan
from layoutopt.report.layouts import pattern, sample
from layoutopt.report.memory import fullest_of_runs, held_buffers, peak_of
from layoutopt.report.page import page
from layoutopt.report.shapes import Section, Table
from layoutopt.report.steps import steps_of
from layoutopt.rewrites import planned_graph
from layoutopt.stepcost import predict_step
from tests.face import refused
from tests.reports import HOSTILE, Parsed, parsed, planned_files

GENERIC = device_models.load("generic-cpu")
SECTIONS = ("summary", "strategies", "time", "misses", "memory", "layouts", "proof", "agreement")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingGraph, Plan]:
    return planned_files(tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def shown(made: tuple[Path, TrainingGraph, Plan]) -> Parsed:
    file = made[0].with_name("report.html")
    words = ["report", made[0], "-o", file, "--strategies", "ilp,rowmajor", "--device-model", "generic-cpu"]
    assert main([str(w) for w in words]) == 0
    return parsed(file)


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def column(table: list[list[str]], name: str) -> list[float]:
    return [number(row[table[0].index(name)]) for row in table[1:]]


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_every_section_is_there_and_linked(shown: Parsed) -> None:
    ids = [attrs["id"] for _, attrs in shown.tags if "id" in attrs]
    links = [attrs["href"] for tag, attrs in shown.tags if tag == "a"]
    assert links == ["#content", *(f"#{key}" for key in SECTIONS)]
    assert {link[1:] for link in links} <= set(ids)
    assert len(ids) == len(set(ids)), "identifiers repeat"


def test_times_add_up_to_the_plan(shown: Parsed, made: tuple[Path, TrainingGraph, Plan]) -> None:
    _, _, plan = made
    costs = [o.cost for o in plan.ops] + [r.cost for r in plan.relayouts]
    whole = sum(c.total_ns for c in costs) * 1e-6
    for caption in ("Time by phase", "Time by kind of operation", "Time by block"):
        table = shown.tables[caption]
        assert sum(column(table, "ms")) == pytest.approx(whole, abs=6e-4 * len(table))
        assert sum(column(table, "steps")) == len(plan.steps)
        assert table[0][-1] == "modelled ms", "of a device that was never measured"


def test_strategies_are_the_plans(shown: Parsed, made: tuple[Path, TrainingGraph, Plan]) -> None:
    _, graph, plan = made
    table = shown.tables["Strategies; times in ms a step"]
    assert [row[0] for row in table[1:]] == ["ilp (this plan)", "rowmajor"]
    assert column(table, "predicted ms")[0] == pytest.approx(predict_step(plan, graph, GENERIC).step_s * 1e3, abs=6e-4)
    assert "measured ms" not in table[0]
    assert "Nothing was measured for this report" in shown.text


def test_the_peak_is_what_is_alive(shown: Parsed, made: tuple[Path, TrainingGraph, Plan]) -> None:
    _, graph, plan = made
    buffers = [Buffer(s.name, s.size_bytes, s.first, s.last) for s in plan.arena]
    step, peak = peak_of(held_buffers(plan, planned_graph(plan, graph)))
    assert peak == fullest_bytes(buffers)
    table = shown.tables[f"Alive at the peak, by role (step {step + 1})"]
    alive = [b for b in buffers if b.first <= step <= b.last]
    assert sum(column(table, "buffers")) == len(alive)
    blocks = shown.tables["Alive at the peak, by the block that first touches it"]
    assert sum(column(blocks, "buffers")) == len(alive)
    assert sum(column(table, "% of peak")) == pytest.approx(100, abs=0.05 * len(table))


def test_long_steps_are_drawn_by_their_fullest_places() -> None:
    total = np.random.default_rng(3).random(2802)
    places = fullest_of_runs(total, 500)
    assert len(places) == 467
    assert int(total.argmax()) in places
    assert places == sorted(set(places))
    assert fullest_of_runs(total[:77], 500) == list(range(77))


def test_layouts_and_relayouts_are_the_plans(shown: Parsed, made: tuple[Path, TrainingGraph, Plan]) -> None:
    _, _, plan = made
    docs = [doc.layout() for own in plan.layouts.values() for doc in own]
    table = shown.tables["Distinct layouts, those of most bytes first"]
    assert {row[0] for row in table[1:]} == {pattern(x) for x in docs}
    assert sum(column(table, "layouts")) == len(docs)
    assert sum(column(shown.tables["Layouts by block"], "layouts")) == len(docs)
    assert len(shown.tables["All relayouts that are left"]) - 1 == len(plan.relayouts)


def test_misses_add_up_to_the_step(shown: Parsed) -> None:
    table = shown.tables[f"Accesses and misses by phase, {GENERIC.name}"]
    assert [row[0] for row in table[1:]] == ["forward", "loss", "backward", "update"]
    assert sum(column(table, "% of misses")) == pytest.approx(100, abs=0.3)
    assert "modelled from public facts" in shown.text


def test_the_proof_is_the_plans_and_its_reductions_only_take_away(
    shown: Parsed, made: tuple[Path, TrainingGraph, Plan]
) -> None:
    _, _, plan = made
    report = dict(shown.tables["The solver's report"])
    assert report["status"] == "OPTIMAL"
    assert number(report["choices of kernels and layouts"]) == plan.solver.choices
    left = shown.tables["Exact reductions before the search: what is left"]
    assert column(left, "choices")[0] == plan.solver.choices
    for name in ("choices", "layouts", "possible relayouts"):
        counts = column(left, name)
        assert counts == sorted(counts, reverse=True)


def test_where_costs_come_from(made: tuple[Path, TrainingGraph, Plan]) -> None:
    _, graph, plan = made
    timed = msgspec.structs.replace(plan.ops[0], cost=ItemCost(5, measured=True))
    steps = steps_of(msgspec.structs.replace(plan, ops=(timed, *plan.ops[1:])), graph, GENERIC)
    assert [s.label for s in steps if s.source == "measured"] == [plan.ops[0].op]
    fit = device_models.FamilyFit({"flops": 1.0}, 9, 0.1)
    fitted = steps_of(plan, graph, replace(GENERIC, constants={"contraction": fit}))
    assert {s.source for s in fitted if s.kind == "contraction"} == {"fitted"}
    assert {s.source for s in fitted if s.kind == "reduce"} == {"modelled"}


def test_json_says_what_was_written(made: tuple[Path, TrainingGraph, Plan], capsys) -> None:
    file = made[0].with_name("plain.html")
    words = ["report", made[0], "-o", file, "--strategies", "none", "--no-simulate", "--json"]
    assert main([str(w) for w in (*words, "--device-model", "generic-cpu")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["bytes"] == file.stat().st_size
    assert [row["strategy"] for row in printed["strategies"]] == ["ilp"]
    assert printed["proof"]["reductions"][0]["choices"] == made[2].solver.choices
    assert printed["cost_s_by_source"]["measured"] == 0
    assert "Nothing was simulated" in parsed(file).text


# ---- names ----------------------------------------------------------------------------------------------------------


def test_names_stay_text(shown: Parsed) -> None:
    tags = {tag for tag, _ in shown.tags}
    assert not tags & {"script", "img", "iframe", "object", "b", "template"}
    assert sum(tag == "style" for tag, _ in shown.tags) == 1
    for tag, attrs in shown.tags:
        assert not [name for name in attrs if name.startswith("on")], tag
    for name in HOSTILE[:4]:
        assert name in shown.text
    assert "\x07" not in shown.text
    assert "reversed\ufffd bell" in shown.text


def test_a_page_needs_nothing_else(shown: Parsed) -> None:
    for tag, attrs in shown.tags:
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            value = attrs.get(name, "")
            assert not value or value.startswith(("#", "data:")), (tag, name, value[:60])
    policy = next(a["content"] for t, a in shown.tags if t == "meta" and "content-security-policy" in str(a).lower())
    assert policy.startswith("default-src 'none'")


def test_every_drawing_has_words_and_every_table_headers(shown: Parsed) -> None:
    drawings = [attrs for tag, attrs in shown.tags if tag == "svg"]
    ids = {attrs.get("id") for _, attrs in shown.tags}
    assert len(drawings) > 6
    for attrs in drawings:
        assert attrs["role"] == "img"
        assert set(attrs["aria-labelledby"].split()) <= ids
    assert sum(tag == "caption" for tag, _ in shown.tags) == sum(tag == "table" for tag, _ in shown.tags)
    for caption, rows in shown.tables.items():
        assert len({len(row) for row in rows}) == 1, caption


def test_colours_of_drawings_are_the_pages() -> None:
    from layoutopt.report import charts, svg

    drawn = charts.bars("k", "t", "d", ["a"], {"one": [1.0]}, "ms")
    assert "var(--ink)" in drawn
    assert "var(--series-0)" in drawn
    assert not re.search(f"{svg.INK}|{svg.PALETTE[0]}", drawn)
    assert "<style" not in drawn


def test_the_template_escapes_what_it_is_given() -> None:
    text = page("<i>", [Section("a", "b", ("<u>",), (), (Table("<s>", ("<q>", "x"), (("<p>", "1"),)),))])
    for tag in ("<i>", "<u>", "<s>", "<q>"):
        assert tag not in text


# ---- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout.row_major((6, 8)), "row-major"),
        (Layout.row_major((6, 8), (1, 0)), "columns, rows"),
        (Layout.r_tile((12, 16), 4, 8), "rows, columns, 4 rows, 8 columns"),
        (Layout.r_tile((12, 16), 4, 8, inner="col", outer="col"), "columns, rows, 8 columns, 4 rows"),
        (Layout.row_major((3, 4, 5), (1, 0, 2)), "rows, axis 0, columns"),
        (Layout.r_tile((6, 9), 2, 4), "rows, columns, 2 rows, 4 columns, padded"),
    ],
)
def test_patterns(layout: Layout, name: str) -> None:
    assert pattern(layout) == name
    small, _, _ = sample(layout) or (None, 0, 0)
    assert small is not None
    if layout.rank == 2 and "padded" not in name:
        assert pattern(small) == name
        assert small.is_compact()


def test_vectors_and_images_are_not_drawn() -> None:
    assert sample(Layout.row_major((7,))) is None
    image = Layout.r_tile_image((8, 8), 4)
    assert sample(image) is None
    assert pattern(image).startswith("image: rows of rows; texels of columns, 4 rows")


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused(made: tuple[Path, TrainingGraph, Plan], tmp_path: Path, capsys) -> None:
    file, _, _ = made
    assert "no plan at" in refused(capsys, "report", tmp_path / "none.json", "-o", tmp_path / "r.html")
    assert "cannot write" in refused(capsys, "report", file, "-o", tmp_path / "none" / "r.html")
    wanted = ("--device-model", "generic-cpu", "-o", tmp_path / "r.html")
    assert "nonsense" in refused(capsys, "report", file, "--strategies", "nonsense", *wanted)
    assert "no profile at" in refused(capsys, "report", file, "--profile", tmp_path / "p.json", *wanted)
    (tmp_path / "p.json").write_text("{}")
    assert "is no profile" in refused(capsys, "report", file, "--profile", tmp_path / "p.json", *wanted)
    assert "--profile" in refused(capsys, "report", file, "--measure", "--profile", tmp_path / "p.json", *wanted)
    facts = {"device": "d", "step_s": 1, "kernels_s": 1, "gap_s": 0, "predicted_s": 1, "steps_s": [1]}
    (tmp_path / "p.json").write_text(json.dumps(facts | {"launches": [{"label": "another", "time_s": 1}]}))
    assert "not of this plan" in refused(capsys, "report", file, "--profile", tmp_path / "p.json", *wanted)
    assert not (tmp_path / "r.html").exists()


def test_a_plan_of_another_graph_is_refused(made: tuple[Path, TrainingGraph, Plan], tmp_path: Path, capsys) -> None:
    from layoutopt.models import shipped

    graphfile.save(shipped("vit-digits"), tmp_path / "other.graph")
    words = ("report", made[0], "--graph", tmp_path / "other.graph", "--device-model", "generic-cpu")
    refused(capsys, *words, "-o", tmp_path / "r.html")


# ---- measured -------------------------------------------------------------------------------------------------------


def test_measured_and_from_a_profile(device_index: int, tmp_path: Path, capsys) -> None:
    """On a device: the plan is run and profiled; the profile's own file says the same of the kernels."""
    device = devices()[device_index]
    runtime = Runtime(device)
    model = replace(GENERIC, name=device.name, limits=runtime.limits)
    device_models.save(model, tmp_path / "here.toml")
    file, _, _ = planned_files(tmp_path)
    own = ("--device", device_index, "--device-model", tmp_path / "here.toml")
    words = ("report", file, "-o", tmp_path / "a.html", "--strategies", "rowmajor", "--measure", "--rounds", 3)
    assert main([str(w) for w in (*words, "--no-simulate", *own)]) == 0
    table = parsed(tmp_path / "a.html").tables["Strategies; times in ms a step"]
    assert all(value > 0 for value in column(table, "measured ms"))
    capsys.readouterr()
    assert main([str(w) for w in ("profile", file, "--rounds", 2, "--json", *own)]) == 0
    (tmp_path / "profile.json").write_text(capsys.readouterr().out)
    words = ("report", file, "-o", tmp_path / "b.html", "--strategies", "none", "--no-simulate")
    assert main([str(w) for w in (*words, "--profile", tmp_path / "profile.json", *own[2:])]) == 0
    for name in ("a.html", "b.html"):
        found = parsed(tmp_path / name)
        table = found.tables["Kernels whose prediction is off by most of the step's time"]
        assert all(value > 0 for value in column(table, "measured µs"))
        assert "Kendall's tau" in found.text
    plan = plans.load(file)
    assert len(plan.steps) >= len(table) - 1

"""Time against memory: no point beats another in both, each is a plan, and the command line shows them."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest

from layoutopt.cli import main
from layoutopt.errors import LayoutOptError
from layoutopt.models import shipped
from layoutopt.pareto import Point, draw, pareto, slowdown_within, undominated
from layoutopt.planner import plan, validate
from tests.fake_costs import FakeCosts

COSTS = FakeCosts()


@lru_cache(maxsize=1)
def points() -> tuple[Point, ...]:
    return pareto(shipped("vit-digits"), COSTS, "greedy", most=6)


def test_each_point_takes_longer_and_needs_less() -> None:
    assert len(points()) > 4
    for one, other in pairwise(points()):
        assert one.objective_ns < other.objective_ns
        assert one.arena_bytes > other.arena_bytes
    assert points()[0].ops_again == 0
    assert points()[-1].ops_again > 10
    assert points()[-1].arena_bytes < 0.5 * points()[0].arena_bytes


def test_points_are_plans_and_the_first_is_the_fastest() -> None:
    for point in points()[::3]:
        validate(point.plan, shipped("vit-digits"), COSTS)
        assert point.arena_bytes == point.plan.arena_bytes
    fastest = plan(shipped("vit-digits"), COSTS, "greedy")
    assert points()[0].objective_ns <= fastest.solver.objective_ns


def test_beaten_points_go() -> None:
    base = points()[0]

    def point(ns: int, size: int) -> Point:
        return Point(base.plan, ns, size, 0, False)

    kept = undominated([point(3, 5), point(1, 9), point(2, 9), point(2, 7), point(4, 5), point(5, 1)])
    assert [(p.objective_ns, p.arena_bytes) for p in kept] == [(1, 9), (2, 7), (3, 5), (5, 1)]
    assert slowdown_within(kept, 6) == 3
    assert slowdown_within(kept, 9) == 1
    assert slowdown_within(kept, 0.5) is None


@pytest.mark.parametrize("name", ["p.svg", "p.png"])
def test_a_picture_is_drawn(name: str, tmp_path: Path) -> None:
    draw(points(), "a step", tmp_path / name)
    head = (tmp_path / name).read_bytes()[:200]
    assert (b"<?xml" if name.endswith("svg") else b"PNG") in head


def test_other_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutOptError, match=r"\.svg, \.png or \.pdf"):
        draw(points(), "a step", tmp_path / "p.mp3")


def test_the_command_prints_points_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "p.svg"
    words = ["plan", "vit-digits", "--device-model", "generic-cpu", "--strategy", "rowmajor", "--pareto", "--json"]
    assert main([*words, "--picture", str(picture)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert picture.is_file()
    sizes = [p["arena_bytes"] for p in shown["points"]]
    assert sizes == sorted(sizes, reverse=True)
    assert shown["points"][0]["slowdown"] == 1
    assert all(p["predicted_step_s"] > 0 for p in shown["points"])


@pytest.mark.parametrize(
    "words", [["--pareto", "--memory", "1GiB"], ["--picture", "p.svg"], ["--pareto", "--strategy", "mnn-image"]]
)
def test_what_makes_no_sense_together(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "vit-digits", "--device-model", "generic-cpu", *words]) == 2
    assert "layoutopt: error:" in capsys.readouterr().err

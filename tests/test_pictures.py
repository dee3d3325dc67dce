"""Pictures of cache reports: what they say, that files come whole, what a layout's lines are."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from costmodel import device as device_models
from layoutopt.errors import LayoutOptError
from layoutopt.layout import Layout
from layoutopt.passes import run_passes
from simulator.pictures import (
    check_pictures,
    layout_drawing,
    lines_of,
    lines_touched,
    op_bars,
    reuse_bars,
    rtile_beside_rowmajor,
    tensor_map,
    write_pictures,
)
from simulator.reuse import Histogram
from simulator.simulate import CacheReport, simulate
from tests.graphs import linear_step
from tests.plans import naive_plan, r_tile


@pytest.fixture(scope="module")
def report() -> CacheReport:
    graph = run_passes(linear_step())[0]
    model = device_models.load("generic-cpu")
    return simulate(graph, naive_plan(graph, model.limits, r_tile, relayouts_share=1.0), model)


def test_bars_add_up_to_the_accesses_of_the_step(report: CacheReport) -> None:
    (axes,) = op_bars(report, top=1000).axes
    hits = [sum(report.total.hits), report.total.misses[-1]]
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(sum(hits))
    (axes,) = op_bars(report, top=3).axes
    assert len(axes.patches) == 3 * (len(report.levels) + 1)


def test_the_map_holds_every_miss(report: CacheReport) -> None:
    axes = tensor_map(report, top=1000).axes[0]
    shown = sum(float(text.get_text().replace(",", "")) for text in axes.texts)
    assert shown == report.total.misses[-1]
    assert [label.get_text() for label in axes.get_xticklabels()] == list(report.by_phase)


def test_reuse_bars_are_shares() -> None:
    found = {"a": Histogram(64, 10, (30, 0, 60)), "b": Histogram(64, 1, ())}
    (axes,) = reuse_bars(found, {"L1": 512}).axes
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == pytest.approx([30, 0, 60, 10, 0, 0, 0, 100])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2–3", "first"]
    (mark,) = axes.lines
    assert mark.get_xdata()[0] == 9.5


class TestLines:
    def test_row_major_and_tiles(self) -> None:
        plain = lines_of(Layout.row_major((16, 16)))
        np.testing.assert_array_equal(plain, np.repeat(np.arange(16)[:, None], 16, axis=1))
        tiled = lines_of(Layout.r_tile((16, 16), 4, 4))
        assert set(tiled[:4, :4].ravel()) == {0}
        assert len(np.unique(tiled)) == 16

    def test_what_a_wave_touches(self) -> None:
        plain, tiled = (lines_of(layout) for layout in rtile_beside_rowmajor(64, 16).values())
        assert [lines_touched(plain, axis, 16) for axis in (1, 0)] == [1, 16]
        assert [lines_touched(tiled, axis, 16) for axis in (1, 0)] == [4, 4]

    def test_a_drawing_has_a_panel_for_either_direction(self) -> None:
        figure = layout_drawing(rtile_beside_rowmajor(64, 16))
        titles = [axes.get_title() for axes in figure.axes]
        assert titles[0] == "row-major, forward: a wave touches 1 line"
        assert titles[3] == "R-Tile(4, 4), backward: a wave touches 4 lines"
        colours = figure.axes[2].images[0].get_array()
        for i, j in ((0, 0), (4, 8), (12, 15)):  # a tile is one colour
            assert (colours[i, j] == colours[i + (i + 1) % 4, j - j % 4]).all()

    def test_only_matrices_are_drawn(self) -> None:
        with pytest.raises(LayoutOptError, match="only matrices"):
            layout_drawing({"three": Layout.row_major((2, 3, 4))})

    def test_images_are_drawn_texel_by_texel(self) -> None:
        assert len(np.unique(lines_of(Layout.r_tile_image((8, 16), 4)))) == 8


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_files(report: CacheReport, tmp_path: Path, kind: str) -> None:
    written = write_pictures(tmp_path / "new", report, kind=kind, histograms={"step": Histogram(64, 3, (1, 2))})
    assert [path.name for path in written] == [f"{n}.{kind}" for n in ("ops", "tensors", "layouts", "reuse")]
    magic = b"\x89PNG" if kind == "png" else b"<?xml"
    assert all(path.read_bytes().startswith(magic) for path in written)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in written)


def test_what_cannot_be_drawn_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutOptError, match="choose png or svg"):
        check_pictures(tmp_path, "bmp")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LayoutOptError, match="is a file"):
        check_pictures(tmp_path / "file", "png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LayoutOptError, match="pip install 'layoutopt\\[demo\\]'"):
        check_pictures(tmp_path, "png")

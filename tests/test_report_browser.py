"""Reports in a real browser: light and dark, telephone and desk, by keyboard, in print; nothing from a network.

``tests/browser.py`` says which browser, and what happens where there is none. LAYOUTOPT_PICTURES=1 plans and reports a
real model, and keeps the screenshots in docs/pictures.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layoutopt.cli import main
from tests.browser import chromium, opened, png_size
from tests.reports import planned_files

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
PHONE, DESK = (390, 844), (1280, 900)
VIEWS = [(size, scheme) for size in (PHONE, DESK) for scheme in ("light", "dark")]
MOST_BYTES = 300_000
"""Of a picture in docs/pictures."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a step with hostile names; of a real model where pictures are to be kept."""
    folder = tmp_path_factory.mktemp("report")
    if _keeping():
        plan, model = folder / "minilm-plan.json", "pocl-cpu-3.1"
        assert main(["plan", "minilm", "--device-model", model, "-o", str(plan), "--time-limit", "30"]) == 0
    else:
        plan, model = planned_files(folder)[0], "generic-cpu"
    words = ["report", str(plan), "-o", str(folder / "report.html"), "--device-model", model]
    assert main([*words, "--strategies", "greedy,rowmajor"]) == 0
    return folder / "report.html"


def _keeping() -> bool:
    return os.environ.get("LAYOUTOPT_PICTURES") == "1"


@pytest.fixture(params=VIEWS, ids=lambda v: f"{v[0][0]}-{v[1]}")
def page(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Any]:
    said: list[str] = []
    with opened(browser, report, *request.param, said) as page:
        yield page
    own = f"request: {report.as_uri()}"
    assert [line for line in said if not line.startswith(own)] == []


def open_all(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")


def test_nothing_scrolls_sideways(page: Any) -> None:
    open_all(page)
    wide, seen = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide == seen


def test_axe_finds_nothing(page: Any) -> None:
    """Contrast, names, headers, landmarks, order of headings: the rules of axe-core, of WCAG and of good practice."""
    from axe_playwright_python.sync_playwright import Axe

    open_all(page)
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert len(found.response["passes"]) > 20


RELATIVE = """
() => {
  const paint = (node, name) => getComputedStyle(node)[name].match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 0.03928 * 255 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const back = paint(document.body, 'backgroundColor');
  const all = (where, name) => [...document.querySelectorAll(where)].filter(n => getComputedStyle(n)[name] != 'none')
    .map(n => ratio(paint(n, name), back));
  return {text: all('svg text', 'fill'), bars: all('svg g[id*="patch"] path[clip-path]', 'fill')};
}
"""


def test_drawings_stand_out(page: Any) -> None:
    """Text in drawings as readable as text, what it labels told from the page: axe does not look into drawings."""
    found = page.evaluate(RELATIVE)
    assert len(found["text"]) > 50
    assert min(found["text"]) >= 4.5
    assert len(found["bars"]) > 10
    assert min(found["bars"]) >= 3.0


def test_letters_of_drawings_can_be_read(page: Any) -> None:
    sizes = page.evaluate(
        "[...document.querySelectorAll('svg text')].map(t => parseFloat(getComputedStyle(t).fontSize) "
        "* t.ownerSVGElement.getBoundingClientRect().width / t.ownerSVGElement.viewBox.baseVal.width)"
    )
    assert min(sizes) >= 9.5


def test_no_letters_leave_their_drawing(page: Any) -> None:
    outside = page.evaluate(
        "[...document.querySelectorAll('svg text')].filter(t => { const a = t.getBoundingClientRect(), "
        "b = t.ownerSVGElement.getBoundingClientRect(); return a.right > b.right + 2 || a.left < b.left - 2; })"
        ".map(t => t.textContent)"
    )
    assert outside == []


def test_the_keyboard_reaches_every_control(browser: Any, report: Path) -> None:
    with opened(browser, report, DESK, "light", []) as page:
        page.evaluate(
            "document.querySelectorAll('a, summary, [tabindex=\"0\"]').forEach((e, i) => e.dataset.place = i)"
        )
        wanted = page.evaluate(
            "[...document.querySelectorAll('a, summary, [tabindex=\"0\"]')].filter(e => e.checkVisibility({"
            "contentVisibilityAuto: true})).map(e => e.dataset.place)"
        )
        reached = []
        for _ in wanted:
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.dataset.place"))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        assert reached == wanted
        page.locator("summary").first.focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.querySelector('details').open")


def test_the_first_stop_skips_to_the_content(browser: Any, report: Path) -> None:
    with opened(browser, report, PHONE, "light", []) as page:
        page.keyboard.press("Tab")
        place = page.evaluate("document.activeElement.getBoundingClientRect().toJSON()")
        assert place["left"] >= 0
        assert place["top"] >= 0
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "content"


def test_paper_shows_what_is_folded(browser: Any, report: Path) -> None:
    with opened(browser, report, DESK, "dark", []) as page:
        shown = "t => t.checkVisibility({contentVisibilityAuto: true})"
        visible = f"[...document.querySelectorAll('details table')].map({shown})"
        assert not any(page.evaluate(visible))
        page.emulate_media(media="print")
        assert all(page.evaluate(visible))
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.pdf()[:5] == b"%PDF-"


def test_screenshots(browser: Any, report: Path, tmp_path: Path) -> None:
    """Made in every run; kept in docs/pictures where LAYOUTOPT_PICTURES=1."""
    for name, size, scheme, target in (
        ("report-desktop-light", (1280, 1700), "light", ""),
        ("report-desktop-dark", (1280, 1700), "dark", "#memory"),
        ("report-phone-light", (390, 1500), "light", ""),
        ("report-phone-dark", (390, 1500), "dark", "#time"),
    ):
        with opened(browser, report, size, scheme, []) as page:
            if target:
                page.locator(target).evaluate("e => e.scrollIntoView()")
            file = tmp_path / f"{name}.png"
            page.screenshot(path=file)
            width, height = png_size(file.read_bytes())
            assert (width, height) == size
            if _keeping() and name in ("report-desktop-light", "report-phone-dark"):
                assert file.stat().st_size < MOST_BYTES
                PICTURES.mkdir(exist_ok=True)
                shutil.copy(file, PICTURES / file.name)


def test_the_page_has_one_heading_of_each_section(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert len(re.findall(r"<h1", text)) == 1
    assert len(re.findall(r"<h2 id=", text)) == 8
    assert len(text.encode()) < 2_000_000

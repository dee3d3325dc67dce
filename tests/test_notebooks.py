"""Notebooks run from top to bottom on small sizes, are stored without outputs, and end in an asserted conclusion; the
pages that show them executed (``docs/render_notebooks.py``) show the same code.
"""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from docs.render_notebooks import MOST_BYTES, MOST_PICTURE_BYTES, PAGES, ROOT, executed, html_page
from tests.browser import chromium, opened, png_size

PICTURES = ROOT / "docs" / "pictures"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDS = {"05-beside-torch": ("torch",), "07-side-tuning": ("torch", "transformers", "grpc", "safetensors")}
"""Of a notebook, beside what the extras 'demo' and 'notebook' bring."""
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def read(path: Path) -> Any:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra 'notebook'")
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    return book


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
    assert set(NEEDS) <= {path.stem for path in NOTEBOOKS}


@each_notebook
def test_stored_without_outputs(path: Path) -> None:
    for cell in read(path).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@each_notebook
def test_begins_with_a_title_and_ends_in_an_asserted_conclusion(path: Path) -> None:
    cells = read(path).cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert cells[-1].cell_type == "code"
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cells[-1].source)))


@cache
def ran(stem: str) -> Any:
    """A notebook after it ran on less."""
    pytest.importorskip("nbclient", reason="needs the extra 'notebook'")
    for module in ("sklearn", "matplotlib", *NEEDS.get(stem, ())):
        pytest.importorskip(module, reason=f"{stem} needs {module}")
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAYOUTOPT_SMALL", "1")
        return executed(stem, Path(folder), timeout_s=400)


@each_notebook
@pytest.mark.device  # the one that a user gets; what a notebook calls is tested on every device
def test_runs(path: Path) -> None:
    assert all(cell.execution_count for cell in ran(path.stem).cells if cell.cell_type == "code")


CONTRAST = """
() => {
  const linear = v => v <= 10.3 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const paint = (node, name) => getComputedStyle(node)[name].match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const found = paint(node, 'backgroundColor');
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll('table td, table th')].filter(n => n.textContent).map(n => {
    const [x, y] = [light(paint(n, 'color')), light(ground(n))].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  });
}
"""
"""Of the text in every table's cell over what is behind it."""


@pytest.mark.device  # the notebook runs, as above
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_notebook_in_a_browser(theme: str, tmp_path: Path) -> None:
    """Pictures are there, tables can be read, nothing is fetched; LAYOUTOPT_PICTURES=1 keeps the screenshot."""
    pytest.importorskip("nbconvert", reason="needs the extra 'notebook'")
    book = ran("03-watch-the-cache")
    file, said = tmp_path / "notebook.html", list[str]()
    file.write_text(html_page(book, tmp_path, theme), encoding="utf-8")
    size = (1100, 1500)
    with chromium() as browser, opened(browser, file, size, theme, said) as page:
        drawn = page.evaluate("[...document.querySelectorAll('img')].map(i => i.naturalWidth * i.naturalHeight)")
        layouts = page.evaluate("document.querySelectorAll('svg[role=img] rect').length")
        contrast = page.evaluate(CONTRAST)
        page.locator("h2", has_text="Two layouts of one matrix").evaluate("e => e.scrollIntoView()")
        page.screenshot(path=tmp_path / "notebook.png")
    assert [line for line in said if not line.startswith((f"request: {file.as_uri()}", "request: data:"))] == []
    assert min(drawn) > 10_000
    assert len(drawn) + bool(layouts) >= 4
    assert len(contrast) > 50
    assert min(contrast) >= 4.5
    assert png_size((tmp_path / "notebook.png").read_bytes()) == size
    if os.environ.get("LAYOUTOPT_PICTURES") == "1" and theme == "light":
        copy(tmp_path / "notebook.png", PICTURES / "notebook.png")


# ---- pages ----------------------------------------------------------------------------------------------------------


@each_notebook
def test_a_page_shows_the_notebook_s_own_cells(path: Path) -> None:
    """Where they differ: `make pages`."""
    text = (PAGES / f"{path.stem}.md").read_text(encoding="utf-8")
    cells = read(path).cells
    code = [block.strip() for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)]
    assert code == [plain(cell.source) for cell in cells if cell.cell_type == "code"]
    end = 0
    for cell in cells:
        if cell.cell_type == "markdown":
            end = text.index(plain(cell.source), end)


def plain(source: str) -> str:
    """As a page has it: no spaces at ends of lines, no two empty lines."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", source, flags=re.MULTILINE)).strip()


@each_notebook
def test_a_page_has_its_pictures_and_no_others(path: Path) -> None:
    text = (PAGES / f"{path.stem}.md").read_text(encoding="utf-8")
    shown = set(re.findall(rf"\]\({path.stem}_files/([^)]+)\)", text))
    assert shown == {file.name for file in (PAGES / f"{path.stem}_files").iterdir()}
    assert shown, "a page without a picture is not worth much"


def test_pages_are_small_and_of_notebooks() -> None:
    stems = {path.stem for path in NOTEBOOKS}
    assert {page.stem for page in PAGES.glob("*.md")} == stems
    assert {folder.name for folder in PAGES.iterdir() if folder.is_dir()} == {f"{stem}_files" for stem in stems}
    files = [file for file in PAGES.rglob("*") if file.is_file()]
    assert max(file.stat().st_size for file in files if file.suffix in (".png", ".svg")) <= MOST_PICTURE_BYTES
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES


def test_pages_do_not_say_where_they_were_made() -> None:
    for page in PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"/(home|root|tmp|work)/| at 0x[0-9a-f]{6}", text), page.name
        assert not re.search(r"(?i)xeon|epyc|ryzen|core\(tm\)", text), page.name

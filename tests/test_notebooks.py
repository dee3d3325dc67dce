"""Notebooks run from top to bottom on small sizes, are stored without outputs, and end in an asserted conclusion."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path: Path):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra 'notebook'")
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    return book


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_without_outputs(path: Path) -> None:
    for cell in read(path).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_begins_with_a_title_and_ends_in_an_asserted_conclusion(path: Path) -> None:
    cells = read(path).cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert cells[-1].cell_type == "code"
    assert any(isinstance(node, ast.Assert) for node in ast.parse(cells[-1].source).body)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.device  # the one that a user gets; what a notebook calls is tested on every device
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs the extra 'notebook'")
    pytest.importorskip("sklearn", reason="needs the extra 'demo'")
    monkeypatch.setenv("LAYOUTOPT_SMALL", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    book = read(path)
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    client = nbclient.NotebookClient(book, timeout=400, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert all(cell.execution_count for cell in book.cells if cell.cell_type == "code")

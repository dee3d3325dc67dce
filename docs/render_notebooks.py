"""The notebooks executed, as pages to read: ``docs/notebooks/NAME.md`` with its pictures in ``NAME_files``.

    python docs/render_notebooks.py [NAME ...] [--busy] [--html FOLDER]

Notebooks are stored without outputs; GitHub and the documentation site show these pages instead. All are rendered by
default. ``--busy`` adds that the machine did other work meanwhile. ``--html`` writes one self-contained HTML file each
instead. What names the machine that rendered them, the OpenCL device above all, is taken out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
PAGES = ROOT / "docs" / "notebooks"
MOST_PICTURE_BYTES, MOST_BYTES = 150_000, 1_500_000


def names() -> list[str]:
    """Of all notebooks, in order."""
    return sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def executed(name: str, folder: Path, timeout_s: int = 900) -> Any:
    """A notebook after it ran from top to bottom.

    Args:
        name: of the notebook.
        folder: where it runs; calibrations and other files of the user are kept there too.
        timeout_s: for a cell.
    """
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "IPYTHONDIR": str(folder / "ipython"),
        "XDG_DATA_HOME": str(folder / "data"),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
    }
    work = folder / "work"
    work.mkdir(exist_ok=True)
    client = NotebookClient(book, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": str(work)}})
    client.execute(env=environment)
    return book


def nameless(text: str, folder: Path) -> str:
    """Text without what says where it was made: devices, folders, addresses in memory."""
    from kernels.runtime import devices

    for info in devices():
        for own in (info.label, info.name):
            text = text.replace(own, "OpenCL CPU device" if info.limits.kind == "cpu" else "OpenCL device")
    text = text.replace(str(folder), "…").replace(str(ROOT), "…").replace(str(Path.home()), "~")
    return re.sub(r" at 0x[0-9a-f]{6,}", "", text)


def page(book: Any, name: str, folder: Path, busy: bool) -> tuple[str, Mapping[str, bytes]]:
    """An executed notebook as Markdown, and its pictures by file name; ``busy``: its times are worth little."""
    from nbconvert import MarkdownExporter

    exporter = MarkdownExporter()
    resources = {"unique_key": name, "output_files_dir": f"{name}_files"}
    text, made = exporter.from_notebook_node(book, resources=resources)
    text = re.sub(r"[ \t]+$", "", nameless(text, folder), flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    today = date.today()
    note = (
        f"*`notebooks/{name}.ipynb`, executed by `docs/render_notebooks.py` on {today.day} {today:%B %Y}; times are "
        f"those of that run{', beside other work on the same cores' * busy}.*"
    )
    return f"{text}\n\n{note}\n", {Path(file).name: data for file, data in made["outputs"].items()}


def write_page(name: str, text: str, pictures: Mapping[str, bytes]) -> None:
    """Put a page where the pages are; pictures of earlier ones go."""
    for file, data in pictures.items():
        if len(data) > MOST_PICTURE_BYTES:
            raise SystemExit(f"{name}: picture {file} has {len(data):,} bytes, more than {MOST_PICTURE_BYTES:,}")
    files = PAGES / f"{name}_files"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    for file, data in pictures.items():
        (files / file).write_bytes(data)
    (PAGES / f"{name}.md").write_text(text, encoding="utf-8")


def html_page(book: Any, folder: Path, theme: str = "light") -> str:
    """An executed notebook as one HTML file, its pictures inside; nothing of it is fetched.

    Args:
        book: executed.
        folder: where it ran.
        theme: "light" or "dark".
    """
    from nbconvert import HTMLExporter

    text, _ = HTMLExporter(theme=theme).from_notebook_node(book)
    # Formulas and widgets, of which these notebooks have none, would be drawn by scripts from the network.
    text = re.sub(r"<script[^>]*\bsrc=[^>]*>\s*</script>", "", text)
    return nameless(text, folder)


def main() -> None:
    """Render what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; all by default")
    parser.add_argument("--busy", action="store_true", help="say that other work ran beside")
    parser.add_argument("--html", type=Path, metavar="FOLDER", help="write HTML there instead of pages")
    args = parser.parse_args()
    unknown = set(args.names) - set(names())
    if unknown:
        raise SystemExit(f"no notebook named {', '.join(sorted(unknown))}: choose among {', '.join(names())}")
    sys.path.insert(0, str(ROOT))
    for name in args.names or names():
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            book = executed(name, folder)
            if args.html is not None:
                args.html.mkdir(parents=True, exist_ok=True)
                (args.html / f"{name}.html").write_text(html_page(book, folder), encoding="utf-8")
            else:
                write_page(name, *page(book, name, folder, args.busy))
        print(f"rendered {name}", flush=True)
    size = sum(file.stat().st_size for file in PAGES.rglob("*") if file.is_file())
    if size > MOST_BYTES:
        raise SystemExit(f"the pages have {size:,} bytes together, more than {MOST_BYTES:,}: use smaller pictures")


if __name__ == "__main__":
    main()

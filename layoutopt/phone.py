"""A bundle to calibrate a device on which the product cannot be installed: a zip file that a phone's Python runs.

It holds the packages that calibrating imports, stand-ins for those that are hard to build on a phone
(``layoutopt/standins``), small ones that are pure Python as they are installed here with their licences, a script and a
README. A person runs it and brings back a device model as any calibration writes it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

from layoutopt.errors import LayoutOptError
from layoutopt.files import check_target, write_atomic
from layoutopt.graph import TrainingGraph
from layoutopt.graphfile import encode

__all__ = ["FOLDER", "export_bundle"]

FOLDER = "layoutopt-phone"
WHOLE = ("kernels", "costmodel")
"""Packages that go along whole, OpenCL sources included."""
# The package itself looks up old names in ``deprecation``, by a string that no parser of imports sees.
ROOTS = ("costmodel.calibrate", *(f"layoutopt.{name}" for name in ("deprecation", "graphfile", "probing", "rewrites")))
STANDINS = {
    "structs.py": ("msgspec/__init__.py",),
    "pack.py": ("msgspec/msgpack.py",),
    "fitting.py": ("scipy/optimize.py", "scipy/stats.py"),
}
LAST_LINE = {"msgspec/__init__.py": b"\nfrom msgspec import msgpack  # noqa: E402, F401\n"}
PURE = ("tomli_w",)
"""Small packages of pure Python that go along as they are; pyopencl brings its own."""
STAMP = (2026, 1, 1, 0, 0, 0)
"""Time of every file: equal contents are equal bundles."""


def export_bundle(path: str | os.PathLike[str], graphs: Sequence[TrainingGraph] = ()) -> list[str]:
    """Write the bundle.

    Args:
        path: of the zip file.
        graphs: go along, and the device is calibrated for them; without any, for graphs in general.

    Returns:
        The names in it.

    Raises:
        LayoutOptError: it cannot be written there, or a package that goes along is not installed.
    """
    check_target(path)
    taken = {f"graphs/{i}-{re.sub(r'[^A-Za-z0-9._-]+', '-', g.name)}.graph": encode(g) for i, g in enumerate(graphs)}
    content = dict(sorted({**dict(_own()), **dict(_standins()), **dict(_pure()), **taken}.items()))
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, data in content.items():
            bundle.writestr(zipfile.ZipInfo(f"{FOLDER}/{name}", STAMP), data, zipfile.ZIP_DEFLATED)
    write_atomic(path, packed.getvalue())
    return list(content)


def _own() -> Iterator[tuple[str, bytes]]:
    """The product's files: two packages whole, of this one the modules that they and the roots import."""
    for package in WHOLE:
        root = _folder(package)
        for file in sorted(root.rglob("*")):
            if file.suffix in (".py", ".cl"):
                yield f"{package}/{file.relative_to(root).as_posix()}", file.read_bytes()
    for module in sorted(_imported()):
        file = _folder("layoutopt").parent / (module.replace(".", "/") + ".py")
        yield file.relative_to(_folder("layoutopt").parent).as_posix(), file.read_bytes()
    yield "layoutopt/__init__.py", (_folder("layoutopt") / "__init__.py").read_bytes()


def _imported() -> set[str]:
    """Modules of ``layoutopt`` that the roots and the whole packages import, at once or later, through others too."""
    base = _folder("layoutopt").parent
    waiting = [base / (root.replace(".", "/") + ".py") for root in ROOTS]
    waiting += [file for package in WHOLE for file in _folder(package).rglob("*.py")]
    found: set[str] = {root for root in ROOTS if root.startswith("layoutopt.")}
    while waiting:
        for name in _imports(waiting.pop()):
            for module in (name, name.rpartition(".")[0]):
                file = base / (module.replace(".", "/") + ".py")
                if module.startswith("layoutopt.") and module not in found and file.is_file():
                    found.add(module)
                    waiting.append(file)
    return found


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _standins() -> Iterator[tuple[str, bytes]]:
    folder = _folder("layoutopt") / "standins"
    for name, places in STANDINS.items():
        for place in places:
            yield f"standins/{place}", (folder / name).read_bytes() + LAST_LINE.get(place, b"")
    yield "standins/scipy/__init__.py", b""
    for name in ("run.py", "README.txt"):
        yield name, (folder / name).read_bytes()


def _pure() -> Iterator[tuple[str, bytes]]:
    for package in PURE:
        root = _folder(package)
        for file in sorted(root.rglob("*.py")):
            yield f"standins/{package}/{file.relative_to(root).as_posix()}", file.read_bytes()
        for listed in importlib.metadata.files(package) or ():
            if "LICENSE" in listed.name.upper():
                yield f"standins/{package}/LICENSE", Path(str(listed.locate())).read_bytes()


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise LayoutOptError(f"the bundle takes along {package}, which is not installed here: `pip install {package}`")
    return Path(spec.origin).parent

"""Other packages of the same import name.

``kernels``, ``costmodel`` and ``simulator`` are common words, and the Hugging Face package ``kernels`` really installs
the first of them. Whichever comes first on ``sys.path`` wins; :func:`check` says so before it fails somewhere else.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from layoutopt.errors import LayoutOptError

__all__ = ["check"]

PACKAGES = ("kernels", "costmodel", "simulator")


def check() -> None:
    """See that our sibling packages are the ones that an import finds; imports nothing.

    Raises:
        LayoutOptError: a name resolves to another distribution, or to nothing.
    """
    home = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        folders = _folders(name)
        if not folders:
            raise LayoutOptError(f"package {name} is missing beside {home / 'layoutopt'}: install layoutopt again")
        if home / name not in folders:
            owner = _owner(name, folders[0])
            raise LayoutOptError(
                f"`import {name}` finds {folders[0]} ({owner}) instead of layoutopt's own {home / name}: "
                f"use an environment without it (`make setup` makes one), or remove it from this one"
            )


def _folders(name: str) -> list[Path]:
    """Where an import of ``name`` would look."""
    module = sys.modules.get(name)
    spec: importlib.machinery.ModuleSpec | None = getattr(module, "__spec__", None)
    if spec is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # a half-initialised module of that name
            return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(p).resolve() for p in spec.submodule_search_locations]
    return [Path(spec.origin).resolve()] if spec.origin else []


def _owner(name: str, found: Path) -> str:
    """The distribution that installed what was found, in words."""
    for candidate in importlib.metadata.packages_distributions().get(name, []):
        try:
            distribution = importlib.metadata.distribution(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
        if any(Path(str(distribution.locate_file(part))).resolve() == found for part in (name, f"{name}.py")):
            return f"distribution {candidate!r} {distribution.version}"
    return "no installed distribution"

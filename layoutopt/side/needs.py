"""Packages that side-tuning needs and layoutopt alone does not: imported when used, named when missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from layoutopt.errors import LayoutOptError

__all__ = ["need"]


def need(module: str, purpose: str, extra: str = "side") -> ModuleType:
    """Import a module of an extra.

    Args:
        module: its name.
        purpose: what needs it, in a few words.
        extra: of layoutopt, that brings it.

    Raises:
        LayoutOptError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.split(".")[0] if error.name is None else error.name.split(".")[0]
        raise LayoutOptError(f"{purpose} needs {name}: pip install 'layoutopt[{extra}]'") from error

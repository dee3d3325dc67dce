"""What a shell offers for the values of options: names, found without importing what they name.

A shell asks whenever Tab is pressed: nothing here opens a device or imports more than the command line itself does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MODES", "STRATEGIES", "device_models", "graphs", "models", "modes", "storages", "strategies"]

MODES = ("full", "lora", "head", "bias", "forward")
STRATEGIES = (
    *("ilp", "activation", "greedy", "ideal", "rowmajor", "rtile", "bfs", "majority", "chaindp"),
    *("mnn-image", "mnn-buffer", "tflite", "tvm-flat"),
)
"""Those of ``layoutopt.planner``, whose import takes longer than a person waits for a completion; a test compares."""


def graphs(incomplete: str) -> list[str]:
    """Graphs that ship, then files."""
    names = sorted(file.stem for file in (Path(__file__).parent / "data").glob("*.graph"))
    return [*_beginning(names, incomplete), *_files(incomplete, ".graph")]


def models(incomplete: str) -> list[str]:
    """Models of the zoo that ship as graphs, then ONNX files."""
    names = sorted(file.stem for file in (Path(__file__).parent / "data").glob("*.graph"))
    return [*_beginning(names, incomplete), *_files(incomplete, ".onnx")]


def device_models(incomplete: str) -> list[str]:
    """Device models that ship, then files."""
    spec = importlib.util.find_spec("costmodel")
    folders = spec.submodule_search_locations if spec is not None else None
    found = sorted(file.stem for folder in folders or () for file in (Path(folder) / "devices").glob("*.toml"))
    return [*_beginning(found, incomplete), *_files(incomplete, ".toml")]


def strategies(incomplete: str) -> list[str]:
    """Strategies of the planner."""
    return _beginning(STRATEGIES, incomplete)


def storages(incomplete: str) -> list[str]:
    """How numbers may lie in memory."""
    from layoutopt.rewrites import STORAGES

    return _beginning(STORAGES, incomplete)


def modes(incomplete: str) -> list[str]:
    """What is trained."""
    return _beginning(MODES, incomplete)


def _beginning(names: object, incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]  # type: ignore[attr-defined]


def _files(incomplete: str, suffix: str) -> Iterator[str]:
    """Files of a kind, and folders that may hold some."""
    folder, _, start = incomplete.rpartition("/")
    base = Path(folder or ("/" if incomplete.startswith("/") else "."))
    if not base.is_dir():
        return
    for path in sorted(base.iterdir()):
        if path.name.startswith(start) and not (path.name.startswith(".") and not start):
            shown = f"{folder}/{path.name}" if "/" in incomplete else path.name
            if path.is_dir():
                yield f"{shown}/"
            elif path.suffix == suffix:
                yield shown

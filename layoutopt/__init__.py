"""layoutopt: choose the memory layout of every tensor of a training step at once, prove the choice, run it.

The verbs (``capture``, ``calibrate``, ``plan``, ``simulate``, ``compare``, ``train``), ``compile``, ``Trainer`` and the
main types are attributes of the package, loaded when first used: importing it loads nothing heavy.

Four verbs share their names with modules (``layoutopt.plan`` holds the Plan and its file format, and so on), and Python
binds a module to its package's attribute whenever somebody imports it. So these modules can be called:
``layoutopt.plan`` is the module and the verb at once, whichever is imported first. ``docs/library.md`` says more.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect import Signature

    from costmodel.device import DeviceModel
    from layoutopt.api import calibrate, capture, compare, plan, simulate, train
    from layoutopt.compiled import Compiled, compile
    from layoutopt.errors import DeviceError, GraphError, InfeasibleError, LayoutError, LayoutOptError
    from layoutopt.graph import TrainingGraph
    from layoutopt.layout import Layout
    from layoutopt.optimizers import AdamW, Sgd
    from layoutopt.plan import Plan
    from layoutopt.trainer import Trainer
    from layoutopt.trainer_types import TrainerCallback, TrainingArguments
    from simulator.simulate import CacheReport

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "CacheReport",
    "Compiled",
    "DeviceError",
    "DeviceModel",
    "GraphError",
    "InfeasibleError",
    "Layout",
    "LayoutError",
    "LayoutOptError",
    "Plan",
    "Sgd",
    "Trainer",
    "TrainerCallback",
    "TrainingArguments",
    "TrainingGraph",
    "__version__",
    "calibrate",
    "capture",
    "compare",
    "compile",
    "plan",
    "simulate",
    "train",
]

_HOME = {
    "AdamW": "layoutopt.optimizers",
    "CacheReport": "simulator.simulate",
    "Compiled": "layoutopt.compiled",
    "DeviceError": "layoutopt.errors",
    "DeviceModel": "costmodel.device",
    "GraphError": "layoutopt.errors",
    "InfeasibleError": "layoutopt.errors",
    "Layout": "layoutopt.layout",
    "LayoutError": "layoutopt.errors",
    "LayoutOptError": "layoutopt.errors",
    "Plan": "layoutopt.plan",
    "Sgd": "layoutopt.optimizers",
    "Trainer": "layoutopt.trainer",
    "TrainerCallback": "layoutopt.trainer_types",
    "TrainingArguments": "layoutopt.trainer_types",
    "TrainingGraph": "layoutopt.graph",
    "calibrate": "layoutopt.api",
    "capture": "layoutopt.api",
    "compile": "layoutopt.compiled",
    "simulate": "layoutopt.api",
}
"""The module that each lazy name lives in. ``layoutopt.api`` loads no torch: what needs it says so when called."""

_VERB_MODULES = ("capture", "compare", "plan", "train")
"""Modules that are called like the verb of their name. All but ``capture`` load nothing heavy, and are loaded to be
called; of ``capture``, which loads torch, the verb stands alone until somebody imports the module."""


class _VerbModule(ModuleType):
    """A submodule that is also the verb of its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _verb(self.__name__)(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        from inspect import signature

        return signature(_verb(self.__name__))


class _Package(ModuleType):
    """This package: the import system sets submodules as its attributes, and four of them become callable."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _VERB_MODULES and isinstance(value, ModuleType):
            value.__class__ = _VerbModule
        super().__setattr__(name, value)


def _verb(module: str) -> Any:
    return getattr(import_module("layoutopt.api"), module.rpartition(".")[2])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        if name != "capture":  # the module of that name may yet be imported, and is then what is wanted
            globals()[name] = value
        return value
    if name in _VERB_MODULES:
        return import_module(f"layoutopt.{name}")
    if not name.startswith("_"):
        moved = import_module("layoutopt.deprecation").MOVED.get(name)
        if moved is not None:
            moved.warn()
            home, _, new = moved.new.partition(":")
            return getattr(import_module(home), new)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package

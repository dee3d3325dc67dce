"""What the tests of reports and exports share: a small step whose names are hostile, its plan, its report as tags."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

from costmodel import device as device_models
from layoutopt import graphfile, plan
from layoutopt.graph import Operand, TrainingGraph
from layoutopt.passes import run_passes
from tests.graphs import linear_step
from tests.plans import solver_plan

__all__ = ["HOSTILE", "Parsed", "hostile_step", "parsed", "planned_files"]

HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(2)'>",
    "--></svg><style>*{display:none}</style>",
    "$\\frac{a}{b}$ & ]]> {{ 7 * 7 }}",
    "\u202ereversed\x07 bell",
    "a" * 300,
)
"""What a graph may call its tensors and operations."""


def hostile_step() -> TrainingGraph:
    """A step of two linear layers, every name of it hostile."""
    graph = run_passes(linear_step())[0]
    names = {name: f"{name} {HOSTILE[i % len(HOSTILE)]}" for i, name in enumerate(graph.tensors)}

    def renamed(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        return tuple(replace(o, tensor=names[o.tensor]) for o in operands)

    ops = [
        replace(
            op, name=f"{op.name} {HOSTILE[i % len(HOSTILE)]}", inputs=renamed(op.inputs), outputs=renamed(op.outputs)
        )
        for i, op in enumerate(graph.ops)
    ]
    tensors = {}
    for t in graph.tensors.values():
        tensors[names[t.name]] = replace(t, name=names[t.name], init="normal:0.1" if t.role == "parameter" else "")
    constants = {names[name]: value for name, value in graph.constants.items()}
    outputs = tuple(names[name] for name in graph.outputs)
    meta = {"command": "layoutopt capture <b>&nbsp;"}
    return TrainingGraph(f"step {HOSTILE[0]}", tensors, ops, outputs, constants, meta)


def planned_files(folder: Path) -> tuple[Path, TrainingGraph, plan.Plan]:
    """The hostile step's plan for the generic CPU as a file, its graph beside it."""
    graph = hostile_step()
    graphfile.save(graph, folder / "step.graph")
    made = solver_plan(graph, device_models.load("generic-cpu").limits)
    plan.save(made, folder / "step.json")
    return folder / "step.json", graph, made


@dataclass
class Parsed(HTMLParser):
    """A page's tags with their attributes, its text, and its tables by caption."""

    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._caption: str | None = None
        self._cell: str | None = None
        self._rows: list[list[str]] = []
        self._quiet = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        self._quiet = tag == "style"
        if tag == "table":
            self._rows = []
        elif tag == "caption":
            self._caption = ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._cell = ""

    def handle_endtag(self, tag: str) -> None:
        self._quiet = False
        if tag == "caption" and self._caption is not None:
            self.tables[self._caption] = self._rows
            self._caption = None
        elif tag in ("td", "th") and self._cell is not None:
            self._rows[-1].append(self._cell)
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._caption is not None:
            self._caption += data
        elif self._cell is not None:
            self._cell += data
        if not self._quiet:
            self.words.append(data)

    @property
    def text(self) -> str:
        """All that is not a tag."""
        return "".join(self.words)


def parsed(page: Path) -> Parsed:
    """A report, read."""
    found = Parsed()
    found.feed(page.read_text(encoding="utf-8"))
    found.close()
    return found

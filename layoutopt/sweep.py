"""Many plans: a matrix of models × device models × memory budgets × batch sizes × strategies, a row of a table each.

Cells are independent and a plan depends on nothing but its cell, so that the table is the same whatever the number of
workers, the order in which they end, and however often the sweep was interrupted. How long a plan took is no column for
that reason, unless it is asked for. A cell without a plan (a budget that is too small, a model that is not known) is a
row too: its status and the sentence that says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from layoutopt.errors import DeviceError, GraphError, InfeasibleError, LayoutOptError
from layoutopt.plan import Plan, encode, with_report

__all__ = [
    "COLUMNS",
    "Cell",
    "Engine",
    "Row",
    "Sources",
    "Task",
    "identity",
    "matrix",
    "plan_bytes",
    "refusal",
    "solve",
]

Row = dict[str, Any]

COLUMNS: dict[str, type] = {
    "model": str,
    "device_model": str,
    "memory": str,
    "batch": int,
    "strategy": str,
    "status": str,
    "message": str,
    "objective_ns": int,
    "bound_ns": int,
    "gap": float,
    "predicted_step_s": float,
    "arena_bytes": int,
    "ops": int,
    "storages": int,
    "candidates": int,
    "choices": int,
    "relayouts": int,
    "relayout_bytes": int,
    "rewrites": str,
    "graph_hash": str,
    "device_hash": str,
    "plan_sha256": str,
}
"""The table's columns and their types; what a row lacks is empty. ``plan_sha256`` is of ``plan_bytes``."""


@dataclass(frozen=True)
class Cell:
    """One plan of the matrix.

    Attributes:
        model: a graph file, a shipped graph, or what ``layoutopt capture`` takes.
        device_model: a file or a built-in name.
        memory: budget in words; None is the device's own limit.
        batch: samples; None as the graph has it.
        strategy: by name.
    """

    model: str
    device_model: str
    memory: str | None
    batch: int | None
    strategy: str

    @property
    def order(self) -> tuple[str, str, int, str, int, str]:
        """Where its row stands in the table: budgets and batches by size, the device's own limit last."""
        from layoutopt.facade import memory_bytes

        size = memory_bytes(self.memory)
        big = 1 << 62
        return self.model, self.device_model, self.batch or 0, self.strategy, big if size is None else size, str(size)


@dataclass(frozen=True)
class Task:
    """What a worker gets: everything by value, so that it may be on another machine.

    Attributes:
        cell: names.
        graph: a graph file's bytes.
        device: a device model's text.
        storage: how numbers lie in memory.
        time_limit_s: of the exact solver.
        keep_plan: whether the plan's bytes are wanted.
    """

    cell: Cell
    graph: bytes
    device: str
    storage: str
    time_limit_s: float
    keep_plan: bool


Engine = Callable[[Sequence[Task]], Iterator[tuple[int, Row, bytes | None]]]
"""Runs tasks and yields the position of each, its row and its plan's bytes as they end."""


def matrix(
    models: Iterable[str],
    device_models: Iterable[str],
    memories: Iterable[str | None] = (None,),
    batches: Iterable[int | None] = (None,),
    strategies: Iterable[str] = ("ilp",),
) -> list[Cell]:
    """Every combination once, in the table's order.

    Raises:
        LayoutOptError: a budget is no size, or a strategy is not known.
    """
    from layoutopt.facade import check_request, memory_bytes

    budgets, names = list(memories), list(strategies)
    check_request(names, None)
    for text in budgets:
        memory_bytes(text)
    cells = [Cell(*values) for values in product(models, device_models, budgets, batches, names)]
    return sorted(dict.fromkeys(cells), key=lambda cell: cell.order)


class Sources:
    """Graphs and device models by name, each read or captured once, when first asked for."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[str, int | None], bytes | str] = {}
        self._devices: dict[str, str | LayoutOptError] = {}

    def graph(self, model: str, batch: int | None) -> bytes:
        """A graph file's bytes.

        Raises:
            GraphError: there is no such model, or it cannot have this batch, or torch is missing.
        """
        key = model, batch
        if key not in self._graphs:
            try:
                self._graphs[key] = _graph(model, batch)
            except LayoutOptError as error:
                self._graphs[key] = str(error)
        found = self._graphs[key]
        if isinstance(found, str):
            raise GraphError(found)
        return found

    def device(self, name: str) -> str:
        """A device model's text.

        Raises:
            LayoutOptError: there is none, or it cannot be read.
        """
        from costmodel import device as devices

        if name not in self._devices:
            try:
                self._devices[name] = devices.dumps(devices.load(name))
            except LayoutOptError as error:
                self._devices[name] = error
        found = self._devices[name]
        if isinstance(found, LayoutOptError):
            raise LayoutOptError(str(found))
        return found


def _graph(model: str, batch: int | None) -> bytes:
    from layoutopt.facade import capture_model
    from layoutopt.graphfile import encode as encode_graph
    from layoutopt.models import find_graph, shipped_facts, shipped_names

    is_file = Path(model).is_file() and not model.endswith(".onnx")
    if batch is None and (is_file or model in shipped_names()):
        return encode_graph(find_graph(model))
    if is_file:
        raise GraphError(f"{model} is a graph file, its batch is fixed: leave --batches out, or name the model")
    if ":" not in model and not model.endswith(".onnx") and model not in _zoo():
        raise GraphError(f"no graph file, shipped graph or zoo model {model!r}: see `layoutopt capture --list`")
    command = shipped_facts()[model]["command"].split() if model in shipped_names() else []
    seq = int(command[command.index("--seq") + 1]) if "--seq" in command else None
    return encode_graph(capture_model(model, batch=batch, seq=seq)[0])


def _zoo() -> Mapping[str, str]:
    try:
        from layoutopt.zoo import MODELS
    except ImportError as error:
        raise GraphError(f"capturing needs {error.name}: pip install 'layoutopt[torch]'") from error
    return MODELS


def identity(cell: Cell) -> Row:
    """The columns that say which plan a row is of."""
    return asdict(cell) | {"memory": cell.memory or ""}


def refusal(cell: Cell, status: str, message: str) -> Row:
    """The row of a cell without a plan."""
    first, *rest = [line.strip() for line in message.splitlines() if line.strip()] or [status]
    return identity(cell) | {"status": status, "message": " ".join([first, *rest])}


def plan_bytes(plan: Plan) -> bytes:
    """A plan file without the seconds that its solver took: equal plans have equal bytes."""
    return encode(with_report(plan, seconds=0.0))


def solve(task: Task) -> tuple[Row, bytes | None]:
    """The row of a task and, where it is wanted, its plan file's bytes. What has no plan is a row as well."""
    from layoutopt.facade import solve_plan
    from layoutopt.pricing_apart import in_one_process
    from layoutopt.pricing_rows import prices_kept
    from layoutopt.stepcost import predict_step

    cell = task.cell
    try:
        graph, model = _decoded(task.graph), _device(task.device)
        with in_one_process(), prices_kept():  # other workers have the other cores; rows of a graph come together
            plan = solve_plan(
                graph,
                model,
                strategy=cell.strategy,
                memory=cell.memory,
                time_limit_s=task.time_limit_s,
                storage=task.storage,
            )
    except InfeasibleError as error:
        return refusal(cell, "INFEASIBLE", str(error)), None
    except DeviceError as error:
        return refusal(cell, "DEVICE", str(error)), None
    except LayoutOptError as error:
        return refusal(cell, "ERROR", str(error)), None
    data = plan_bytes(plan)
    row: Row = {
        "status": plan.solver.status,
        "message": "",
        "objective_ns": plan.solver.objective_ns,
        "bound_ns": plan.solver.bound_ns,
        "gap": plan.solver.gap,
        "predicted_step_s": predict_step(plan, graph, model).step_s,
        "arena_bytes": plan.arena_bytes,
        "ops": len(plan.ops),
        "storages": plan.solver.storages,
        "candidates": plan.solver.candidates,
        "choices": plan.solver.choices,
        "relayouts": len(plan.relayouts),
        "relayout_bytes": sum(r.bytes_moved for r in plan.relayouts),
        "rewrites": " ".join(plan.rewrites),
        "graph_hash": plan.graph_hash,
        "device_hash": plan.device_hash,
        "plan_sha256": hashlib.sha256(data).hexdigest(),
        "solve_s": plan.solver.seconds,
    }
    return identity(cell) | row, data if task.keep_plan else None


@lru_cache(maxsize=8)
def _decoded(data: bytes) -> Any:
    from layoutopt.graphfile import decode

    return decode(data)


@lru_cache(maxsize=32)
def _device(text: str) -> Any:
    from costmodel.device import loads

    return loads(text)

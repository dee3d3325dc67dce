"""The training graph file: MessagePack in zlib behind an 8-byte magic, versioned, loadable without torch."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import msgspec

from layoutopt.errors import GraphError
from layoutopt.files import write_atomic
from layoutopt.graph import Expr, Op, Operand, Tensor, TrainingGraph
from layoutopt.view import Step, View

__all__ = ["FORMAT_VERSION", "decode", "decode_meta", "encode", "encode_body", "load", "save"]

MAGIC = b"LAYOPTG\n"
FORMAT_VERSION = 1


def _plain_attr(value: Any) -> Any:
    return {"code": value.code, "results": value.results} if isinstance(value, Expr) else value


def _body(graph: TrainingGraph) -> dict[str, Any]:
    def operand(o: Operand) -> Any:
        return [o.tensor, [[s.kind, s.args] for s in o.view.steps]]

    return {
        "tensors": [[t.name, t.shape, t.dtype, t.role, t.init, t.of] for t in graph.tensors.values()],
        "ops": [
            [
                op.name,
                op.kind,
                [operand(o) for o in op.inputs],
                [operand(o) for o in op.outputs],
                {k: _plain_attr(v) for k, v in sorted(op.attrs.items())},
                op.phase,
                op.source,
                op.inplace,
            ]
            for op in graph.ops
        ],
        "outputs": graph.outputs,
        "constants": dict(sorted(graph.constants.items())),
    }


def encode_body(graph: TrainingGraph) -> bytes:
    """Canonical bytes of everything that defines the computation."""
    return msgspec.msgpack.encode(_body(graph))


def encode(graph: TrainingGraph) -> bytes:
    """The whole file as bytes."""
    payload = {"version": FORMAT_VERSION, "name": graph.name, "meta": graph.meta, **_body(graph)}
    return MAGIC + zlib.compress(msgspec.msgpack.encode(payload), 9)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _attr(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"code", "results"}:
        return Expr(_tuples(value["code"]), _tuples(value["results"]))
    return _tuples(value)


def _operands(raw: Any) -> tuple[Operand, ...]:
    return tuple(Operand(name, View(tuple(Step(k, tuple(a)) for k, a in steps))) for name, steps in raw)


def decode(data: bytes, where: str = "graph") -> TrainingGraph:
    """The graph in ``data``; ``where`` names it in errors.

    Raises:
        GraphError: not a graph file, damaged, or of another version.
    """
    if not data.startswith(MAGIC):
        raise GraphError(f"{where} is not a training graph file (expected one written by `layoutopt capture`)")
    try:
        raw = msgspec.msgpack.decode(zlib.decompress(data[len(MAGIC) :]))
        version = raw["version"]
        if version != FORMAT_VERSION:
            raise GraphError(
                f"{where} has graph format {version}; this layoutopt reads {FORMAT_VERSION}: capture it anew"
            )
        tensors = {t[0]: Tensor(t[0], tuple(t[1]), *t[2:]) for t in raw["tensors"]}
        ops = [
            Op(
                o[0],
                o[1],
                _operands(o[2]),
                _operands(o[3]),
                {k: _attr(v) for k, v in o[4].items()},
                o[5],
                o[6],
                _tuples(o[7]),
            )
            for o in raw["ops"]
        ]
        return TrainingGraph(raw["name"], tensors, ops, tuple(raw["outputs"]), raw["constants"], raw["meta"])
    except (zlib.error, msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise GraphError(f"{where} is damaged ({error}): capture it anew") from error


def decode_meta(data: bytes, where: str = "graph") -> dict[str, Any]:
    """Only ``meta`` of the graph in ``data``: much quicker than the graph.

    Raises:
        GraphError: not a graph file, or damaged.
    """
    if not data.startswith(MAGIC):
        raise GraphError(f"{where} is not a training graph file (expected one written by `layoutopt capture`)")
    try:
        return dict(msgspec.msgpack.decode(zlib.decompress(data[len(MAGIC) :]), type=_Head).meta)
    except (zlib.error, msgspec.DecodeError) as error:
        raise GraphError(f"{where} is damaged ({error}): capture it anew") from error


class _Head(msgspec.Struct):
    meta: dict[str, Any]


def save(graph: TrainingGraph, path: str | os.PathLike[str]) -> None:
    """Write the graph; nothing half-written stays behind."""
    write_atomic(path, encode(graph))


def load(path: str | os.PathLike[str]) -> TrainingGraph:
    """Read a graph file.

    Raises:
        GraphError: the file is missing or is no graph.
    """
    file = Path(path)
    if not file.is_file():
        raise GraphError(f"no training graph at {file}: write one with `layoutopt capture MODEL -o {file}`")
    return decode(file.read_bytes(), str(file))

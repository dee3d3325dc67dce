"""Views: how an operation sees a stored tensor under other logical axes.

A :class:`View` is a chain of steps (reshape, permute, expand, slice) from a tensor's stored shape to the shape an
operation works on. It applies to a shape, to a numpy array and to a :class:`~layoutopt.layout.Layout`, always with the
same meaning; on a layout it may answer None, and then the tensor must be laid out anew before that operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from layoutopt.errors import GraphError
from layoutopt.layout import Layout

__all__ = ["IDENTITY", "Step", "View"]


class Step(NamedTuple):
    """One view step: ``("reshape", shape)``, ``("permute", order)``, ``("expand", shape)`` or
    ``("slice", (axis, start, stop, step))``.
    """

    kind: str
    args: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """A chain of view steps, applied first to last."""

    steps: tuple[Step, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    def then(self, *steps: Step | tuple[str, tuple[int, ...]]) -> View:
        """This view followed by more steps; neighbouring reshapes and permutes are merged."""
        out = list(self.steps)
        for raw in steps:
            step = Step(raw[0], tuple(int(a) for a in raw[1]))
            if step.kind not in ("reshape", "permute", "expand", "slice"):
                raise GraphError(f"unknown view step {step.kind!r}: expected reshape, permute, expand or slice")
            if out and out[-1].kind == step.kind == "reshape":
                out[-1] = step
            elif out and out[-1].kind == step.kind == "permute":
                out[-1] = Step("permute", tuple(out[-1].args[a] for a in step.args))
            else:
                out.append(step)
            if out[-1].kind == "permute" and out[-1].args == tuple(range(len(out[-1].args))):
                out.pop()
        return View(tuple(out))

    def simplified(self, shape: tuple[int, ...]) -> View:
        """The same view of a tensor of ``shape`` with steps that change nothing removed."""
        out = View()
        for step in self.steps:
            after = _step_shape(step, shape)
            if step.kind == "permute" or after != shape:
                out = out.then(step)
            shape = after
        return out

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape seen when viewing a tensor of ``shape``."""
        for step in self.steps:
            shape = _step_shape(step, shape)
        return shape

    def array(self, x: np.ndarray) -> np.ndarray:
        """The view of an array (numpy may copy)."""
        for kind, args in self.steps:
            if kind == "reshape":
                x = x.reshape(args)
            elif kind == "permute":
                x = x.transpose(args)
            elif kind == "expand":
                x = np.broadcast_to(x, args)
            else:
                axis, start, stop, step = args
                x = x[(slice(None),) * axis + (slice(start, stop, step),)]
        return x

    def layout(self, layout: Layout) -> Layout | None:
        """The layout under which the viewed axes lie in the same storage, or None where none exists."""
        out: Layout | None = layout
        for kind, args in self.steps:
            if out is None:
                return None
            if kind == "reshape":
                out = out.reshape(args)
            elif kind == "permute":
                out = out.permute(args)
            elif kind == "expand":
                out = out.expand(args)
            else:
                out = out.slice(*args)
        return out

    @property
    def is_bijective(self) -> bool:
        """Whether every stored element is seen exactly once (no expand, no slice)."""
        return all(step.kind in ("reshape", "permute") for step in self.steps)

    def inverse(self, shape: tuple[int, ...]) -> View:
        """The view that undoes a bijective view of a tensor of ``shape``."""
        if not self.is_bijective:
            raise GraphError("only reshapes and permutes can be undone; this view slices or expands")
        undone: list[Step] = []
        for step in self.steps:
            if step.kind == "reshape":
                undone.append(Step("reshape", shape))
            else:
                order = [0] * len(step.args)
                for i, a in enumerate(step.args):
                    order[a] = i
                undone.append(Step("permute", tuple(order)))
            shape = _step_shape(step, shape)
        return View().then(*reversed(undone))

    def describe(self) -> str:
        """For people: ``reshape[3,13,4,15] permute[0,2,1,3]``."""
        return " ".join(f"{kind}[{','.join(map(str, args))}]" for kind, args in self.steps) or "whole"


IDENTITY = View()


def _step_shape(step: Step, shape: tuple[int, ...]) -> tuple[int, ...]:
    kind, args = step
    if kind == "reshape":
        if prod(args) != prod(shape):
            raise GraphError(f"view reshape to {args} of shape {shape}: element counts differ")
        return args
    if kind == "permute":
        if sorted(args) != list(range(len(shape))):
            raise GraphError(f"view permute {args} does not match shape {shape}")
        return tuple(shape[a] for a in args)
    if kind == "expand":
        lead = len(args) - len(shape)
        if lead < 0 or any(n not in (1, m) for n, m in zip(shape, args[lead:], strict=True)):
            raise GraphError(f"view expand to {args} of shape {shape}: extents must match or be 1")
        return args
    axis, start, stop, stride = args
    if not 0 <= axis < len(shape) or stride < 1 or not 0 <= start < stop <= shape[axis]:
        raise GraphError(f"view slice {start}:{stop}:{stride} of axis {axis} does not fit shape {shape}")
    return (*shape[:axis], -(-(stop - start) // stride), *shape[axis + 1 :])

"""Counts of what a kernel does: the numbers that a prediction is made of.

For every access of a nest ``costmodel/launches.py`` works out, for each suffix of the loops around it (one execution,
the innermost loop, the two innermost, … the whole launch), how many distinct cache lines it touches. Traffic between
two levels then follows the *layer condition*: going outwards, as long as what one iteration of a loop touches fits in a
cache, all reuse between its iterations hits, and the misses are the distinct lines; where it does not fit, each
iteration misses anew. (Hammer, Eitzinger, Hager, Wellein: Kerncraft, 2017; counted operations by stride class: loopy.)

The counts are approximations in closed form, exact for affine accesses over dense or blocked layouts whose tiles divide
their shapes, and cheap: a planner asks for tens of thousands.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from costmodel.launches import Machine, launch_counts
from kernels.families.contraction_epilogue import epilogue_width
from kernels.spec import Kernel, OpSpec
from layoutopt.graph import PRODUCTS

__all__ = ["COMPUTE", "FEATURES", "LAUNCH", "MEMORY", "Machine", "features", "kept_features", "transcendentals"]

LAUNCH = ("launches", "groups", "items")
COMPUTE = (
    "trips",
    "flops",
    "flop_slots",
    "transcendentals",
    "transcendental_slots",
    "index_shifts",
    "index_divisions",
    "vector_loads",
    "scalar_loads",
    "vector_stores",
    "scalar_stores",
)
MEMORY = (
    "request_lines",
    "strided",
    "conflicts",
    "near_bytes",
    "middle_bytes",
    "memory_bytes",
    "strided_middle_bytes",
    "unique_bytes",
)
FEATURES = LAUNCH + COMPUTE + MEMORY
"""In order. All but ``launches`` are per compute unit: divided by the parallelism that the work groups allow.

- groups, items: work groups, work items; trips: iterations of innermost loops.
- transcendentals: evaluations of functions that take many instructions, in units of one exp.
- flop_slots, transcendental_slots: the same over the widest vector.
- index_shifts, index_divisions: digits of tiled or merged axes that an access' index takes apart, by powers of two and
  by other numbers (before a compiler or a kernel moves them out of a loop).
- vector_*, scalar_*: instructions; an access that is not contiguous along its vector is one scalar access a lane.
- request_lines: distinct lines per request (a wave's on a GPU, a work item's on a CPU), summed.
- strided: executions that no sequential stream serves: the nearest two loops that move them stride over lines.
- conflicts: executions under lanes or loops whose lines fall into fewer sets of the near cache than hold them.
- near_bytes, middle_bytes, memory_bytes: line traffic that the first, second and last cache miss; a store counts twice
  (fetched, written back). strided_middle_bytes: the part of middle_bytes under a strided innermost loop.
- unique_bytes: lines of all operands.
"""

_EXPS = {
    "exp": 1.0,
    "log": 1.0,
    "erf": 2.5,
    "tanh": 2.0,
    "pow": 3.0,
    "div": 0.3,
    "recip": 0.3,
    "sqrt": 0.3,
    "rsqrt": 0.3,
}
"""What a function takes, in units of exp: lengths of the usual vector implementations."""
_ATTENTION = frozenset(("attention", "attention_grad"))
_EXP_KINDS = frozenset(("softmax", "log_softmax", "log_softmax_grad", "cross_entropy", "cross_entropy_grad"))


def features(kernel: Kernel, machine: Machine) -> tuple[float, ...]:
    """The counts of all launches of a kernel, in the order of ``FEATURES``."""
    total: tuple[float, ...] | list[float] = (0.0,) * len(FEATURES)
    share = 1.0
    for launch in kernel.launches:
        counts, share = launch_counts(kernel, launch, machine)
        total = [a + b for a, b in zip(total, counts, strict=True)]
    exps = transcendentals(kernel) / share
    if exps:
        total = list(total)
        total[FEATURES.index("transcendentals")] += exps
        total[FEATURES.index("transcendental_slots")] += exps / _function_width(kernel)
    return tuple(total)


def kept_features(kernel: Kernel, machine: Machine) -> tuple[float, ...]:
    """``features``, kept with the kernel: a planner prices the same ones again after every calibration."""
    values: tuple[float, ...] | None = kernel.memo.get(machine)
    if values is None:
        values = kernel.memo[machine] = features(kernel, machine)
    return values


def _function_width(kernel: Kernel) -> int:
    """Values that functions are evaluated for at a time."""
    if kernel.spec.kind in PRODUCTS:
        return epilogue_width(kernel)
    if kernel.spec.kind in _ATTENTION:  # packed first, however it is read
        return dict(kernel.variant.params).get("v", 1)
    return max(a.width for launch in kernel.launches for phase in launch.nest.phases for a in phase.accesses)


def transcendentals(kernel: Kernel) -> float:
    """Evaluations of functions that are not one instruction, in exps, from the op's kind and its expression."""
    return _exps(kernel.spec)


@lru_cache(maxsize=1 << 12)
def _exps(spec: OpSpec) -> float:
    elems = prod(spec.shapes[spec.inputs])
    program = spec.attr("epilogue" if spec.kind in PRODUCTS else "expr")
    if program is not None:
        return elems * sum(_EXPS.get(op, 0.0) for op, *_ in program.code)
    if spec.kind in _ATTENTION:
        (b, m, _), (_, n, _) = spec.shapes[:2]
        programs = [value for key, value in spec.attrs if key in ("score", "drop", "grad")]
        each = 1.0 + sum(_EXPS.get(op, 0.0) for program in programs for op, *_ in program.code)
        return b * m * n * each
    if spec.kind in _EXP_KINDS:
        return float(max(prod(shape) for shape in spec.shapes))
    return 0.0

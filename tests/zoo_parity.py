"""Training steps of the zoo's models on a device, beside torch in float64: loss, every gradient, every update.

Shared by ``tests/test_zoo_devices.py`` and ``benchmarks/parity.py``; needs torch and transformers, but neither pytest
nor hypothesis. The reference is torch in float64, not in float32: torch's own rounding is as large as the device's, and
a difference of the two would blame the device for both (:func:`torch_float32_error` says how large torch's is).

Each model has its full-size code at reduced depth and sizes that are multiples of no tile. A run makes two steps of SGD
with momentum in one arena that starts as NaN, padding included, so that the second step finds what the first one left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np

from kernels.execute import Executor
from kernels.runtime import Runtime
from kernels.spec import DeviceLimits
from layoutopt.capture import capture
from layoutopt.graph import TrainingGraph
from layoutopt.optimizers import Sgd, step_values
from layoutopt.passes import run_passes
from layoutopt.plan import Plan
from layoutopt.rewrites import REWRITES, rewritten
from tests.plans import any_of, mixed, naive_plan, r_tile, row_major, solver_plan
from tests.zoo_cases import example, values_of, wide_steps

__all__ = [
    "CASES",
    "MORE",
    "PLANS",
    "QUERY_OF",
    "TOLERANCE",
    "Case",
    "Measured",
    "case",
    "measure",
    "plan_of",
    "rounding",
    "torch_float32_error",
    "zero_in_theory",
]

TOLERANCE = 2e-4
"""Of ‖got − expected‖ / ‖expected‖, parameter by parameter."""

OPTIMIZER = Sgd(lr=0.1, momentum=0.9)
STEPS = 2

CASES = {
    "llama-odd": "llama-3.2-1b",
    "qwen-odd": "qwen2.5-1.5b",
    "gemma-odd": "gemma-2-2b",
    "bert-tiny": "bert-large",
    "vit-odd": "vit-large",
    "unet-odd": "sd-1.5-unet",
    "whisper-odd": "whisper-large-v3",
    "gpt2-odd": "gpt2",
    "opt-odd": "opt-350m",
    "swin-odd": "swin-tiny",
    "llama-odd:lora": "llama-3.2-1b",
    "bert-tiny:lora": "bert-large",
}
"""``MODEL`` or ``MODEL:MODE``, and the full-size model that has the same code."""

MORE = {
    "distilbert-odd": "distilbert",
    "clip-odd": "clip",
    "vit-odd:lora": "vit-large",
    "unet-odd:lora": "sd-1.5-unet",
    "whisper-odd:lora": "whisper-large-v3",
    "gpt2-odd:lora": "gpt2",
    "swin-odd:lora": "swin-tiny",
}
"""Further ones, for a complete record."""

Planner = Callable[[TrainingGraph, DeviceLimits, Iterable[str]], Plan]

PLANS: dict[str, Planner] = {
    "row-major": lambda graph, limits, keep: naive_plan(graph, limits, row_major, reuse=True, keep=keep),
    "r-tile": lambda graph, limits, keep: naive_plan(graph, limits, r_tile, reuse=True, keep=keep),
    "mixed": lambda graph, limits, keep: naive_plan(
        graph, limits, mixed(1, kinds=1), any_of(1), relayouts_share=0.2, reuse=True, keep=keep
    ),
    "rewritten": lambda graph, limits, keep: naive_plan(
        rewritten(graph, [name for name in REWRITES if name != "half"]),
        limits,
        mixed(2, kinds=1),
        any_of(2),
        relayouts_share=0.2,
        reuse=True,
        keep=keep,
    ),
    "solver": solver_plan,
}
"""From a graph, a device's limits and tensors to keep. ``mixed`` has layouts, kernels and relayouts at random, and so
has ``rewritten``, after every rewrite but that to float16; ``solver`` is what planning makes of an uncalibrated
device."""


@dataclass(frozen=True)
class Case:
    """A model's captured step and what torch makes of it in float64.

    Attributes:
        label: a key of :data:`CASES` or :data:`MORE`.
        graph: after the passes.
        start: parameters and state by name.
        inputs: one batch.
        losses: of each step.
        gradients: of the first step, by trained parameter.
        end: trained parameters after the last step.
    """

    label: str
    graph: TrainingGraph
    start: Mapping[str, np.ndarray]
    inputs: Mapping[str, np.ndarray]
    losses: tuple[float, ...]
    gradients: Mapping[str, np.ndarray]
    end: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Measured:
    """Relative errors of one run.

    Attributes:
        losses: of each step.
        gradients: by parameter, ‖got − expected‖ / ‖expected‖.
        updates: by parameter, the same of its change over all steps, what float32 rounds of the parameter set aside.
        ops: of the graph that ran.
        launches: kernels launched in a step.
        relayouts: of the plan.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, float]
    updates: Mapping[str, float]
    ops: int
    launches: int
    relayouts: int

    def worst(self) -> tuple[float, str]:
        """The largest error and what it is of; NaN is larger than any number."""
        errors = [(e, f"loss of step {i + 1}") for i, e in enumerate(self.losses)]
        errors += [(e, f"gradient of {n}") for n, e in self.gradients.items()]
        errors += [(e, f"update of {n}") for n, e in self.updates.items()]
        return max(errors, key=lambda pair: (np.isnan(pair[0]), pair[0]))


@lru_cache(maxsize=2)
def case(label: str) -> Case:
    """Capture a model, and train it with torch.

    Raises:
        GraphError: the model's library is not installed.
    """
    name, _, mode = label.partition(":")
    module, batch, loss = example(name, mode=mode or "full")
    graph, _ = run_passes(capture(module, batch, loss=loss, optimizer=OPTIMIZER, keep_grads=True))
    values = values_of(graph, module, batch)
    inputs = {t.name: values.pop(t.name) for t in graph.by_role("input") if t.name in values}
    losses, gradients, end = wide_steps(module, batch, loss, STEPS, OPTIMIZER.lr, OPTIMIZER.momentum)
    return Case(label, graph, values, inputs, tuple(losses), gradients, end)


@lru_cache(maxsize=8)
def plan_of(label: str, limits: DeviceLimits, which: str) -> Plan:
    """One of :data:`PLANS` for a case."""
    return PLANS[which](case(label).graph, limits, ())


QUERY_OF = {"key": "query", "k_proj": "q_proj", "k_lin": "q_lin"}
"""What models call the projections of keys and of queries."""


def zero_in_theory(expected: Case) -> Iterator[tuple[str, str]]:
    """Parameters whose gradient is zero in exact arithmetic, each with one to measure it by.

    The bias of an attention's keys adds the same number to every score of a query, which softmax takes out again
    (unless it is rotated first), so that any value is rounding. It is measured by the bias of the queries.
    """
    largest = max(float(np.linalg.norm(g)) for g in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        if np.linalg.norm(gradient) < 1e-12 * largest:
            yield name, reduce(lambda text, pair: text.replace(*pair), QUERY_OF.items(), name)


def rounding(expected: Case, name: str) -> float:
    """What float32 may take from a parameter in all steps: each rounds it once, by 2^-24 of it at most."""
    return STEPS * 2.0**-24 * float(np.linalg.norm(expected.end[name]))


def relative(difference: np.ndarray, scale: np.ndarray, allowed: float = 0.0) -> float:
    """‖difference‖ / ‖scale‖, of what is more than ``allowed``."""
    return float(max(np.linalg.norm(difference) - allowed, 0.0) / max(np.linalg.norm(scale), 1e-30))


def measure(runtime: Runtime, label: str, which: str) -> Measured:
    """Run a case by a plan and compare.

    Raises:
        GraphError: the model's library is not installed.
        DeviceError: the plan does not fit the device, or a kernel does not build.
    """
    expected, plan = case(label), plan_of(label, runtime.limits, which)
    graph = expected.graph
    gradient_of = {t.of: t.name for t in graph.by_role("gradient") if t.name in graph.outputs}
    run = Executor(runtime, graph, plan, expected.start, poison=True)
    losses, got = [], {}
    for step in range(STEPS):
        run.step({**expected.inputs, **step_values(graph, step + 1)})
        losses.append(abs(run.loss() / expected.losses[step] - 1))
        got = got or {name: run.read(gradient_of[name]).astype(np.float64) for name in expected.gradients}
    end = {name: run.read(name).astype(np.float64) for name in expected.end}
    launches = run.launches
    run.close()

    beside = dict(zero_in_theory(expected))
    gradients, updates = {}, {}
    for name, gradient in expected.gradients.items():
        scale = beside.get(name, name)
        gradients[name] = relative(got[name] - gradient, expected.gradients[scale])
        change = expected.end[scale] - expected.start[scale]
        updates[name] = relative(end[name] - expected.end[name], change, rounding(expected, name))
    return Measured(tuple(losses), gradients, updates, len(plan.ops), launches, len(plan.relayouts))


@lru_cache(maxsize=2)
def torch_float32_error(label: str) -> float:
    """The worst relative error of torch's own gradients in float32, on the processor."""
    name, _, mode = label.partition(":")
    module, batch, loss = example(name, mode=mode or "full")
    value = loss(module.train(), batch)[0] if loss else module.train()(**batch).loss
    value.backward()
    expected = case(label)
    beside = dict(zero_in_theory(expected))
    got = {n: p.grad.double().numpy() for n, p in module.named_parameters() if p.grad is not None}
    return max(relative(got[n] - g, expected.gradients[beside.get(n, n)]) for n, g in expected.gradients.items())

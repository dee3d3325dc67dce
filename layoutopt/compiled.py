"""``layoutopt.compile``: a torch module's training step on an OpenCL device, in one call.

The module is captured and planned, its weights go to the device and stay there. What comes back has the module's names,
so that torch, Hugging Face and safetensors files need not know where it was trained.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from layoutopt.api_device import announce, in_words, model_of, opened
from layoutopt.compiled_batch import Batches
from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.optimizers import Optimizer, evaluation_values, step_values
from layoutopt.plan import Plan
from layoutopt.show import Progress

if TYPE_CHECKING:
    import torch
    from torch import nn

    from kernels.execute import Executor
    from kernels.runtime import Runtime
    from layoutopt.api_device import Device, GivenModel, Memory

__all__ = ["Compiled", "Evaluation", "compile"]


def compile(
    module: nn.Module,
    example: Any,
    *,
    loss: Any = None,
    optimizer: Any = "adamw",
    device: Device = None,
    device_model: GivenModel = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    strategy: str = "ilp",
    memory: Memory = None,
    storage: str = "fp32",
    micro_batches: int | None = None,
    dropout: bool = False,
    seed: int = 0,
    weights: str | os.PathLike[str] | None = None,
    batch_axes: Mapping[str, int] | None = None,
    keep_outputs: bool = True,
    time_limit_s: float = 60.0,
    calibration_s: float = 60.0,
) -> Compiled:
    """A module's training step, planned for a device and ready to run there.

    Args:
        module: any ``torch.nn.Module`` in float32 that gives a loss: an output with ``.loss`` (Hugging Face), a dict
            with "loss", a scalar, or a tuple that begins with one. It is left as it is; its weights are copied.
        example: a batch as the module takes it: a dict of tensors, arrays or lists, or a tuple. Its shapes are the
            step's.
        loss: for a module that gives no loss: ``(module, batch) -> loss``, or ``-> (loss, outputs)``.
        optimizer: "adamw", "sgd", ``layoutopt.AdamW(...)``, ``layoutopt.Sgd(...)``, or a ``torch.optim.AdamW`` or
            ``SGD`` over the module's parameters, whose settings are taken.
        device: an index, a part of an OpenCL device's name, or an open ``Runtime``; chosen by default.
        device_model: that the plan is priced by; the device's stored calibration by default, or one made now.
        plan: to run instead of making one: a plan of the same step, or its file.
        strategy: "ilp" (exact), "greedy", "rowmajor", …
        memory: device memory that the step may use: ``"512MiB"``, or bytes.
        storage: how large tensors lie in memory: fp32 or fp16; int8 or nf4 for weights that are only read.
        micro_batches: equal parts of the batch, one after the other; by default as memory asks for.
        dropout: leave dropout as the module has it; else it is off.
        seed: of dropout.
        weights: to start from instead of the module's: a safetensors file with its names, or a folder that Hugging
            Face's ``save_pretrained`` wrote.
        batch_axes: the axis that holds the samples, by input, where it is not the first.
        keep_outputs: keep what the module gives beside the loss, for ``evaluate``; False saves their memory.
        time_limit_s: for the exact solver.
        calibration_s: seconds to measure the device for, where it has no calibration for this step; 0 measures nothing.

    Raises:
        GraphError: torch cannot trace the module, an operation is not known, or a weight is not finite.
        DeviceError: no device, or the plan does not fit it.
        InfeasibleError: nothing fits the memory.
        LayoutOptError: a bad name or size.
    """
    import layoutopt.plan as plans
    from layoutopt.api import capture
    from layoutopt.compiled_torch import initial_of, optimizer_of, read_safetensors, values_from
    from layoutopt.facade import check_request, solve_plan
    from layoutopt.models import check_device

    if not hasattr(module, "named_parameters"):
        raise GraphError(f"cannot compile a {type(module).__name__}: give a torch.nn.Module")
    ours = optimizer_of(optimizer, module)
    given = plans.load(plan) if isinstance(plan, str | os.PathLike) else plan
    check_request([strategy], in_words(memory), storage=storage)
    values = initial_of(module) if weights is None else values_from(module, read_safetensors(weights))
    runtime = opened(device)
    graph = capture(
        module,
        example,
        loss=loss,
        optimizer=ours,
        dropout=dropout,
        batch_axes=batch_axes,
        keep_outputs=keep_outputs,
    )
    if given is None:
        check_request([strategy], in_words(memory), graph, storage, micro_batches)
        with Progress("planning") as bar:
            model = model_of(
                device_model,
                runtime,
                [graph],
                storage=storage,
                calibration_s=calibration_s,
                progress=bar.fraction,
            )
            check_device(model.name, f"device model {model.name}", runtime)
            given = solve_plan(
                graph,
                model,
                strategy=strategy,
                memory=in_words(memory),
                time_limit_s=time_limit_s,
                progress=bar.fraction,
                storage=storage,
                micro_batches=micro_batches,
            )
    return Compiled(module, graph, given, ours, runtime, values, seed=seed)


@dataclass(frozen=True)
class Evaluation:
    """What a forward pass gave.

    Attributes:
        loss: of the batch.
        outputs: what the module gave beside it, by name ("logits"), for the samples of the batch.
    """

    loss: float
    outputs: Mapping[str, np.ndarray]


class Compiled:
    """A module's training step on a device; :func:`compile` makes it.

    Attributes:
        module: as it was given; its weights are those of then, until :meth:`update_module`.
        graph: the step, as captured.
        plan: what runs.
        optimizer: whose update the step ends with.
        runtime: the device.
        steps: optimizer steps taken.
        seed: of dropout.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: TrainingGraph,
        plan: Plan,
        optimizer: Optimizer,
        runtime: Runtime,
        values: Mapping[str, np.ndarray],
        *,
        seed: int = 0,
    ) -> None:
        self.module, self.graph, self.optimizer, self.runtime = module, graph, optimizer, runtime
        self.plan, self.seed, self.steps = plan, seed, 0
        self.batches = Batches(graph)
        self._executor: Executor | None = self._started(plan, values)

    def _started(self, plan: Plan, values: Mapping[str, np.ndarray]) -> Executor:
        from kernels.execute import Executor
        from layoutopt import planner
        from layoutopt.rewrites import planned_graph
        from layoutopt.stepcost import planned_s

        planner.validate(plan, planned_graph(plan, self.graph), None, self.runtime.limits)
        announce(
            f"plan of {self.graph.name} for {self.runtime.info.name}: {plan.solver.strategy} {plan.solver.status}, "
            f"{len(plan.relayouts)} relayouts, arena {plan.arena_bytes / 2**20:.1f} MiB, predicted step "
            f"{planned_s(plan) * 1e3:.2f} ms"
        )
        held = {t.name for t in self.graph.by_role("parameter", "state")}
        return Executor(self.runtime, self.graph, plan, {n: v for n, v in values.items() if n in held})

    def __repr__(self) -> str:
        state = f"{self.steps} steps taken" if self._executor is not None else "closed"
        return f"<Compiled {self.graph.name} for {self.runtime.info.name}: plan {self.plan.solver.strategy}, {state}>"

    @property
    def _live(self) -> Executor:
        if self._executor is None:
            raise LayoutOptError(f"this compiled {self.graph.name} is closed: compile the module again")
        return self._executor

    # ---- running ----------------------------------------------------------------------------------------------------

    def step(self, batch: Any, lr: float | None = None) -> float:
        """Forward, backward and update on one batch.

        Args:
            batch: entries as the example's, as tensors, arrays or lists. Fewer samples are allowed where the loss is a
                mean cross-entropy: they count as in a batch of that size.
            lr: learning rate of this step; the optimizer's by default.

        Returns:
            The loss, before the update.

        Raises:
            GraphError: an entry is missing, unknown, of another shape or type, out of range or not finite.
            LayoutOptError: the loss is no longer finite, or the object is closed.
        """
        executor = self._live
        arrays, _ = self.batches.ready(batch)
        scalars = step_values(executor.graph, self.steps + 1, self.optimizer.lr if lr is None else lr, self.seed)
        executor.step({**arrays, **scalars})
        self.steps += 1
        loss = float(executor.read(self.graph.outputs[0]))
        if not math.isfinite(loss):
            raise LayoutOptError(
                f"the loss of step {self.steps} is {loss}, and its update has spoilt the weights: load a state dict "
                "from before, and lower the learning rate or check the data"
            )
        return loss

    def evaluate(self, batch: Any) -> Evaluation:
        """Forward and loss on one batch; nothing is updated or dropped.

        Args:
            batch: as of :meth:`step`.

        Raises:
            GraphError: as of :meth:`step`.
            LayoutOptError: the object is closed.
        """
        executor = self._live
        arrays, real = self.batches.ready(batch)
        executor.forward({**arrays, **evaluation_values(executor.graph)})
        size = self.batches.size
        outputs = {}
        for name in self.graph.outputs[1:]:
            if name not in executor.graph.outputs:
                continue  # too large to be kept by a step in micro-batches
            value = np.array(executor.read(name))
            cut = real < size and value.ndim > 0 and value.shape[0] % size == 0
            outputs[name] = value[: value.shape[0] // size * real] if cut else value
        return Evaluation(float(executor.read(self.graph.outputs[0])), outputs)

    # ---- values -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The module's state dict with the weights of now: its names, tied ones sharing a tensor, its buffers."""
        from layoutopt.compiled_torch import state_dict_of

        return state_dict_of(self.module, self._live.read)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all weights; a state dict that is refused changes nothing.

        Args:
            state: as of :meth:`state_dict`. Of tied parameters one name is enough.

        Raises:
            GraphError: a key is missing or unknown, or a value does not fit or is not finite.
        """
        from layoutopt.compiled_torch import values_from

        executor = self._live
        for name, value in values_from(self.module, state).items():
            executor.write(name, value)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Optimizer state as ``torch.optim.AdamW`` or ``SGD`` over the same parameters loads it."""
        from layoutopt.compiled_torch import optimizer_state

        return optimizer_state(self.optimizer, self.module, self.states(), self.steps)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the optimizer state, as :meth:`optimizer_state_dict` or torch give it.

        Raises:
            GraphError: it is another optimizer's, or a value does not fit.
        """
        from layoutopt.compiled_torch import read_optimizer_state

        executor = self._live
        shapes = {t.name: t.shape for t in self.graph.by_role("state")}
        values, steps = read_optimizer_state(self.optimizer, self.module, state, shapes)
        for name, value in values.items():
            executor.write(name, value)
        self.steps = self.steps if steps is None else steps

    def states(self) -> dict[str, np.ndarray]:
        """Optimizer state by the graph's names."""
        executor = self._live
        return {t.name: executor.read(t.name) for t in self.graph.by_role("state")}

    def load_states(self, states: Mapping[str, np.ndarray], steps: int) -> None:
        """Set optimizer state by the graph's names, and the steps taken."""
        executor = self._live
        for name, value in states.items():
            executor.write(name, value)
        self.steps = steps

    def update_module(self) -> nn.Module:
        """Copy the weights of now into the module, and give it."""
        from layoutopt.compiled_torch import write_to

        executor = self._live
        write_to(self.module, {t.name: executor.read(t.name) for t in self.graph.by_role("parameter")})
        return self.module

    def save_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Write the weights as ``transformers`` reads them: tied parameters once, buffers along; old file or new.

        Raises:
            LayoutOptError: safetensors is missing, or the file cannot be written.
        """
        from layoutopt.checkpoint import save_safetensors
        from layoutopt.compiled_torch import Names, save_tensors, state_dict_of
        from layoutopt.files import check_target

        check_target(path)
        state = state_dict_of(self.module, self._live.read)
        save_safetensors(path, save_tensors(state, Names.of(self.module)), {"format": "pt"})

    def load_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Set all weights from a file with the module's names.

        Raises:
            GraphError: no such file, or as :meth:`load_state_dict`.
        """
        from layoutopt.compiled_torch import read_safetensors

        self.load_state_dict(read_safetensors(path))

    # ---- life -------------------------------------------------------------------------------------------------------

    def use_plan(self, plan: Plan) -> None:
        """Run another plan of the same step from here on; values stay.

        Raises:
            GraphError: it is a plan of another step.
            DeviceError: it does not fit the device.
        """
        executor = self._live
        values = {t.name: executor.read(t.name) for t in self.graph.by_role("parameter", "state")}
        started = self._started(plan, values)
        executor.close()
        self._executor, self.plan = started, plan

    def close(self) -> None:
        """Give the device's memory back; the object is of no further use."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def __enter__(self) -> Compiled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

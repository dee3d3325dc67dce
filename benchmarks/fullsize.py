"""Zoo models at full size on the device, beside torch: loss and gradient norm of some steps from the same start.

    python benchmarks/fullsize.py MODEL… [--device SEL] [--device-model FILE] [--steps N] [--json OUT] [--smoke]

torch (eager, float32, TF32 off, on its GPU where it has one) and the planned step start from the same random weights
and take the same batches by plain SGD with momentum. Printed by step: both losses, both norms of the whole gradient;
after the first, the relative error ‖a − b‖/‖b‖ of every parameter's gradient (those whose norm is below a thousandth of
the largest are measured against that). ``--graphs DIR`` takes NAME.graph from there instead of capturing here; the
captures must keep their gradients. ``--plans DIR`` does the same for plans.
Times are the medians of the steps after the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layoutopt import graphfile, zoo
from layoutopt import plan as plans
from layoutopt.facade import solve_plan
from layoutopt.graph import TrainingGraph
from layoutopt.models import device_model, uncalibrated
from layoutopt.optimizers import Sgd, step_values
from layoutopt.passes import run_passes
from layoutopt.plan import Plan
from tests.zoo_cases import random_batch

LR = 1e-3
_TINY = 1e-3
"""Gradients smaller than this part of the largest are compared with that: some are 0 in exact arithmetic."""


@dataclass
class Run:
    """What one side did."""

    losses: list[float]
    norms: list[float]
    step_s: list[float]


def momentum(module: torch.nn.Module) -> float:
    """0 where a second state would not fit one buffer of today's devices."""
    return 0.9 if sum(p.numel() for p in module.parameters()) < 2e9 else 0.0


def captured(name: str, folder: Path | None, optimizer: Sgd) -> TrainingGraph:
    """The step, with every gradient kept."""
    file = folder / f"{name}.graph" if folder else None
    if file is not None and file.exists():
        return graphfile.load(file)
    graph, _ = run_passes(zoo.capture_zoo(name, optimizer=optimizer, keep_grads=True))
    if file is not None:
        graphfile.save(graph, file)
    return graph


def torch_run(
    module: torch.nn.Module, loss_of: Any, batches: list[dict[str, torch.Tensor]], optimizer: Sgd
) -> tuple[Run, dict[str, np.ndarray]]:
    """Torch's steps, and its first gradients."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    module = module.to(where).train()
    update = torch.optim.SGD(module.parameters(), lr=optimizer.lr, momentum=optimizer.momentum)
    run = Run([], [], [])
    first: dict[str, np.ndarray] = {}
    for batch in batches:
        here = {k: v.to(where) for k, v in batch.items()}
        began = time.perf_counter()
        update.zero_grad()
        loss = loss_of(module, here)[0] if loss_of else module(**here).loss
        loss.backward()
        gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        run.losses.append(loss.item())
        run.step_s.append(time.perf_counter() - began)
        run.norms.append(float(torch.stack([g.double().norm() for g in gradients.values()]).norm()))
        first = first or {n: g.cpu().numpy() for n, g in gradients.items()}
        began = time.perf_counter()
        update.step()
        if where == "cuda":
            torch.cuda.synchronize()
        run.step_s[-1] += time.perf_counter() - began
    return run, first


def norm(array: np.ndarray) -> float:
    """In double precision."""
    return float(torch.linalg.vector_norm(torch.from_numpy(array), dtype=torch.float64))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """‖a − b‖; the norm in double precision."""
    return float(torch.linalg.vector_norm(torch.from_numpy(a) - torch.from_numpy(b), dtype=torch.float64))


def device_run(
    executor: Any, batches: list[dict[str, np.ndarray]], expected: dict[str, np.ndarray], seed: int
) -> tuple[Run, dict[str, float]]:
    """The planned steps, and the error of each first gradient."""
    graph = executor.graph
    of = {t.of: t.name for t in graph.by_role("gradient", "output") if t.of in expected}
    missing = set(expected) - set(of)
    if missing:
        raise SystemExit(f"{graph.name}: no gradient of {sorted(missing)[:5]}")
    largest = max(norm(g) for g in expected.values())
    run, errors = Run([], [], []), {}
    for step, batch in enumerate(batches, 1):
        values = batch | step_values(graph, step, LR, seed)
        began = time.perf_counter()
        executor.step(values)
        executor.finish()
        run.step_s.append(time.perf_counter() - began)
        run.losses.append(executor.loss())
        squares = 0.0
        for parameter, tensor in of.items():
            got = executor.read(tensor)
            squares += norm(got) ** 2
            if step == 1:
                reference = expected[parameter]
                errors[parameter] = distance(got, reference) / max(norm(reference), _TINY * largest)
        run.norms.append(squares**0.5)
    return run, errors


def planned(graph: TrainingGraph, name: str, args: argparse.Namespace, runtime: Any) -> Plan:
    """A plan made before, or one made now."""
    file = args.plans / f"{name}.json" if args.plans else None
    if file is not None and file.exists():
        return plans.load(file)
    if args.smoke:
        model = uncalibrated(runtime)
    else:
        model = device_model(args.device_model, runtime, [graph], budget_s=args.calibration, announce=print)
    plan = solve_plan(graph, model, strategy="greedy" if args.smoke else args.strategy)
    if file is not None:
        plans.save(plan, file)
    return plan


def compare(name: str, args: argparse.Namespace, runtime: Any) -> dict[str, Any]:
    """One model."""
    from kernels.execute import Executor

    began = time.perf_counter()
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a GPU draws billions of numbers at once
        module, example, loss_of = zoo.build(name)
    optimizer = Sgd(lr=LR, momentum=momentum(module))
    graph = captured(name, args.graphs, optimizer)
    batches = [random_batch(example, module) for _ in range(args.steps)]
    start = {n: p.detach().cpu().numpy().copy() for n, p in module.named_parameters()}
    print(f"{name}: {sum(v.size for v in start.values()) / 1e6:.1f} M parameters, {len(graph.ops)} ops", flush=True)
    theirs, first = torch_run(module, loss_of, batches, optimizer)
    del module
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    prepared = time.perf_counter()
    plan = planned(graph, name, args, runtime)
    plan_ready = time.perf_counter()
    executor = Executor(runtime, graph, plan, start)
    ready = time.perf_counter()
    arrays = [{k: v.numpy() for k, v in b.items()} for b in batches]
    ours, errors = device_run(executor, arrays, first, seed=0)
    executor.close()
    worst = max(errors, key=lambda n: errors[n])
    print(
        f"  torch {prepared - began:.0f} s, planning {plan_ready - prepared:.0f} s, building {ready - plan_ready:.0f} s"
    )
    print(f"  plan {plan.solver.strategy} {plan.solver.status}, arena {plan.arena_bytes / 2**30:.2f} GiB")
    for i in range(args.steps):
        print(
            f"  step {i + 1}: loss {ours.losses[i]:.6f} torch {theirs.losses[i]:.6f}"
            f"   gradient norm {ours.norms[i]:.6f} torch {theirs.norms[i]:.6f}"
        )
    print(f"  worst gradient {worst}: {errors[worst]:.2e}, median {statistics.median(errors.values()):.2e}")
    times = [statistics.median(r.step_s[1:] or r.step_s) * 1e3 for r in (ours, theirs)]
    if not args.smoke:
        print(f"  ms a step {times[0]:.1f}, torch {times[1]:.1f}", flush=True)
    return {
        "model": name,
        "parameters": sum(v.size for v in start.values()),
        "command": graph.meta.get("command"),
        "ops": len(graph.ops),
        "plan": {"strategy": plan.solver.strategy, "status": plan.solver.status, "arena_bytes": plan.arena_bytes},
        "optimizer": {"lr": LR, "momentum": optimizer.momentum},
        "losses": [ours.losses, theirs.losses],
        "gradient_norms": [ours.norms, theirs.norms],
        "worst_gradient": [worst, errors[worst]],
        "median_gradient_error": statistics.median(errors.values()),
        "step_ms": times,
    }


def main() -> None:
    """Compare, print, record."""
    from kernels.runtime import Runtime, pick

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--device")
    parser.add_argument("--device-model")
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--plans", type=Path, help="folder of NAME.json, made where absent")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--strategy", default="ilp")
    parser.add_argument("--calibration", type=float, default=60.0, help="seconds, where no device model is given")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="bert-tiny, two steps, no record")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    runtime = Runtime(pick(args.device))
    if args.smoke:
        args.steps = 2
    records = []
    for name in ["bert-tiny"] if args.smoke else args.models:
        record = compare(name, args, runtime)
        if not np.allclose(record["losses"][0], record["losses"][1], rtol=1e-3) or record["worst_gradient"][1] > 1e-2:
            print(f"  {name} DIFFERS from torch", flush=True)
        records.append(record)
        if args.json:
            about = {"device": runtime.info.label, "driver": runtime.info.driver, "torch": torch.__version__}
            args.json.write_text(json.dumps({**about, "models": records}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()

"""``layoutopt demo``: a vision transformer learns handwritten digits on an OpenCL device, from calibration to accuracy.

It needs no torch: the graph was captured beforehand and ships with the package, with the command that made it in its
metadata; the images are scikit-learn's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import layoutopt.plan as plans
from layoutopt import digits
from layoutopt.compare import Row, compare
from layoutopt.errors import LayoutOptError
from layoutopt.facade import solve_all
from layoutopt.files import check_folder, write_atomic
from layoutopt.graphfile import save
from layoutopt.models import shipped
from layoutopt.show import Progress
from layoutopt.stepcost import predict_step
from layoutopt.train import Schedule, evaluate, fit
from layoutopt.tuning import calibrate_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kernels.runtime import Runtime

__all__ = ["run_demo"]

GRAPH = "vit-digits"
PEAK_LR = 2e-3
HELD_OUT = 0.2
COMPARED = ("ilp", "activation", "greedy", "ideal", "rowmajor", "rtile")
"""Strategies of the last step, which calibration has measured the kernels of; `layoutopt compare` has more."""


def run_demo(
    runtime: Runtime,
    output: Path,
    *,
    epochs: int,
    calibration_s: float,
    say: Callable[[str], None],
    bar: Progress,
    seed: int = 0,
) -> tuple[dict[str, Any], list[Row]]:
    """Calibrate, plan, train, compare; write the figures to ``output``.

    Args:
        runtime: the device.
        output: folder, made if absent: summary.json, loss.png, the device model, graph and plan.
        epochs: passes over the training images.
        calibration_s: seconds for the microbenchmarks.
        say: told what is going on.
        bar: progress.
        seed: of split, initial weights and order.

    Returns:
        The content of summary.json, and a row per strategy.
    """
    from costmodel import device as devices
    from kernels.execute import Executor

    started = time.perf_counter()
    figure = _figure()
    check_folder(output)
    output.mkdir(parents=True, exist_ok=True)
    data = digits.load()
    graph = shipped(GRAPH)
    training, held_out = data.split(HELD_OUT, seed)
    say(f"device: {runtime.info.label}")
    say(f"graph: {graph.name}, {len(graph.ops)} ops; captured by: {graph.meta.get('command', 'unknown')}")

    say(f"1/4 calibrating for up to {calibration_s:.0f} s")
    model = calibrate_for(runtime, [graph], budget_s=calibration_s, progress=bar.fraction)
    devices.save(model, output / "device.toml")
    if model.held_out:
        say(
            f"    {len(model.measurements)} kernels measured; held-out error: median "
            f"{model.held_out.median_error:.0%}, Kendall tau {model.held_out.tau:.2f}"
        )

    say("2/4 planning")
    by_strategy = solve_all(graph, model, COMPARED, progress=bar.fraction)
    plan = by_strategy["ilp"]
    save(graph, output / f"{GRAPH}.graph")
    plans.save(plan, output / "plan.json")
    predicted_s = predict_step(plan, graph, model).step_s
    say(
        f"    {plan.solver.status} in {plan.solver.seconds:.1f} s over {plan.solver.choices} choices, "
        f"gap {plan.solver.gap:.2%}, {len(plan.relayouts)} relayouts, predicted step {predicted_s * 1e3:.2f} ms"
    )

    executor = Executor(runtime, graph, plan, seed=seed)
    batch = graph.tensors[training.target].shape[0]
    steps = epochs * -(-len(training) // batch)
    say(f"3/4 training {epochs} epochs of {len(training)} images: {steps} steps")
    train_started = time.perf_counter()
    history = fit(
        executor,
        training,
        epochs=epochs,
        schedule=Schedule(PEAK_LR, steps, warmup_steps=steps // 10, cosine=True),
        seed=seed,
        on_step=lambda step, loss: bar.stage(f"step {step}/{steps} loss {loss:.3f}", step, steps),
    )
    train_seconds = time.perf_counter() - train_started
    accuracy, _ = evaluate(executor, held_out)
    say(f"    held-out accuracy {accuracy:.2%} of {len(held_out)} images, {train_seconds:.1f} s")
    _draw(figure, history.losses, accuracy, output / "loss.png")

    say("4/4 comparing strategies")
    rows = compare(graph, by_strategy, model, runtime=runtime, rounds=21, budget_s=20.0, progress=bar.stage)
    summary = {
        "accuracy": accuracy,
        "seconds": time.perf_counter() - started,
        "train_seconds": train_seconds,
        "steps": steps,
        "first_loss": history.losses[0],
        "last_loss": history.losses[-1],
        "device": runtime.info.label,
        "strategies": {
            row.strategy: {
                "status": row.status,
                "predicted_s": row.predicted_s,
                "measured_s": row.measured_s,
                "relayouts": row.relayouts,
                "relayout_bytes": row.relayout_bytes,
                "arena_bytes": row.arena_bytes,
                "misses": dict(row.misses),
            }
            for row in rows
        },
    }
    write_atomic(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary, rows


def _figure() -> Figure:
    """An empty figure, asked for first: whether there is matplotlib shows before the training and not after it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LayoutOptError("the loss curve needs matplotlib: pip install 'layoutopt[demo]'") from error
    return Figure(figsize=(7, 4), layout="constrained")


def _draw(figure: Figure, losses: list[float], accuracy: float, path: Path) -> None:
    """Loss by step, with a running mean."""
    axes = figure.subplots()
    axes.plot(losses, color="0.75", linewidth=0.8, label="loss of each step")
    window = max(len(losses) // 50, 1)
    mean = np.convolve(losses, np.ones(window) / window, mode="valid")
    axes.plot(np.arange(mean.size) + window - 1, mean, color="tab:blue", label=f"mean of {window}")
    axes.set(xlabel="step", ylabel="cross-entropy", yscale="log", title=f"held-out accuracy {accuracy:.2%}")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    picture = BytesIO()
    figure.savefig(picture, dpi=130, format="png")
    write_atomic(path, picture.getvalue())

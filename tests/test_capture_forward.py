"""Forward passes captured alone: what they compute, and that they are planned, run, compared and simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from kernels.execute import Executor  # noqa: E402
from kernels.reference import run  # noqa: E402
from kernels.runtime import Runtime, devices  # noqa: E402
from layoutopt.capture import capture, capture_forward  # noqa: E402
from layoutopt.cli import main  # noqa: E402
from layoutopt.compare import compare  # noqa: E402
from layoutopt.errors import GraphError  # noqa: E402
from layoutopt.facade import capture_model, solve_all, solve_plan  # noqa: E402
from layoutopt.models import uncalibrated  # noqa: E402
from layoutopt.passes import run_passes  # noqa: E402
from simulator.simulate import simulate  # noqa: E402
from tests.tap_cases import inputs_of, module_of  # noqa: E402

pytestmark = pytest.mark.peer


class Net(nn.Module):
    """With what differs between training and evaluation: a batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(6, 10), nn.Linear(10, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.dropout(F.gelu(self.a(x)), 0.5, self.training))


def values_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def test_outputs_are_what_is_chosen_by_name_and_in_order() -> None:
    torch.manual_seed(0)
    module, x = Net(), torch.randn(5, 6)

    def outputs(net: Any, batch: Any) -> dict[str, torch.Tensor]:
        hidden = F.gelu(net.a(batch["x"]))
        return {"last": net.b(hidden), "hidden": hidden, "twice": hidden, "first": batch["x"]}

    graph = capture_forward(module, {"x": x, "ignored": x}, outputs=outputs)
    planned, _ = run_passes(graph)
    expected = {k: v.detach().numpy() for k, v in outputs(module, {"x": x}).items()}
    for one in (graph, planned):
        assert one.outputs == ("last", "hidden", "twice", "first")
        assert {op.phase for op in one.ops} == {"forward"}
        assert {t.name for t in one.by_role("parameter")} == {"a.weight", "a.bias", "b.weight", "b.bias"}
        assert [t.name for t in one.by_role("input")] == ["x"]
        got = run(one, values_of(module) | {"x": x.numpy()})
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)
    assert module.training


def test_a_forward_pass_has_no_dropout_and_a_training_step_keeps_its_own() -> None:
    module, x = Net(), torch.randn(5, 6)
    forward = capture_forward(module, (x,))
    step = capture(module, {"x": x}, loss=lambda net, b: (net(b["x"]).square().mean(), {}), dropout=True)
    assert "seed" not in forward.tensors
    assert "seed" in step.tensors
    assert forward.meta["forward_only"] is True
    got = run(forward, values_of(module) | {"input_0": x.numpy()})
    np.testing.assert_allclose(got[forward.outputs[0]], module.eval()(x).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (lambda net, batch: {"y": net(batch["x"]), "n": 3}, "'n' as a int"),
        (lambda net, batch: {}, "gave nothing"),
        (lambda net, batch: 3.0, "as a float"),
    ],
    ids=["a number among tensors", "nothing", "a number"],
)
def test_what_is_no_tensor_is_refused(outputs: Any, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        capture_forward(Net(), {"x": torch.zeros(5, 6)}, outputs=outputs)


@pytest.mark.parametrize(
    "name", ["bert-tiny", "gpt2-odd", "opt-odd", "llama-odd", "vit-odd", "swin-odd", "whisper-odd"]
)
def test_the_zoos_forward_passes_equal_torch(name: str) -> None:
    graph, _ = capture_model(name, mode="forward")
    assert {op.phase for op in graph.ops} == {"forward"}
    assert graph.outputs == ("logits",)
    assert graph.meta["command"].endswith("--mode forward")
    if name == "whisper-odd":
        return  # its inputs are made from labels: test_zoo.py runs it whole
    module, inputs = module_of(name), inputs_of(name)
    assert {t.name for t in graph.by_role("input")} == set(inputs)
    with torch.no_grad():
        expected = module(**{k: torch.from_numpy(v) for k, v in inputs.items()}).logits.numpy()
    got = run(graph, values_of(module) | inputs)["logits"]
    real = inputs["attention_mask"].astype(bool) if expected.ndim == 3 else slice(None)
    np.testing.assert_allclose(got[real], expected[real], rtol=2e-4, atol=2e-4)


def test_a_forward_pass_needs_less_memory_than_a_step() -> None:
    from layoutopt.rewrite_updates import peak_bytes

    forward, _ = capture_model("bert-tiny", mode="forward")
    step, _ = capture_model("bert-tiny", optimizer="none")
    weights = sum(t.size_elems * t.item_bytes for t in forward.by_role("parameter"))
    alive = [peak_bytes(graph) - weights for graph in (forward, step)]
    assert alive[0] * 3 < alive[1]


def test_forward_passes_are_planned_run_compared_and_simulated(device_index: int) -> None:
    runtime = Runtime(devices()[device_index])
    model = uncalibrated(runtime)
    graph, _ = capture_model("bert-tiny", mode="forward")
    step, _ = capture_model("bert-tiny", optimizer="none")
    plans = solve_all(graph, model, ["ilp", "rowmajor"])
    assert plans["ilp"].arena_bytes < solve_plan(step, model, strategy="rowmajor").arena_bytes
    module, inputs = module_of("bert-tiny"), inputs_of("bert-tiny")
    with torch.no_grad():
        expected = module(**{k: torch.from_numpy(v) for k, v in inputs.items()}).logits.numpy()
    for plan in plans.values():
        executor = Executor(runtime, graph, plan, values_of(module), poison=True)
        for enqueue in (executor.forward, executor.step):
            enqueue(inputs)
            np.testing.assert_allclose(executor.read("logits"), expected, rtol=2e-4, atol=2e-4)
        executor.close()
    rows = compare(graph, plans, model, runtime=runtime, rounds=3, budget_s=5.0)
    assert [row.strategy for row in rows] == ["ilp", "rowmajor"]
    assert rows[0].loss == pytest.approx(rows[1].loss, rel=1e-4)
    report = simulate(graph, plans["ilp"], model)
    assert set(report.by_phase) == {"forward"}


def test_the_command_line_takes_forward_passes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["capture", "vit-odd", "--mode", "forward", "-o", "v.graph"]) == 0
    model = ["--device-model", "generic-cpu"]
    assert main(["plan", "v.graph", *model, "-o", "v.json"]) == 0
    assert main(["simulate", "v.json", *model]) == 0
    assert main(["compare", "v.graph", *model, "--strategies", "ilp,rowmajor", "--no-measure"]) == 0
    capsys.readouterr()
    assert main(["capture", "vit-odd", "--mode", "forward", "--dropout", "-o", "w.graph"]) == 2
    assert "has no dropout" in capsys.readouterr().err
    assert main(["train", "v.graph", "--data", "digits"]) == 2
    assert "has no optimizer" in capsys.readouterr().err


def test_micro_batches_of_a_forward_pass_are_refused() -> None:
    with pytest.raises(GraphError, match="micro-batches need one mean or sum"):
        capture_model("bert-tiny", mode="forward", micro_batches=3)

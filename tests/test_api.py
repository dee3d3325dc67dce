"""The package's front: names, laziness, verbs that are modules too, and what each verb takes."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import layoutopt
from layoutopt import api, graphfile
from layoutopt.errors import DeviceError, GraphError, LayoutOptError
from layoutopt.facade import passed
from layoutopt.graph import TrainingGraph
from layoutopt.models import shipped
from tests.face import USER_MODULE, own_folder, write_samples
from tests.graphs import linear_step, random_values

ROOT = Path(__file__).resolve().parent.parent
VERBS = ("calibrate", "capture", "compare", "plan", "simulate", "train")
PHONE = "adreno-740"


def mlp() -> TrainingGraph:
    return passed(linear_step())[0]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_folder(tmp_path, monkeypatch)


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- names ----------------------------------------------------------------------------------------------------------


def test_importing_and_looking_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'pyopencl', 'matplotlib', 'numba', 'networkx', 'ortools', 'numpy', 'transformers'}"
    code = f"import sys, layoutopt; dir(layoutopt); print(*sorted({heavy} & set(sys.modules)))"
    assert run(code).split() == []


def test_every_name_is_there_without_torch_or_a_device() -> None:
    code = "import sys; from layoutopt import *; print(*sorted({'torch', 'pyopencl', 'matplotlib'} & set(sys.modules)))"
    assert run(code).split() == []
    for name in layoutopt.__all__:
        assert getattr(layoutopt, name) is not None
        assert name in dir(layoutopt)
    with pytest.raises(AttributeError, match="has no attribute 'plam'"):
        layoutopt.plam  # noqa: B018


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_callable_whatever_was_imported_before(verb: str) -> None:
    code = (
        "import inspect, layoutopt, layoutopt.api\n"
        f"want = inspect.signature(layoutopt.api.{verb})\n"
        f"assert inspect.signature(layoutopt.{verb}) == want\n"
        "import layoutopt.plan, layoutopt.compare, layoutopt.train\n"
        f"assert callable(layoutopt.{verb}) and inspect.signature(layoutopt.{verb}) == want\n"
    )
    run(code)


def test_modules_that_are_verbs_stay_modules() -> None:
    code = (
        "import layoutopt\n"
        "from layoutopt import plan as plans\n"
        "import layoutopt.plan as same\n"
        "from layoutopt.plan import Plan, load\n"
        "from layoutopt.train import Schedule, evaluate, fit\n"
        "from layoutopt.compare import Row, compare\n"
        "assert plans is same is layoutopt.plan and plans.load is load and layoutopt.Plan is Plan\n"
        "assert inspect.ismodule(layoutopt.train) and layoutopt.compare.compare is compare\n"
        "import pickle; assert pickle.loads(pickle.dumps(Plan)) is Plan\n"
    )
    run("import inspect\n" + code)


def test_the_capture_verb_survives_its_module() -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    code = (
        "import layoutopt, inspect; before = inspect.signature(layoutopt.capture)\n"
        "from layoutopt.capture import capture as lower\n"
        "assert inspect.signature(layoutopt.capture) == before != inspect.signature(lower)\n"
        "assert layoutopt.capture.capture is lower\n"
    )
    run(code)


# ---- capture --------------------------------------------------------------------------------------------------------


def test_capture_takes_a_name_a_factory_and_a_module(elsewhere: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
    from torch import nn

    named = layoutopt.capture("vit-digits", batch=4, optimizer="sgd", output="digits.graph")
    assert graphfile.load("digits.graph").hash == named.hash
    assert named.meta["optimizer"]["name"] == "sgd"
    (elsewhere / "usernet.py").write_text(USER_MODULE)
    own = layoutopt.capture("usernet:net")
    net = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))

    def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(module(batch["x"]), batch["labels"])

    example = {"x": torch.zeros(5, 6), "labels": torch.zeros(5, dtype=torch.int64)}
    graph = layoutopt.capture(net, example, loss=loss, optimizer=layoutopt.Sgd(lr=0.5), name="mine")
    assert isinstance(graph, TrainingGraph)
    assert graph.name == "mine"
    assert sorted(op.kind for op in graph.ops) == sorted(op.kind for op in own.ops)
    forward = layoutopt.capture(net, (torch.zeros(5, 6),), mode="forward")
    assert {op.phase for op in forward.ops} == {"forward"}


@pytest.mark.parametrize(
    ("arguments", "named", "sentence"),
    [
        (("vit-digits", {"x": 1}), {}, "brings its own batch"),
        (("vit-digits",), {"optimizer": {"name": "sgd"}}, "takes an optimizer by name"),
        ((3,), {}, "cannot capture a int"),
        (("no-such-model",), {}, "unknown model 'no-such-model'"),
        (("vit-digits",), {"output": "nowhere/x.graph"}, "nowhere is no directory"),
    ],
)
def test_capture_refuses_in_a_sentence(arguments: tuple, named: dict, sentence: str) -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    with pytest.raises(LayoutOptError, match=sentence) as caught:
        layoutopt.capture(*arguments, **named)
    assert "\n" not in str(caught.value)


# ---- plan, simulate, compare ----------------------------------------------------------------------------------------


def test_plan_takes_a_name_a_file_a_graph_and_a_budget_in_bytes(elsewhere: Path) -> None:
    graph = mlp()
    graphfile.save(graph, "mlp.graph")
    first = layoutopt.plan(graph, device_model=PHONE, strategy="greedy", output="plan.json")
    again = layoutopt.plan(Path("mlp.graph"), device_model=PHONE, strategy="greedy", memory=2**28)
    assert isinstance(first, layoutopt.Plan)
    assert first.layouts == again.layouts
    from layoutopt.plan import load

    assert load("plan.json") == first
    with pytest.raises(layoutopt.InfeasibleError, match="the budget is 100"):
        layoutopt.plan(graph, device_model=PHONE, memory=100)
    with pytest.raises(LayoutOptError, match="unknown strategy 'best'"):
        layoutopt.plan(graph, device_model=PHONE, strategy="best")
    with pytest.raises(GraphError, match="no training graph at nothing"):
        layoutopt.plan("nothing", device_model=PHONE)


def test_plan_takes_a_device_model_as_an_object() -> None:
    from costmodel.device import load

    model = load(PHONE)
    assert layoutopt.plan(mlp(), device_model=model, strategy="rowmajor").device_name == model.name


def test_simulate_takes_a_plan_its_file_and_a_graph() -> None:
    graph = mlp()
    graphfile.save(graph, "mlp.graph")
    planned = layoutopt.plan(graph, device_model=PHONE, strategy="rowmajor", output="mlp.json")
    of_object = layoutopt.simulate(planned, graph, device_model=PHONE)
    assert isinstance(of_object, layoutopt.CacheReport)
    of_file = layoutopt.simulate("mlp.json", device_model=PHONE)
    of_graph = layoutopt.simulate("mlp.graph", strategy="rowmajor", device_model=PHONE)
    assert of_object.total == of_file.total == of_graph.total
    Path("mlp.graph").unlink()
    with pytest.raises(GraphError, match="is not beside it"):
        layoutopt.simulate("mlp.json", device_model=PHONE)
    with pytest.raises(LayoutOptError, match="leave the second out"):
        layoutopt.simulate(graph, graph, device_model=PHONE)


def test_compare_without_a_device() -> None:
    rows = layoutopt.compare(mlp(), ["greedy", "rowmajor"], device_model=PHONE, measure=False)
    assert [row.strategy for row in rows] == ["greedy", "rowmajor"]
    assert all(row.misses and row.measured_s is None for row in rows)
    with pytest.raises(LayoutOptError, match="give a list of names"):
        layoutopt.compare(mlp(), "greedy", device_model=PHONE, measure=False)


def test_compare_measures(device_index: int) -> None:
    graph = mlp()
    values = {n: v for n, v in random_values(graph).items() if graph.tensors[n].role in ("parameter", "state")}
    rows = layoutopt.compare(
        graph, ["rowmajor"], device=device_index, calibration_s=0, caches=False, rounds=3, values=values
    )
    assert rows[0].measured_s > 0
    with pytest.raises(DeviceError, match="but the device here is"):
        layoutopt.compare(mlp(), ["rowmajor"], device=device_index, device_model=PHONE)


def test_a_device_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(DeviceError, match="without a device give device_model="):
        layoutopt.plan(mlp(), device="no such device")
    with pytest.raises(LayoutOptError, match="calibration_s is -1"):
        layoutopt.plan(mlp(), calibration_s=-1)


# ---- calibrate, train -----------------------------------------------------------------------------------------------


def test_calibrate_hands_everything_on(device_index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def measure(path: Path, runtime: object, graphs: list[TrainingGraph], **settings: object) -> str:
        asked.update(path=path, graphs=[g.name for g in graphs], **settings)
        return "the model"

    monkeypatch.setattr("layoutopt.tuning.calibrate_to", measure)
    graph = mlp()
    assert layoutopt.calibrate(graph, device=device_index, budget_s=7.0, output="mine.toml") == "the model"
    assert (asked["path"], asked["graphs"], asked["budget_s"]) == (Path("mine.toml"), [graph.name], 7.0)
    layoutopt.calibrate(["vit-digits", graph], device=device_index, storage="fp16")
    assert (asked["graphs"], asked["storage"]) == (["vit-digits", graph.name], "fp16")
    with pytest.raises(LayoutOptError, match="unknown storage 'fp12'"):
        layoutopt.calibrate(storage="fp12")


def test_train_by_name_is_the_command_line_s(device_index: int) -> None:
    graph = mlp_for_training()
    graphfile.save(graph, "net.graph")
    write_samples(Path("data.npz"))
    planned = layoutopt.plan(graph, device=device_index, calibration_s=0, strategy="rowmajor", output="plan.json")
    result = layoutopt.train("net.graph", "data.npz", device=device_index, plan="plan.json", epochs=2, out_dir="run")
    assert result.strategy == planned.solver.strategy
    assert result.steps == len(result.losses) == 8
    assert (Path("run") / "model.safetensors").is_file()
    json.dumps(result.losses)
    with pytest.raises(LayoutOptError, match="train has no setting 'epoch' here"):
        layoutopt.train("net.graph", "data.npz", epoch=2)


def mlp_for_training() -> TrainingGraph:
    """The module ``net`` of ``tests/face.py``."""
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    Path("usernet.py").write_text(USER_MODULE)
    return layoutopt.capture("usernet:net")


def test_verbs_are_documented_argument_by_argument() -> None:
    for verb in VERBS:
        function = getattr(api, verb)
        for name in inspect.signature(function).parameters:
            assert f"{name}:" in (function.__doc__ or ""), f"{verb}({name}) has no line in the docstring"


def test_shipped_names_are_graphs() -> None:
    assert api.graph_of("vit-digits").hash == shipped("vit-digits").hash


def test_names_that_the_readme_showed_are_kept() -> None:
    """They are promised in docs/library.md, whatever the README shows now."""
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import layoutopt\n"
        "from kernels.execute import Executor\n"
        "from kernels.runtime import Runtime, pick\n"
        "from layoutopt import digits\n"
        "from layoutopt.facade import solve_plan\n"
        "from layoutopt.graphfile import load\n"
        "from layoutopt.models import device_model, shipped\n"
        "from layoutopt.train import Schedule, evaluate, fit\n"
        "import inspect; assert list(inspect.signature(fit).parameters)[:2] == ['executor', 'data']\n"
        "assert Schedule(peak=2e-3, total_steps=23)(1) == 2e-3\n"
        "assert callable(digits.load) and callable(layoutopt.train)\n"
    )
    run(code)

"""The Trainer against torch's own loop, resumed bit by bit, its logs, files and refusals."""

from __future__ import annotations

import csv
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'torch'")

import torch
from torch import nn
from torch.nn import functional as F

import layoutopt
from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.trainer_data import Samples, collate
from layoutopt.trainer_files import checkpoints
from tests.face import own_folder

pytestmark = pytest.mark.peer
QUICK: dict[str, Any] = {"calibration_s": 0, "strategy": "rowmajor"}
COUNT, SIZE = 22, 5


class Net(nn.Module):
    """A classifier that gives loss and logits, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.b(F.dropout(F.gelu(self.a(x)), 0.2, self.training))
        return F.cross_entropy(logits, labels), logits


def rows(count: int = COUNT) -> list[dict[str, Any]]:
    x = np.random.default_rng(5).standard_normal((count, 6), np.float32)
    return [{"x": each, "label": int(each[:3].argmax()), "name": "text"} for each in x]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def arguments(**settings: Any) -> layoutopt.TrainingArguments:
    usual: dict[str, Any] = {"per_device_train_batch_size": SIZE, "learning_rate": 0.02, "logging_steps": 3}
    return layoutopt.TrainingArguments(**usual | settings)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_folder(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A step with dropout, and its start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("xdg")))
        example = collate(rows(SIZE), ["x", "labels"])
        with layoutopt.compile(net(), example, dropout=True, **QUICK) as made:
            yield made


@pytest.fixture
def fresh(compiled: Any) -> Any:
    """The step as it was at first."""
    restart(compiled)
    return compiled


def restart(compiled: Any) -> None:
    compiled.load_state_dict(compiled.module.state_dict())
    compiled.load_states({name: np.zeros_like(value) for name, value in compiled.states().items()}, 0)


def everything(compiled: Any) -> dict[str, np.ndarray]:
    weights = {name: value.numpy() for name, value in compiled.state_dict().items()}
    return weights | compiled.states()


# ---- training -------------------------------------------------------------------------------------------------------


def test_a_run_is_torch_s(device_index: int) -> None:
    """Two passes over 22 samples in steps of 5: the last step of a pass holds two."""
    args = arguments(num_train_epochs=2, lr_scheduler_type="cosine", warmup_steps=3, logging_steps=1)
    twin, data = net().eval(), rows()
    other = torch.optim.AdamW(twin.parameters(), 1.0)
    schedule = args.schedule(10)
    expected, step = [], 0
    for epoch in range(2):
        order = np.random.default_rng((0, epoch)).permutation(COUNT)
        for start in range(0, COUNT, SIZE):
            step += 1
            chosen = [data[i] for i in order[start : start + SIZE]]
            batch = {k: torch.from_numpy(v) for k, v in collate(chosen, ["x", "labels"]).items()}
            other.param_groups[0]["lr"] = schedule(step)
            other.zero_grad()
            loss = twin(**batch)[0]
            loss.backward()
            other.step()
            expected.append(float(loss.detach()))
    options = {"device": device_index, **QUICK}
    with layoutopt.Trainer(net(), args, data, compile_options=options) as trainer:
        result = trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history]
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        for name, value in twin.state_dict().items():
            np.testing.assert_allclose(trainer.compiled.state_dict()[name].numpy(), value.numpy(), atol=2e-5)
    assert result.global_step == 10
    assert result.training_loss == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.parametrize("stop", [2, 4, 5, 7])
def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(fresh: Any, stop: int) -> None:
    args = arguments(output_dir="whole", num_train_epochs=2, save_steps=3)
    layoutopt.Trainer(fresh, args, rows()).train()
    expected = everything(fresh)
    restart(fresh)
    args = arguments(output_dir="parts", num_train_epochs=2)
    layoutopt.Trainer(fresh, args, rows(), callbacks=[Stop(stop)]).train()
    assert [path.name for path in checkpoints("parts")] == [f"checkpoint-{stop}"]
    restart(fresh)
    fresh.step(collate(rows(SIZE), ["x", "labels"]))  # whatever is on the device, the checkpoint counts
    trainer = layoutopt.Trainer(fresh, args, rows())
    assert trainer.train(resume_from_checkpoint=True).global_step == 10
    for name, value in everything(fresh).items():
        assert np.array_equal(value, expected[name]), name
    whole, parts = ({row["step"]: row["loss"] for row in logged(f"{name}/log.csv")} for name in ("whole", "parts"))
    assert parts.items() >= {step: loss for step, loss in whole.items() if int(step) > stop + 3}.items()
    with pytest.raises(LayoutOptError, match="the run has taken 10 of 10 steps"):
        trainer.train(resume_from_checkpoint=True)


def logged(file: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(file).read_text().splitlines()))


class Stop(layoutopt.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def test_a_resumed_run_takes_the_checkpoint_s_plan(fresh: Any) -> None:
    args = arguments(output_dir="run", max_steps=3)
    layoutopt.Trainer(fresh, args, rows()).train()
    expected, old = everything(fresh), fresh.plan
    other = layoutopt.plan(fresh.graph, device=fresh.runtime, calibration_s=0, strategy="rtile")
    fresh.use_plan(other)
    trainer = layoutopt.Trainer(fresh, arguments(output_dir="run", max_steps=4), rows())
    trainer.train(resume_from_checkpoint=True)
    assert fresh.plan == old
    with layoutopt.Trainer(
        net(), arguments(output_dir="run", max_steps=5), rows(), compile_options={"dropout": True, **QUICK}
    ) as anew:
        anew.train(resume_from_checkpoint="run/checkpoint-3")
        assert anew.compiled.plan == old
    assert expected.keys() == everything(fresh).keys()


def test_iterables_resume_too(fresh: Any) -> None:
    class Stream:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield from rows()

    layoutopt.Trainer(fresh, arguments(max_steps=8), Stream()).train()
    expected = everything(fresh)
    restart(fresh)
    args = arguments(max_steps=8, output_dir="run")
    layoutopt.Trainer(fresh, args, Stream(), callbacks=[Stop(6)]).train()
    restart(fresh)
    layoutopt.Trainer(fresh, args, Stream()).train(resume_from_checkpoint=True)
    for name, value in everything(fresh).items():
        assert np.array_equal(value, expected[name]), name
    with pytest.raises(LayoutOptError, match="used up after one"):
        layoutopt.Trainer(fresh, arguments(num_train_epochs=2), iter(rows())).train()
    with pytest.raises(LayoutOptError, match="needs max_steps"):
        layoutopt.Trainer(fresh, arguments(lr_scheduler_type="cosine"), Stream()).train()


# ---- evaluation, callbacks, logs ------------------------------------------------------------------------------------


def test_evaluation_is_exact_over_a_short_batch(fresh: Any) -> None:
    def accuracy(found: Any) -> dict[str, float]:
        predictions, labels = found
        return {"accuracy": float((predictions.argmax(1) == labels).mean())}

    data = rows(13)
    trainer = layoutopt.Trainer(fresh, arguments(), eval_dataset=data, compute_metrics=accuracy)
    metrics = trainer.evaluate()
    batch = {k: torch.from_numpy(v) for k, v in collate(data, ["x", "labels"]).items()}
    with torch.no_grad():
        loss, logits = net().eval()(**batch)
    assert metrics["eval_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["eval_accuracy"] == float((logits.argmax(1) == batch["labels"]).double().mean())
    assert metrics["eval_samples"] == 13
    predicted = trainer.predict(data)
    np.testing.assert_allclose(predicted.predictions, logits.numpy(), atol=1e-5)
    assert predicted.label_ids.tolist() == batch["labels"].tolist()
    assert "test_accuracy" in predicted.metrics


def test_callbacks_hear_of_everything_in_order(fresh: Any) -> None:
    heard: list[str] = []

    class Listener(layoutopt.TrainerCallback):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("on_"):
                return super().__getattribute__(name)
            return lambda args, state, control, **more: heard.append(f"{name}{state.global_step}")

    args = arguments(output_dir="run", max_steps=6, save_steps=4, eval_steps=5)
    layoutopt.Trainer(fresh, args, rows(), rows(5), callbacks=[Listener()]).train()
    text = " ".join(heard)
    assert text == (
        "on_train_begin0 on_epoch_begin0 on_step_end1 on_step_end2 on_step_end3 on_log3 on_step_end4 on_save4 "
        "on_step_end5 on_evaluate5 on_log5 on_epoch_end5 on_epoch_begin5 on_step_end6 on_log6 on_save6 on_train_end6"
    )


def test_logs_go_to_csv_tensorboard_and_logging(fresh: Any, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboardX", reason="needs the extra 'tensorboard'")
    args = arguments(output_dir="run", num_train_epochs=1, report_to=("csv", "tensorboard"))
    with caplog.at_level(logging.INFO, "layoutopt"):
        trainer = layoutopt.Trainer(fresh, args, rows(), rows(7))
        trainer.train()
    table = logged("run/log.csv")
    assert [(row["step"], bool(row["loss"]), bool(row["eval_loss"])) for row in table] == [
        ("3", True, False),
        ("5", True, False),
        ("5", False, True),
    ]
    written = events(Path("run/runs"))
    assert {(tag, step) for tag, step, _ in written} >= {("train/loss", 3), ("train/loss", 5), ("eval/loss", 5)}
    loss = next(value for tag, step, value in written if (tag, step) == ("train/loss", 3))
    assert loss == pytest.approx(float(table[0]["loss"]), rel=1e-6)
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("step 3, epoch 0.6, loss ") for line in lines)
    assert any(line.startswith("checkpoint run") for line in lines)


def events(folder: Path) -> list[tuple[str, int, float]]:
    """Scalars of event files: records of length (8 bytes), its checksum (4), content, checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in folder.glob("events*"):
        data = file.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


def test_nothing_is_printed_where_there_is_no_terminal(fresh: Any, capfd: pytest.CaptureFixture[str]) -> None:
    layoutopt.Trainer(fresh, arguments(max_steps=2), rows()).train()
    assert capfd.readouterr() == ("", "")


# ---- files ----------------------------------------------------------------------------------------------------------


def test_checkpoints_are_whole_and_few(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(output_dir="run", num_train_epochs=2, save_steps=2, save_total_limit=2)
    layoutopt.Trainer(fresh, args, rows()).train()
    assert [path.name for path in checkpoints("run")] == ["checkpoint-8", "checkpoint-10"]
    files = {"model.safetensors", "optimizer.safetensors", "plan.json", "trainer_state.json"}
    assert {path.name for path in Path("run/checkpoint-10").iterdir()} == files
    assert {path.name for path in Path("run").iterdir()} == {"checkpoint-8", "checkpoint-10", "log.csv"}
    monkeypatch.setattr("layoutopt.plan.save", broken)
    with pytest.raises(OSError, match="disk full"):
        layoutopt.Trainer(fresh, arguments(output_dir="other", max_steps=2), rows()).train()
    assert {path.name for path in Path("other").iterdir()} == {"log.csv"}


def test_what_a_killed_run_left_is_tidied(fresh: Any) -> None:
    args = arguments(output_dir="run", max_steps=2)
    layoutopt.Trainer(fresh, args, rows()).train()
    Path("run/.checkpoint-3.abc").mkdir()
    Path("run/checkpoint-2").rename("run/.checkpoint-2.def.old")  # killed between two renames
    Path("run/.checkpoint-2.def").mkdir()
    more = arguments(output_dir="run", max_steps=3)
    assert layoutopt.Trainer(fresh, more, rows()).train(resume_from_checkpoint=True).global_step == 3
    assert {path.name for path in Path("run").iterdir()} == {"checkpoint-2", "checkpoint-3", "log.csv"}


def broken(*_: object) -> None:
    raise OSError("disk full")


def test_resuming_refuses_in_a_sentence(fresh: Any) -> None:
    args = arguments(output_dir="run", max_steps=2)
    with pytest.raises(LayoutOptError, match="it holds no checkpoint"):
        layoutopt.Trainer(fresh, args, rows()).train(resume_from_checkpoint=True)
    layoutopt.Trainer(fresh, args, rows()).train()
    more = arguments(output_dir="run", max_steps=4)
    with pytest.raises(LayoutOptError, match="holds checkpoint-2 of an earlier run"):
        layoutopt.Trainer(fresh, more, rows()).train()
    with pytest.raises(LayoutOptError, match="of a run with samples 22, this one has 21"):
        layoutopt.Trainer(fresh, more, rows(21)).train(resume_from_checkpoint=True)
    slower = arguments(output_dir="run", max_steps=4, learning_rate=0.01)
    with pytest.raises(LayoutOptError, match=r"of a run with learning_rate 0\.02"):
        layoutopt.Trainer(fresh, slower, rows()).train(resume_from_checkpoint=True)
    shutil.copytree("run/checkpoint-2", "broken")
    Path("broken/trainer_state.json").write_text("{")
    with pytest.raises(LayoutOptError, match=r"trainer_state\.json is damaged"):
        layoutopt.Trainer(fresh, more, rows()).train(resume_from_checkpoint="broken")
    with pytest.raises(LayoutOptError, match="no checkpoint at nothing"):
        layoutopt.Trainer(fresh, more, rows()).train(resume_from_checkpoint="nothing")
    layoutopt.Trainer(fresh, more, rows()).train(resume_from_checkpoint=True)


# ---- data -----------------------------------------------------------------------------------------------------------


def test_every_kind_of_data_gives_the_same_batches() -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra 'dev'")
    listed = rows(7)
    columns = {"x": np.stack([row["x"] for row in listed]), "labels": np.array([row["label"] for row in listed])}
    table = datasets.Dataset.from_list([row | {"x": row["x"].tolist()} for row in listed])
    kinds = [listed, columns, table, table.with_format("torch"), layoutopt.train.Dataset(columns), iter(listed)]
    for data in kinds:
        batches = [collate(batch, ["x", "labels"]) for batch in Samples(data, "data").batches(3)]
        assert [len(batch["labels"]) for batch in batches] == [3, 3, 1]
        for name, whole in columns.items():
            np.testing.assert_allclose(np.concatenate([batch[name] for batch in batches]), whole)


def test_a_hugging_face_collator_makes_batches(fresh: Any) -> None:
    from transformers import default_data_collator

    layoutopt.Trainer(fresh, arguments(max_steps=5), rows(), data_collator=default_data_collator).train()
    ours = everything(fresh)
    restart(fresh)
    layoutopt.Trainer(fresh, arguments(max_steps=5), rows()).train()
    for name, value in everything(fresh).items():
        assert np.array_equal(value, ours[name]), name


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], "holds no samples"),
        ([{"x": [1.0] * 6}], "lacks 'labels'"),
        ([{"x": [1.0] * 6, "label": 1}, {"x": [1.0] * 7, "label": 1}], "several shapes"),
        ([{"x": [1.0] * 7, "label": 1}] * 5, "'x' has the shape .5, 7."),
        ([{"x": [float("nan")] * 6, "label": 1}] * 5, "holds 30 NaN"),
        ([{"x": "text", "label": 1}], "'x' is a str"),
        ({"x": np.zeros((3, 6)), "labels": np.zeros(2, int)}, "must have one length"),
        (torch.utils.data.DataLoader(rows(3)), "is a DataLoader"),
        (3, "is a int: give samples"),
        (None, "nothing to train on"),
    ],
)
def test_bad_data_is_one_sentence(fresh: Any, data: Any, sentence: str) -> None:
    with pytest.raises(LayoutOptError, match=sentence) as caught:
        layoutopt.Trainer(fresh, arguments(), data).train()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_train_epochs": 0}, "num_train_epochs is 0"),
        ({"logging_steps": 1.5}, "logging_steps is 1.5"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"lr_scheduler_type": "linear"}, "lr_scheduler_type 'linear'"),
        ({"report_to": ("wandb",)}, "report_to 'wandb'"),
    ],
)
def test_bad_settings_are_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LayoutOptError, match=sentence):
        arguments(**settings)


def test_what_is_no_model_is_one_sentence(fresh: Any) -> None:
    for model, settings, sentence in (
        (3, {}, "model is a int"),
        (fresh, {"compile_options": {"memory": "1GiB"}}, "compile_options are for a module"),
        (fresh, {"args": {}}, "args is a dict|nothing"),
    ):
        with pytest.raises(LayoutOptError, match=sentence):
            layoutopt.Trainer(model, train_dataset=None, **settings).train()
    with pytest.raises(LayoutOptError, match="less than one batch of 8"):
        layoutopt.Trainer(net(), train_dataset=rows(3)).train()
    with pytest.raises(LayoutOptError, match="give train_dataset"):
        layoutopt.Trainer(net()).compiled  # noqa: B018
    with pytest.raises(LayoutOptError, match="nothing to evaluate on"):
        layoutopt.Trainer(fresh).evaluate()
    with pytest.raises(LayoutOptError, match="no folder to save to"):
        layoutopt.Trainer(fresh).save_model()
    with pytest.raises(GraphError, match="lacks 'x'"):
        layoutopt.Trainer(fresh, arguments(), [(1.0, 2.0)] * 9).train()


def test_the_train_verb_takes_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layoutopt.models.device_model", lambda given, runtime, *_, **__: generic(runtime))
    result = layoutopt.train(net(), rows(), max_steps=3, per_device_train_batch_size=SIZE)
    assert (result.global_step, sorted(result.metrics)) == (3, ["train_runtime", "train_samples_per_second"])
    with pytest.raises(LayoutOptError, match="no setting 'epochs' here"):
        layoutopt.train(net(), rows(), epochs=3)


def generic(runtime: Any) -> Any:
    from layoutopt.models import uncalibrated

    return uncalibrated(runtime)

"""``layoutopt.compile`` against torch: losses and every parameter over several steps, and what it refuses."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'torch'")

import torch
from torch import nn
from torch.nn import functional as F

import layoutopt
from layoutopt.compiled import Compiled
from layoutopt.errors import GraphError, LayoutOptError
from tests import small_models
from tests.face import own_folder

pytestmark = pytest.mark.peer
QUICK: dict[str, Any] = {"calibration_s": 0, "strategy": "rowmajor"}
BATCH, SEQUENCE = 4, 11


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_folder(tmp_path, monkeypatch)


class Tied(nn.Module):
    """A language model whose head is its embedding; gives a tuple that begins with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(13, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(torch.tanh(self.mix(self.embedding(tokens)))) * self.scale
        return F.cross_entropy(logits[:, :-1].reshape(-1, 13), labels[:, 1:].reshape(-1)), logits


class Plain(nn.Module):
    """A regression, whose samples cannot be left out; gives the loss alone. One parameter is frozen, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 9), nn.Linear(9, 2)
        self.first.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.last(F.gelu(self.first(x))), y)


def text(generator: torch.Generator, batch: int = BATCH) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([SEQUENCE, 5, 8, 9])[:batch]
    return {
        "input_ids": torch.randint(0, 101, (batch, SEQUENCE), generator=generator),
        "attention_mask": (torch.arange(SEQUENCE) < lengths[:, None]).long(),
        "labels": torch.randint(0, 3, (batch,), generator=generator),
    }


def tokens(generator: torch.Generator, batch: int = BATCH) -> dict[str, torch.Tensor]:
    drawn = torch.randint(0, 13, (batch, 7), generator=generator)
    return {"tokens": drawn, "labels": drawn}


def numbers(generator: torch.Generator, batch: int = BATCH) -> tuple[torch.Tensor, ...]:
    x = torch.randn(batch, 5, generator=generator)
    return x, x[:, :2] * 2


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "bert": (partial(small_models.bert, num_hidden_layers=1), text),
    "tied": (Tied, tokens),
    "plain": (Plain, numbers),
}
OPTIMIZERS: dict[str, tuple[Any, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (layoutopt.Sgd(lr=0.05, weight_decay=0.01), lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.01)),
    "adamw": (layoutopt.AdamW(lr=2e-3), lambda p: torch.optim.AdamW(p, 2e-3)),
}


def made(name: str) -> tuple[nn.Module, list[Any]]:
    """A module and six batches; weights spread, so that no gradient is small by accident."""
    torch.manual_seed(0)
    factory, batch = MODELS[name]
    module = factory().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module, [batch(generator) for _ in range(6)]


def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
    out = module(**batch) if isinstance(batch, dict) else module(*batch)
    return out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, tuple) else out.loss


def torch_steps(module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(module, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], lr: float, name: str = "") -> None:
    """Every tensor agrees: to the bit where ``lr`` is 0, else to 1e-4 of its norm.

    Gradients of key biases are rounding (see ``tests/test_parity.py``): AdamW moves these by up to the learning rate a
    step in either direction.
    """
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        apart = ours[key] - value
        if lr and key.endswith("key.bias"):
            assert apart.abs().max() <= 12 * lr, f"{name} {key}"
        else:
            assert apart.norm() <= (1e-4 * value.norm() if lr else 0.0), f"{name} {key}"


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("model", list(MODELS))
def test_steps_are_torch_s(model: str, optimizer: str, device_index: int) -> None:
    module, batches = made(model)
    ours, theirs = OPTIMIZERS[optimizer]
    twin = copy.deepcopy(module)
    other = theirs([p for p in twin.parameters() if p.requires_grad])
    before = copy.deepcopy(module.state_dict())
    with layoutopt.compile(module, batches[0], optimizer=ours, device=device_index, **QUICK) as compiled:
        same(compiled.state_dict(), before, 0)
        losses = [compiled.step(batch) for batch in batches]
        np.testing.assert_allclose(losses, torch_steps(twin, other, batches), rtol=2e-5)
        same(compiled.state_dict(), twin.state_dict(), ours.lr, model)
        evaluated = compiled.evaluate(batches[0])
        with torch.no_grad():
            assert evaluated.loss == pytest.approx(float(loss_of(twin.eval(), batches[0])), rel=1e-4)
    same(module.state_dict(), before, 0)  # the module is as it was


def test_what_is_handed_over_goes_on_in_torch_and_back(device_index: int) -> None:
    module, batches = made("tied")
    with layoutopt.compile(module, batches[0], optimizer="adamw", device=device_index, **QUICK) as compiled:
        for batch in batches[:3]:
            compiled.step(batch)
        twin = copy.deepcopy(module)
        twin.load_state_dict(compiled.state_dict())
        other = torch.optim.AdamW(twin.parameters(), 1e-3)
        other.load_state_dict(compiled.optimizer_state_dict())
        torch_steps(twin, other, batches[3:5])
        saved = copy.deepcopy((compiled.state_dict(), compiled.optimizer_state_dict()))
        for batch in batches[3:5]:
            compiled.step(batch)
        same(compiled.state_dict(), twin.state_dict(), 1e-3)
        last = compiled.step(batches[5])
        compiled.load_state_dict(twin.state_dict())
        compiled.load_optimizer_state_dict(other.state_dict())
        assert compiled.steps == 5
        assert compiled.step(batches[5]) == pytest.approx(last, rel=1e-5)
        assert compiled.update_module() is module
        same(module.state_dict(), compiled.state_dict(), 0)
        assert module.head.weight is module.embedding.weight
        compiled.load_state_dict(saved[0])
        compiled.load_optimizer_state_dict(saved[1])
        first = [compiled.step(batch) for batch in batches[3:]]
        compiled.load_state_dict({k: v for k, v in saved[0].items() if k != "head.weight"})
        compiled.load_optimizer_state_dict(saved[1])
        assert [compiled.step(batch) for batch in batches[3:]] == first


def test_a_torch_optimizer_s_settings_are_taken() -> None:
    from layoutopt.compiled_torch import optimizer_of

    module, _ = made("tied")
    biases = [p for n, p in module.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in module.named_parameters() if not n.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    ours = optimizer_of(torch.optim.AdamW(groups, 3e-4, (0.8, 0.99), 1e-6), module)
    assert (ours.lr, ours.beta1, ours.beta2, ours.eps, ours.weight_decay) == (3e-4, 0.8, 0.99, 1e-6, 0.1)
    assert [ours.no_decay(name) for name in ("mix.bias", "mix.weight")] == [True, False]
    sgd = optimizer_of(torch.optim.SGD(module.parameters(), 0.1, 0.5), module)
    assert (sgd.lr, sgd.momentum, sgd.weight_decay) == (0.1, 0.5, 0.0)
    for wrong, sentence in (
        (torch.optim.Adam(module.parameters()), "torch.optim.Adam has no counterpart"),
        (torch.optim.SGD(module.parameters(), 0.1, 0.5, nesterov=True), "nesterov"),
        (torch.optim.AdamW(weights), "not over this module's trainable parameters"),
        (torch.optim.AdamW([groups[0], groups[1] | {"lr": 1.0}]), "one learning rate"),
        ("adam", "unknown optimizer 'adam'"),
        (None, "needs an optimizer"),
    ):
        with pytest.raises(GraphError, match=sentence):
            optimizer_of(wrong, module)


def test_a_short_batch_counts_as_torch_counts_it(device_index: int) -> None:
    module, batches = made("tied")
    short = tokens(torch.Generator().manual_seed(3), BATCH - 1)
    twin = copy.deepcopy(module)
    expected = torch_steps(twin, torch.optim.SGD(twin.parameters(), 0.1), [short])
    with layoutopt.compile(module, batches[0], optimizer=layoutopt.Sgd(0.1, 0.0), device=device_index, **QUICK) as c:
        result = c.evaluate(short)
        assert result.loss == pytest.approx(expected[0], rel=1e-5)
        assert [len(value) for value in result.outputs.values()] == [BATCH - 1]
        assert c.step(short) == pytest.approx(expected[0], rel=1e-5)
        same(c.state_dict(), twin.state_dict(), 0.1)


@pytest.fixture(scope="module")
def compiled_bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("xdg")))
        module, batches = made("bert")
        with layoutopt.compile(module, batches[0], **QUICK) as compiled:
            yield compiled, batches[0]


def lists(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in batch.items()}


def test_batches_may_be_arrays_or_lists(compiled_bert: Any) -> None:
    compiled, batch = compiled_bert
    loss = compiled.evaluate(batch).loss
    assert compiled.evaluate(lists(batch)).loss == loss
    assert compiled.evaluate({name: value.numpy() for name, value in batch.items()}).loss == loss


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"input_ids": torch.zeros(4, 12, dtype=torch.long)}, "'input_ids' has the shape .4, 12.; the step was"),
        ({"input_ids": torch.zeros(5, 11, dtype=torch.long)}, "different numbers of samples"),
        ({"input_ids": None}, "'input_ids' is a NoneType"),
        ({"input_ids": [[1, 2], [3]]}, "'input_ids' is ragged"),
        ({"input_ids": torch.full((4, 11), 101)}, "holds 101 at .0.: the rows of"),
        ({"input_ids": torch.zeros(4, 11)}, "dtype float32; the graph expects int32"),
        ({"labels": torch.tensor([0, 1, 2, 3])}, "the classes of"),
        ({"extra": torch.zeros(4)}, "no input 'extra'"),
    ],
)
def test_a_wrong_batch_is_one_sentence_and_no_step(compiled_bert: Any, change: dict, sentence: str) -> None:
    compiled, batch = compiled_bert
    before = compiled.state_dict()
    with pytest.raises(GraphError, match=sentence) as caught:
        compiled.step(batch | change)
    assert "\n" not in str(caught.value)
    same(compiled.state_dict(), before, 0)


def test_a_short_batch_of_classes_counts_too(compiled_bert: Any) -> None:
    compiled, batch = compiled_bert
    twin = compiled.module.eval()
    short = {name: value[:2] for name, value in batch.items()}
    with torch.no_grad():
        twin.load_state_dict(compiled.state_dict())
        expected = twin(**short)
    result = compiled.evaluate(short)
    assert result.loss == pytest.approx(float(expected.loss), rel=1e-5)
    np.testing.assert_allclose(result.outputs["logits"], expected.logits.numpy(), atol=1e-5)


def test_a_missing_entry_is_named(compiled_bert: Any) -> None:
    compiled, batch = compiled_bert
    with pytest.raises(GraphError, match="lacks 'labels'"):
        compiled.step({k: v for k, v in batch.items() if k != "labels"})


def test_a_state_dict_that_does_not_fit_changes_nothing(compiled_bert: Any) -> None:
    compiled, _ = compiled_bert
    good = compiled.state_dict()
    key = "classifier.weight"
    for wrong, sentence in (
        ({k: v for k, v in good.items() if k != key}, f"lacks '{key}'"),
        (good | {"other": torch.zeros(1)}, "holds 'other'"),
        (good | {key: torch.zeros(2, 2)}, f"'{key}' has the shape .2, 2."),
        (good | {key: torch.full_like(good[key], torch.nan)}, f"'{key}' of the state dict holds NaN"),
    ):
        with pytest.raises(GraphError, match=sentence):
            compiled.load_state_dict({k: v if k == key or k not in good else v + 1 for k, v in wrong.items()})
        same(compiled.state_dict(), good, 0)
    with pytest.raises(GraphError, match="no optimizer state dict"):
        compiled.load_optimizer_state_dict({})
    with pytest.raises(GraphError, match="no 'exp_avg' of parameter"):
        compiled.load_optimizer_state_dict({"state": {}, "param_groups": []})


def test_weights_go_to_transformers_and_back(compiled_bert: Any) -> None:
    from transformers import BertForSequenceClassification

    compiled, batch = compiled_bert
    layoutopt.Trainer(compiled).save_model("out")
    assert json.loads(Path("out/config.json").read_text())["architectures"] == ["BertForSequenceClassification"]
    loaded = BertForSequenceClassification.from_pretrained("out")
    with torch.no_grad():
        assert float(loaded.train()(**batch).loss) == pytest.approx(compiled.evaluate(batch).loss, rel=1e-5)
    same(loaded.state_dict(), compiled.state_dict(), 0)
    before = compiled.state_dict()
    compiled.step(batch)
    compiled.load_safetensors("out/model.safetensors")
    same(compiled.state_dict(), before, 0)
    Path("out/model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(GraphError, match="not a safetensors file, or is damaged"):
        compiled.load_safetensors("out/model.safetensors")
    with pytest.raises(LayoutOptError, match="no weights at nothing"):
        compiled.load_safetensors("nothing")
    with pytest.raises(LayoutOptError, match="is no directory"):
        compiled.save_safetensors("nowhere/x.safetensors")


def test_a_plan_can_be_given_and_changed(compiled_bert: Any) -> None:
    compiled, batch = compiled_bert
    before, loss = compiled.state_dict(), compiled.evaluate(batch).loss
    other = layoutopt.plan(compiled.graph, device=compiled.runtime, calibration_s=0, strategy="rtile")
    old = compiled.plan
    compiled.use_plan(other)
    assert compiled.plan is other
    same(compiled.state_dict(), before, 0)
    assert compiled.evaluate(batch).loss == pytest.approx(loss, rel=1e-5)
    module, batches = made("plain")
    with pytest.raises(GraphError, match="graph"):
        layoutopt.compile(module, batches[0], plan=old)
    compiled.use_plan(old)


@pytest.mark.parametrize("real", [BATCH, 2])
def test_micro_batches_are_the_same_step(real: int) -> None:
    """Of two micro-batches the second may have no sample that counts."""
    module, batches = made("tied")
    twin, batch = copy.deepcopy(module), {name: value[:real] for name, value in batches[1].items()}
    expected = torch_steps(twin, torch.optim.SGD(twin.parameters(), 0.1), [batch])
    options = {**QUICK, "optimizer": layoutopt.Sgd(0.1, 0.0), "micro_batches": 2}
    with layoutopt.compile(module, batches[0], **options) as compiled:
        assert compiled.evaluate(batch).loss == pytest.approx(expected[0], rel=1e-5)
        assert compiled.step(batch) == pytest.approx(expected[0], rel=1e-5)
        same(compiled.state_dict(), twin.state_dict(), 0.1)


def test_half_storage_saves_and_loads_to_the_bit() -> None:
    module, batches = made("tied")
    with layoutopt.compile(module, batches[0], storage="fp16", keep_outputs=False, **QUICK) as compiled:
        with torch.no_grad():
            expected = float(loss_of(module, batches[0]))
        assert compiled.step(batches[0]) == pytest.approx(expected, rel=1e-2)
        assert compiled.evaluate(batches[0]).outputs == {}
        compiled.save_safetensors("half.safetensors")
        saved, states = compiled.state_dict(), compiled.states()
        after = [compiled.step(batch) for batch in batches]
        compiled.load_safetensors("half.safetensors")
        compiled.load_states(states, 1)
        same(compiled.state_dict(), saved, 0)
        assert [compiled.step(batch) for batch in batches] == after
        assert "1 steps" not in repr(compiled)


def test_weights_from_a_folder_for_a_module_without_any() -> None:
    from safetensors.torch import save_file

    module, batches = made("tied")
    Path("sharded").mkdir()
    state = {name: value for name, value in module.state_dict().items() if name != "head.weight"}
    parts = {"a.safetensors": ["embedding.weight"], "b.safetensors": ["mix.weight", "mix.bias", "scale"]}
    for file, names in parts.items():
        save_file({name: state[name] for name in names}, Path("sharded") / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    Path("sharded/model.safetensors.index.json").write_text(json.dumps(index))
    empty = copy.deepcopy(module)
    for name, parameter in list(empty.named_parameters()):
        owner, _, key = name.rpartition(".")
        setattr(empty.get_submodule(owner), key, nn.Parameter(parameter.to("meta")))
    empty.head.weight = empty.embedding.weight
    with layoutopt.compile(empty, batches[0], weights="sharded", **QUICK) as compiled:
        same(compiled.state_dict(), module.state_dict(), 0)
        with torch.no_grad():
            assert compiled.evaluate(batches[0]).loss == pytest.approx(float(loss_of(module, batches[0])), rel=1e-5)
    Path("sharded/b.safetensors").unlink()
    with pytest.raises(GraphError, match=r"no weights at sharded.b\.safetensors"):
        layoutopt.compile(empty, batches[0], weights="sharded", **QUICK)
    Path("sharded/model.safetensors.index.json").write_text("[]")
    with pytest.raises(GraphError, match="is damaged"):
        layoutopt.compile(empty, batches[0], weights="sharded", **QUICK)


class Bad(nn.Module):
    """Sorts, which no kernel here does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x * self.weight, 1).values.square().mean()


def test_what_cannot_be_compiled_is_one_sentence() -> None:
    module, batches = made("plain")
    for arguments, named, sentence in (
        ((Bad(), (torch.zeros(3, 4),)), {}, "sort"),
        ((nn.Linear(3, 3), (torch.zeros(2, 3),)), {}, "gave no scalar loss"),
        ((module, None), {}, "needs an example batch"),
        ((module, ("text",)), {}, "cannot|give tensors"),
        ((3, ()), {}, "cannot compile a int"),
        ((module, batches[0]), {"memory": "much"}, "memory 'much' is not a size"),
        ((module, batches[0]), {"memory": 10}, "the budget is 10"),
        ((module, batches[0]), {"storage": "fp1"}, "unknown storage"),
        ((module, batches[0]), {"device_model": "adreno-740"}, "but the device here is"),
        ((module, batches[0]), {"device": "no such"}, "no such"),
    ):
        with pytest.raises(LayoutOptError, match=sentence) as caught:
            layoutopt.compile(*arguments, **{"calibration_s": 0, **named})
        assert "\n" not in str(caught.value).strip()
    with torch.no_grad():
        module.last.weight[0, 0] = torch.nan
    with pytest.raises(GraphError, match=r"'last\.weight' holds 1 NaN"):
        layoutopt.compile(module, batches[0], **QUICK)


def test_a_regression_refuses_what_it_cannot_count_and_a_closed_one_everything() -> None:
    module, batches = made("plain")
    compiled = layoutopt.compile(module, batches[0], optimizer=layoutopt.Sgd(1e30), **QUICK)
    x, y = batches[0]
    with pytest.raises(GraphError, match="give full batches"):
        compiled.step((x[:2], y[:2]))
    with pytest.raises(GraphError, match="holds 20 NaN or infinite"):
        compiled.step((x * torch.nan, y))
    with pytest.raises(LayoutOptError, match="has spoilt the weights"):
        list(map(compiled.step, batches * 2))
    compiled.close()
    compiled.close()
    calls: list[Callable[[Compiled], object]] = [
        lambda c: c.step(batches[0]),
        lambda c: c.evaluate(batches[0]),
        lambda c: c.state_dict(),
        lambda c: c.load_state_dict(module.state_dict()),
        lambda c: c.optimizer_state_dict(),
        lambda c: c.update_module(),
    ]
    for call in calls:
        with pytest.raises(LayoutOptError, match="is closed: compile the module again"):
            call(compiled)


def test_the_loss_may_be_a_function_and_dropout_may_stay(device_index: int) -> None:
    net = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    x, labels = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])

    def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits = module(batch["x"])
        return F.cross_entropy(logits, batch["labels"]), {"scores": logits}

    batch = {"x": x, "labels": labels}
    options: dict[str, Any] = {"loss": loss, "dropout": True, "device": device_index, **QUICK}
    with layoutopt.compile(net, batch, optimizer=layoutopt.Sgd(0.0, 0.0), **options) as compiled:
        result = compiled.evaluate(batch)
        with torch.no_grad():
            np.testing.assert_allclose(result.outputs["scores"], net.eval()(x).numpy(), atol=1e-5)
        steps = {compiled.step(batch) for _ in range(3)}
    assert len(steps) == 3  # each drops others

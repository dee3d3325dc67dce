"""The side network: its inputs, its start at the pretrained model, and what it learns from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")

from layoutopt.quantize import Format, dequantise, quantise  # noqa: E402
from layoutopt.side import network  # noqa: E402
from layoutopt.side.task import IGNORED, Batch, Task  # noqa: E402
from layoutopt.side.weights import initial_weights  # noqa: E402
from tests.side_cases import TASK, batch_of, task_of  # noqa: E402

pytestmark = pytest.mark.peer
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["float32", "int8", "int8:8", "int4", "int4:64", "fp4", "fp4:16", "nf4:64", "nf4"])
@pytest.mark.parametrize("cols", [1, 7, 8, 64, 67, 200])
def test_dequantised_numbers_are_numpys_bit_by_bit(kind: str, cols: int) -> None:
    fmt = Format.parse(kind)
    x = np.random.default_rng(cols).standard_normal((9, cols), np.float32) * np.float32(3)
    x[4] = 0
    words, scales = quantise(x, fmt)
    got = network.dequantise(torch.tensor(words), torch.tensor(scales), cols, fmt)
    assert got.dtype == torch.float32
    assert got.numpy().tobytes() == dequantise(words, scales, cols, fmt).tobytes()


@pytest.mark.parametrize("kind", ["int8", "int4", "fp4", "nf4"])
def test_every_code_dequantises_as_numpy_does(kind: str) -> None:
    fmt = Format(kind)
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (50, 4), np.int32)
    scales = np.random.default_rng(1).random((50, 1), np.float32)
    cols = 4 * fmt.codes_per_word
    got = network.dequantise(torch.tensor(words), torch.tensor(scales), cols, fmt)
    assert got.numpy().tobytes() == dequantise(words, scales, cols, fmt).tobytes()


def _results(task: Task, batch: Batch, net: network.SideNetwork) -> torch.Tensor:
    with torch.no_grad():
        return net(*network.inputs_of(task, batch, CPU))


def _trained(task: Task) -> network.SideNetwork:
    """With no weight at its starting value."""
    rng = np.random.default_rng(3)
    return network.SideNetwork(
        task, {n: v + rng.standard_normal(v.shape, np.float32) / 4 for n, v in initial_weights(task).items()}
    )


@pytest.mark.parametrize("pooling", ["first", "last"])
def test_pivot_tokens_give_what_all_tokens_give(pooling: str) -> None:
    everything = task_of(tokens="all", pooling=pooling, pooler=True)
    pivot = replace(everything, tokens="pivot")
    batch = batch_of(everything, 0)
    assert batch.mask is not None
    rows = [i * 5 + (0 if pooling == "first" else int(np.flatnonzero(m)[-1])) for i, m in enumerate(batch.mask)]
    only = replace(batch, mask=None, taps=tuple((w[rows], s[rows]) for w, s in batch.taps))
    only.check(pivot)
    net = _trained(everything)
    results = _results(everything, batch, net)
    assert results.numpy().tobytes() == _results(pivot, only, net).numpy().tobytes()
    # Adapters work token by token: all rows through the network, and the head on the pivots, is the same function.
    taps = [torch.tensor(dequantise(w, s, 20, everything.fmt)) for w, s in batch.taps]
    with torch.no_grad():
        np.testing.assert_allclose(net(taps)[rows], results, rtol=1e-5, atol=1e-6)
    # And the others do not matter.
    noise = batch_of(everything, 0, seed=9)
    for (w, s), (noisy_w, noisy_s) in zip(batch.taps, noise.taps, strict=True):
        noisy_w[rows], noisy_s[rows] = w[rows], s[rows]
    assert torch.equal(_results(everything, replace(noise, mask=batch.mask), net), results)


def test_the_mean_is_over_real_tokens() -> None:
    task = task_of(tokens="all", pooling="mean", taps=("only",))
    batch = batch_of(task, 0)
    assert batch.mask is not None
    backbone_alone = {"mix": np.zeros(1, np.float32)}
    net = network.SideNetwork(task, _trained(task).weights() | backbone_alone)
    x = dequantise(*batch.taps[0], 20, task.fmt).reshape(4, 5, 20)
    mean = np.stack([rows[mask == 1].mean(0) for rows, mask in zip(x, batch.mask, strict=True)])
    value = net.weights()
    expected = mean @ value["classifier.weight"].T + value["classifier.bias"]
    np.testing.assert_allclose(_results(task, batch, net), expected, rtol=1e-5, atol=1e-6)


def test_the_network_is_the_one_that_is_written_down() -> None:
    task = task_of(pooler=True)
    batch = batch_of(task, 0)
    net = _trained(task)
    v = {n: x.astype(np.float64) for n, x in net.weights().items()}
    taps = [dequantise(w, s, 20, task.fmt).astype(np.float64) for w, s in batch.taps]
    s = h = taps[0]
    for i in (0, 1, 2):
        if i:
            mu = 1 / (1 + np.exp(-v[f"adapters.{i}.gate"]))
            s = (1 - mu) * taps[i] + mu * h
        down = torch.tensor(s @ v[f"adapters.{i}.down"])
        h = s + (down / 2 * (1 + torch.erf(down / 2**0.5))).numpy() @ v[f"adapters.{i}.up"]
    out = (1 - v["mix"]) * taps[2] + v["mix"] * h
    x = np.tanh(out @ v["pooler.weight"].T + v["pooler.bias"])
    expected = x @ v["classifier.weight"].T + v["classifier.bias"]
    np.testing.assert_allclose(_results(task, batch, net), expected, rtol=1e-4, atol=1e-5)


def _bert() -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=40, num_labels=3
    )
    model = transformers.BertForSequenceClassification(config).eval()
    names = {"bert.pooler.dense": "pooler", "classifier": "classifier"}
    head = {
        f"{short}.{kind}": model.get_parameter(f"{long}.{kind}").detach().numpy()
        for long, short in names.items()
        for kind in ("weight", "bias")
    }
    return model, head


@pytest.mark.parametrize("tokens", ["all", "pivot"])
def test_step_0_is_the_pretrained_model(tokens: str) -> None:
    model, head = _bert()
    ids = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(6) < torch.tensor([[6], [3], [1], [5]])
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True)
    task = task_of(
        width=32, seq=6, taps=("0", "1", "2"), format="float32", tokens=tokens, pooler=True, mode="labels", rank=8
    )
    states = [h if tokens == "all" else h[:, :1] for h in out.hidden_states[1:]]
    taps = tuple(quantise(h.reshape(-1, 32).numpy(), task.fmt) for h in states)
    sent = mask.to(torch.uint8).numpy() if tokens == "all" else None
    batch = Batch(0, (1, 2, 3, 4), taps, sent, np.zeros(4, np.int32))
    batch.check(task)
    results = _results(task, batch, network.SideNetwork(task, initial_weights(task, head)))
    assert torch.equal(results, out.logits)


def test_a_private_task_starts_with_no_correction() -> None:
    task = task_of(mode="private")
    assert not _results(task, batch_of(task, 0), network.SideNetwork(task, initial_weights(task))).any()


def test_losses_are_what_they_say() -> None:
    results = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    labels = np.array([0, IGNORED], np.int32)
    expected = -np.log(np.exp(2) / (np.exp(2) + 2))
    assert network.loss_of(TASK, results, labels).item() == pytest.approx(expected, rel=1e-6)
    differences = np.array([[1.0, -0.5, -0.5], [0.0, 0.0, 0.0]], np.float32)
    loss = network.loss_of(task_of(mode="private"), results, differences)
    assert loss.item() == pytest.approx((1 + 0.25 + 0.25 + 1) / 2)


@pytest.mark.parametrize("mode", ["labels", "private"])
def test_after_the_first_step_everything_has_a_gradient(mode: str) -> None:
    task = task_of(mode=mode)
    net = network.SideNetwork(task, initial_weights(task))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        batch = batch_of(task, step)
        network.loss_of(task, net(*network.inputs_of(task, batch, CPU)), batch.targets).backward()
        moved = {n for n, v in net.named().items() if v.grad is not None and v.grad.any()}
        if step == 0:
            # A private task's mix waits a step for its classifier.
            assert moved == {"classifier.weight", "classifier.bias"} | ({"mix"} if mode == "labels" else set())
        optimizer.step()
    assert moved == set(net.names)

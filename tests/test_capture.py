"""Captured steps against torch: loss, every gradient, parameters after several updates; and what capture refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernels.reference import run
from layoutopt import graphfile
from layoutopt.errors import GraphError
from layoutopt.graph import TrainingGraph
from layoutopt.optimizers import AdamW, Sgd, hyper_values
from layoutopt.passes import run_passes

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from layoutopt import zoo  # noqa: E402
from layoutopt.capture import capture  # noqa: E402

pytestmark = pytest.mark.peer

# A key's bias shifts every score of a query alike, which softmax ignores: its gradient is 0 but for rounding.
NO_GRADIENT = ("key.bias", "k_proj.bias")


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def bert(implementation: str = "sdpa", batch: int = 3, seq: int = 13) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from tests import small_models

    torch.manual_seed(1)
    module = small_models.bert(attn_implementation=implementation)
    mask = torch.ones(batch, seq, dtype=torch.long)
    mask[1, seq // 2 :] = 0
    mask[2, 3:] = 0
    ids = torch.randint(1, 101, (batch, seq)) * mask
    return module, {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, (batch, seq)),
        "labels": torch.randint(0, 3, (batch,)),
    }


def vit(implementation: str = "sdpa") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from tests import small_models

    torch.manual_seed(2)
    module = small_models.vit(num_channels=3, attn_implementation=implementation)
    batch = {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.randint(0, 10, (3,))}
    return module, batch


MODELS: dict[str, Callable[..., Any]] = {"bert": bert, "vit": vit}


def values_of(graph: TrainingGraph, module: nn.Module, batch: Any) -> dict[str, np.ndarray]:
    named = batch if isinstance(batch, dict) else {f"input_{i}": t for i, t in enumerate(batch)}
    values = {n: p.detach().double().numpy().copy() for n, p in module.named_parameters()}
    values |= {t.name: np.zeros(t.shape) for t in graph.by_role("state")}
    return values | {k: t.numpy() for k, t in named.items()}


def doubled(module: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    def wide(t: torch.Tensor) -> torch.Tensor:
        return t.double() if t.is_floating_point() else t

    again = {k: wide(t) for k, t in batch.items()} if isinstance(batch, dict) else tuple(wide(t) for t in batch)
    return copy.deepcopy(module).double(), again


def hf_loss(module: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = module(**batch)
    return out.loss, out.logits


def check_gradients(module: nn.Module, batch: Any, loss: Any = None, tolerance: float = 1e-6) -> TrainingGraph:
    """Loss, first output and every gradient of the captured graph against torch, both in float64."""
    graph = capture(module, batch, loss=loss)
    got = run(graph, values_of(graph, module, batch))
    peer, wide = doubled(module, batch)
    value, output = (loss or hf_loss)(peer, wide)
    value.backward()
    assert got["loss"] == pytest.approx(value.item(), rel=tolerance)
    if len(graph.outputs) > 1 and isinstance(output, torch.Tensor):
        np.testing.assert_allclose(got[graph.outputs[1]], output.detach().numpy(), rtol=tolerance, atol=tolerance)
    scale = max(float(p.grad.norm()) for p in peer.parameters() if p.grad is not None)
    checked = 0
    for name, p in peer.named_parameters():
        if p.grad is None:
            assert f"grad:{name}" not in got
            continue
        if name.endswith(NO_GRADIENT):
            assert np.linalg.norm(got[f"grad:{name}"]) < 1e-6 * scale
        else:
            assert error(got[f"grad:{name}"], p.grad.numpy()) < tolerance, name
        checked += 1
    assert checked == sum(t.role == "gradient" for t in graph.tensors.values())
    return graph


# ---- whole models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_equal_torch(model: str, implementation: str) -> None:
    graph = check_gradients(*MODELS[model](implementation))
    # Position ids, ranges and masks of ranges are gone: the one constant is the gradient of the loss.
    assert list(graph.constants.values()) == [1.0]
    expected = {"bert": {"gather": 2, "scatter_add": 2}, "vit": {}}[model]
    for kind in ("gather", "scatter_add", "iota"):
        assert sum(op.kind == kind for op in graph.ops) == expected.get(kind, 0)


def test_bert_without_mask_and_token_types_reads_slices() -> None:
    module, batch = bert()
    graph = check_gradients(module, {k: batch[k] for k in ("input_ids", "labels")})
    assert sum(op.kind == "gather" for op in graph.ops) == 1


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            AdamW(lr=1e-3, weight_decay=0.05, beta2=0.99),
            lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.05, betas=(0.9, 0.99)),
        ),
        (Sgd(lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
        (Sgd(lr=0.05, momentum=0.0, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1)),
    ],
    ids=["adamw", "momentum", "plain"],
)
def test_five_steps_equal_torch(model: str, ours: Any, theirs: Any) -> None:
    module, batch = MODELS[model]()
    graph = capture(module, batch, optimizer=ours)
    values = values_of(graph, module, batch)
    peer, wide = doubled(module, batch)
    optimizer = theirs(peer.parameters())
    for step in range(1, 6):
        got = run(graph, values | hyper_values(graph.meta["optimizer"], step))
        loss, _ = hf_loss(peer, wide)
        assert got["loss"] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for op in graph.ops:
            for out, source in op.inplace:
                values[op.inputs[source].tensor] = got[op.outputs[out].tensor]
    for name, p in peer.named_parameters():
        if not name.endswith(NO_GRADIENT):
            assert error(values[name], p.detach().numpy()) < 1e-5, name


def test_tied_weights_get_one_gradient() -> None:
    import transformers as hf

    torch.manual_seed(3)
    config = hf.BertConfig(
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=20,
        vocab_size=23,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=True,
    )
    labels = torch.randint(0, 23, (2, 5))
    labels[0, :3] = -100
    module = hf.BertForMaskedLM(config)
    assert module.cls.predictions.decoder.weight is module.bert.embeddings.word_embeddings.weight
    graph = check_gradients(module, {"input_ids": torch.randint(0, 23, (2, 5)), "labels": labels})
    assert "cls.predictions.decoder.weight" not in graph.tensors


# ---- single operations -----------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Two weights and any function of them and the input."""

    def __init__(self, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.w = nn.ParameterList([nn.Parameter(torch.randn(s)) for s in shapes])
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs, *self.w)


def square_loss(module: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    y = module(*batch)
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
    return (y * y * weights).mean(), y


X = torch.linspace(-2, 2, 3 * 5 * 6).reshape(3, 5, 6)
IDS = torch.tensor([[0, 2, 2], [6, 1, 0]])
CASES: dict[str, tuple[Any, tuple[torch.Tensor, ...], list[tuple[int, ...]]]] = {
    "two biases share a gradient": (lambda x, a, b: x + a + b, (X,), [(6,), (6,)]),
    "broadcast both ways": (lambda x, a, b: (x * a + b).sum(1), (X,), [(5, 1), (3, 1, 6)]),
    "matmul": (lambda x, a: x @ a, (X,), [(6, 7)]),
    "matrix times vector": (lambda x, a: x[0] @ a, (X,), [(6,)]),
    "baddbmm": (lambda x, a, b: torch.baddbmm(b, x, a, beta=0.5, alpha=2.0), (X,), [(3, 6, 4), (3, 5, 4)]),
    "einsum": (lambda x, a: torch.einsum("bij,jk->kbi", x, a), (X,), [(6, 4)]),
    "cat along the middle": (lambda x, a: torch.cat([a.expand(3, 2, 6), x * a, x], 1), (X,), [(1, 1, 6)]),
    "stack": (lambda x, a: torch.stack([x * a, x + a], 1), (X,), [(6,)]),
    "slices": (lambda x, a: (x * a)[:, 1:4, ::1] + (x * a)[:, -3:, :], (X,), [(5, 6)]),
    "strided slice of an input": (lambda x, a: x[:, ::2] * a, (X,), [(3, 6)]),
    "select": (lambda x, a: (x * a)[:, -1], (X,), [(5, 6)]),
    "pad and crop": (lambda x, a: F.pad(x * a, (1, 2, -1, 0)), (X,), [(6,)]),
    "split": (lambda x, a: torch.mul(*(x * a).split([3, 3], -1)), (X,), [(6,)]),
    "chunk and permute": (lambda x, a: torch.add(*(x * a).permute(2, 0, 1).chunk(2)), (X,), [(6,)]),
    "mean, keepdim": (lambda x, a: (x * a) - (x * a).mean((0, 2), keepdim=True), (X,), [(6,)]),
    "variance by hand": (lambda x, a: (x * a - (x * a).mean(-1, True)).pow(2).mean(-1).add(1e-3).rsqrt(), (X,), [(6,)]),
    "amax": (lambda x, a: x.amax(-1) * a, (X,), [(5,)]),
    "softmax of another axis": (lambda x, a: (x * a).softmax(1), (X,), [(6,)]),
    "log-softmax": (lambda x, a: (x * a).log_softmax(0), (X,), [(6,)]),
    "layer norm without weights": (lambda x, a: F.layer_norm(x * a, (5, 6)), (X,), [(6,)]),
    "layer norm, weight only": (lambda x, a: F.layer_norm(x, (6,), a), (X,), [(6,)]),
    "relu": (lambda x, a: F.relu(x * a), (X,), [(6,)]),
    "gelu": (lambda x, a: F.gelu(x * a), (X,), [(6,)]),
    "gelu, tanh": (lambda x, a: F.gelu(x * a, approximate="tanh"), (X,), [(6,)]),
    "silu": (lambda x, a: F.silu(x * a), (X,), [(6,)]),
    "sigmoid and tanh": (lambda x, a: torch.sigmoid(x * a) * torch.tanh(x + a), (X,), [(6,)]),
    "exp, log, powers": (lambda x, a: torch.log(1 + torch.exp(x * a)) + (x * a) ** 3 - 2 / (3 + a.abs()), (X,), [(6,)]),
    "clamp": (lambda x, a: (x * a).clamp(-0.5, 0.7), (X,), [(6,)]),
    "where": (lambda x, a: torch.where((x > 0.3) & ~(x >= 1.5), x * a, a - 1), (X,), [(6,)]),
    "masked fill": (lambda x, a: (x * a).masked_fill(x < 0, -3.0), (X,), [(6,)]),
    "any": (lambda x, a: a * (x > 1.9).any(-1), (X,), [(5,)]),
    "type casts": (
        lambda x, a: a * (x > 0).sum(-1).to(torch.float32) + a * (x > 0).long().float().mean(),
        (X,),
        [(5,)],
    ),
    "embedding of inputs": (lambda i, a: F.embedding(i, a), (IDS,), [(7, 4)]),
    "embedding with padding": (lambda i, a: F.embedding(i, a, padding_idx=2), (IDS,), [(7, 4)]),
    "embedding of a range": (lambda x, a: x + F.embedding(torch.arange(1, 6).expand(3, 5), a), (X,), [(8, 6)]),
    "embedding of one row": (lambda x, a: x + F.embedding(torch.full((5,), 3), a), (X,), [(8, 6)]),
    "embedding of constants": (lambda x, a: x + F.embedding(torch.tensor([4, 4, 0, 1, 7]), a), (X,), [(8, 6)]),
    "index by inputs": (lambda i, a: a[i], (IDS,), [(7, 4)]),
    "index by a range": (lambda x, a: x * a[torch.arange(5)], (X,), [(7, 6)]),
    "index by constants": (lambda x, a: x * a[torch.tensor([3, 0, 3, 3, 1])], (X,), [(7, 6)]),
    "index two axes": (lambda x, a: x[0] * a[torch.arange(5)[:, None], torch.arange(6)], (X,), [(7, 6)]),
    "gather pairs": (lambda x, a: x[:, :2, 0] * a[torch.tensor([3, 0]), torch.tensor([1, 5])], (X,), [(7, 6)]),
    "causal attention": (
        lambda x, a: F.scaled_dot_product_attention(x * a, x, x * a, is_causal=True),
        (X,),
        [(6,)],
    ),
    "grouped attention": (
        lambda x, a: F.scaled_dot_product_attention(
            x.reshape(1, 3, 5, 6).repeat(1, 2, 1, 1) * a, x[None] * a, x[None], scale=0.3, enable_gqa=True
        ),
        (X,),
        [(6,)],
    ),
    "patches": (
        lambda x, a, b: F.conv2d(x.reshape(3, 1, 5, 6)[:, :, :4].repeat(1, 2, 1, 1), a, b, stride=(2, 3)),
        (X,),
        [(4, 2, 2, 3), (4,)],
    ),
    "patches of patches": (
        lambda x, a, b: F.conv2d(F.conv2d(x.reshape(3, 1, 5, 6)[:, :, :4], a, stride=(2, 1)), b, stride=2),
        (X,),
        [(2, 1, 2, 1), (3, 2, 2, 2)],
    ),
    "cumulative sums": (lambda x, a: (x * a).cumsum(1) + (x > 0).cumsum(-1), (X,), [(6,)]),
    "padding with a value": (lambda x, a: F.pad(x * a, (2, 1, 1, 0), value=-2.5), (X,), [(6,)]),
    "padding whole numbers": (lambda i, a: F.embedding(F.pad(i, (0, 1), value=5), a), (IDS,), [(7, 4)]),
    "sine and cosine": (lambda x, a: torch.sin(x * a) * torch.cos(x + a), (X,), [(6,)]),
    "argmax": (lambda x, a: a * (x.abs().argmax(-1) - x[:, :, :4].argmax(2)), (X,), [(5,)]),
    "a row per sample": (lambda x, i, a: (x * a)[torch.arange(3), i], (X, torch.tensor([4, 0, 4])), [(6,)]),
    "index_select": (lambda x, a: (x * a).index_select(1, torch.tensor([3, 0, 3])), (X,), [(6,)]),
    "index behind an axis": (lambda x, a: (x * a)[:, :, torch.tensor([5, 0, 5, 1])], (X,), [(6,)]),
    "index around an axis": (
        lambda x, i, a: (x * a)[i, :, i].sum(-1) * (x * a)[:, i, i].sum(-1) + (x * a)[0, i].sum(-1),
        (X, torch.tensor([2, 0, 2])),
        [(6,)],
    ),
    "roll": (lambda x, a: (x * a).roll((2, -1), (1, 2)), (X,), [(6,)]),
    "every second": (lambda x, a: (x * a)[:, 1::2, ::2] * (x + a)[:, ::3, 1::2], (X,), [(6,)]),
    "triangles": (lambda x, a: (x * a).tril(1) + (x + a).triu(-1), (X,), [(6,)]),
    "rms norm": (lambda x, a: F.rms_norm(x * a, (6,), a, 1e-3), (X,), [(6,)]),
    "group norm": (
        lambda x, a, b: F.group_norm(x.reshape(3, 6, 5) * a[:, None], 3, a, b),
        (X,),
        [(6,), (6,)],
    ),
    "nearest up-sampling": (lambda x, a: F.interpolate(x[None] * a, scale_factor=(2.0, 3.0)), (X,), [(6,)]),
    "nearest up-sampling, uneven": (lambda x, a: F.interpolate(x[None] * a, size=(7, 8)), (X,), [(6,)]),
    "pooling": (
        lambda x, a: F.adaptive_avg_pool1d(x * a, 3) * F.avg_pool1d(x + a, 2) + (x * a).mean(-1, True),
        (X,),
        [(6,)],
    ),
    "pixel shuffle": (lambda x, a: F.pixel_shuffle((x * a)[:, :4].reshape(3, 4, 2, 3), 2), (X,), [(6,)]),
    "convolution": (
        lambda x, a, b: F.conv2d(x.reshape(3, 2, 3, 5), a, b, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        (X,),
        [(4, 2, 3, 2), (4,)],
    ),
    "convolution of one axis": (
        lambda x, a, b: F.conv1d(F.conv1d(x, a, b, padding=1), a[:5], stride=2),
        (X,),
        [(5, 5, 3), (5,)],
    ),
    "convolution in groups": (
        lambda x, a: F.conv2d(F.conv2d(x[None, :2], a, padding=1, groups=2), a, padding="same", groups=2),
        (X,),
        [(2, 1, 3, 3)],
    ),
    "convolution of single points": (lambda x, a: F.conv1d(F.conv1d(x, a), a, stride=2), (X,), [(5, 5, 1)]),
    "label smoothing": (
        lambda x, a: F.cross_entropy((x * a).flatten(0, 1), torch.arange(15) % 6, label_smoothing=0.1)[None],
        (X,),
        [(6,)],
    ),
    "ignored targets": (
        lambda x, a: F.cross_entropy((x * a).flatten(0, 1), torch.arange(15) % 7 - 1, ignore_index=-1)[None],
        (X,),
        [(6,)],
    ),
    "weighted classes": (
        lambda x, a: F.cross_entropy((x * a).flatten(0, 1), torch.arange(15) % 6, weight=x[0, 0] ** 2)[None],
        (X,),
        [(6,)],
    ),
    "summed loss": (
        lambda x, a: F.cross_entropy((x * a).flatten(0, 1), torch.arange(15) % 6, reduction="sum")[None],
        (X,),
        [(6,)],
    ),
    "in-place": (lambda x, a: (x * a).add_(1).mul_(a), (X,), [(6,)]),
    "writing into a slice": (
        lambda x, a: torch.slice_scatter(x * a, (x * a)[:, :2] + 1, 1, 2, 4),
        (X,),
        [(6,)],
    ),
    "a constant matrix": (lambda x, a: (x * a) * torch.eye(6)[1:] + torch.ones(5, 6).tril(-1), (X,), [(6,)]),
}


@pytest.mark.parametrize("case", CASES)
def test_operation_equals_torch(case: str) -> None:
    function, batch, shapes = CASES[case]
    check_gradients(Small(function, *shapes), batch, square_loss)


# ---- structure ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def captured() -> TrainingGraph:
    module, batch = bert()
    return capture(module, batch, optimizer=AdamW(), name="small")


def test_phases_come_in_order(captured: TrainingGraph) -> None:
    order = [op.phase for op in captured.ops]
    assert [p for i, p in enumerate(order) if i == 0 or order[i - 1] != p] == ["forward", "loss", "backward", "update"]
    assert captured.producer["logits"].phase == "forward"
    assert captured.producer["loss"].kind == "nll_loss"


def test_ops_know_their_module(captured: TrainingGraph) -> None:
    query = "bert.encoder.layer.1.attention.self.query"
    found = [(op.phase, op.kind) for op in captured.ops if op.source == query and op.kind == "contraction"]
    assert found == [("forward", "contraction"), ("backward", "contraction"), ("backward", "contraction")]
    assert all(op.source for op in captured.ops)


def test_gradients_and_state_belong_to_parameters(captured: TrainingGraph) -> None:
    parameters = captured.by_role("parameter")
    by_of = {t.of: t for t in captured.by_role("gradient")}
    for p in parameters:
        assert by_of[p.name].name == f"grad:{p.name}"
        assert by_of[p.name].shape == p.shape
    assert len(captured.by_role("state")) == 2 * len(parameters)
    updates = [op for op in captured.ops if op.phase == "update"]
    assert {captured.storage_of[op.outputs[0].tensor] for op in updates} == {p.name for p in parameters}


def test_keep_grads_lists_gradients() -> None:
    module, batch = vit()
    kept = capture(module, batch, optimizer=Sgd(), keep_grads=True)
    assert set(kept.outputs) == {"loss", "logits", *(f"grad:{n}" for n, _ in module.named_parameters())}
    assert capture(module, batch, optimizer=Sgd()).outputs == ("loss", "logits")


def test_a_file_holds_the_whole_graph(captured: TrainingGraph) -> None:
    again = graphfile.decode(graphfile.encode(captured))
    assert again.hash == captured.hash
    assert again.meta == captured.meta


def test_module_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.25), nn.Linear(5, 2)).eval()
    module[0].train()
    before = list(module.parameters())
    graph = capture(module, (torch.randn(3, 4),), loss=lambda m, b: (m(*b).mean(), m(*b)))
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    assert (module.training, module[0].training, module[1].p) == (False, True, 0.25)
    assert graph.meta["dropout_set_to_zero"] == ["1"]


def test_initial_values_are_measured_or_ruled() -> None:
    def inits(module: nn.Module) -> dict[str, str]:
        graph = capture(module, (torch.randn(3, 4),), loss=lambda m, b: (m(*b).mean(), m(*b)))
        return {t.name: t.init for t in graph.by_role("parameter")}

    torch.manual_seed(0)
    real = nn.Sequential(nn.Linear(4, 300), nn.LayerNorm(300))
    nn.init.constant_(real[0].bias, 0.125)
    found = inits(real)
    assert float(found["0.weight"].removeprefix("normal:")) == pytest.approx(
        float(real[0].weight.detach().std()), rel=0.05
    )
    assert (found["0.bias"], found["1.weight"], found["1.bias"]) == ("constant:0.125", "ones", "zeros")
    with zoo.without_weights():
        ruled = inits(nn.Sequential(nn.Linear(4, 300), nn.LayerNorm(300)))
    assert ruled == {"0.weight": "normal:0.289", "0.bias": "zeros", "1.weight": "ones", "1.bias": "zeros"}


def test_a_parameter_the_loss_ignores_is_not_updated() -> None:
    module = Small(lambda x, a, b: x * a + b.detach(), (6,), (6,))
    module.w.append(nn.Parameter(torch.ones(2), requires_grad=False))
    module.function = lambda x, a, b, c: x * a * c.sum() + b.detach()
    graph = capture(module, (X,), loss=square_loss, optimizer=Sgd())
    assert [t.of for t in graph.by_role("gradient")] == ["w.0"]
    assert graph.meta["without_gradient"] == ["w.1"]
    assert [op.name for op in graph.ops if op.phase == "update"] == ["update:w.0"]


# ---- refusals -------------------------------------------------------------------------------------------------------


def refuse(module: nn.Module, batch: Any, match: str, **more: Any) -> None:
    with pytest.raises(GraphError, match=match):
        capture(module, batch, **more)


def test_unknown_operation_names_itself_its_shapes_and_its_module() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumprod(x, -1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 4)
            self.odd = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.odd(self.first(x))

    refuse(Outer(), (X,), r"aten\.cumprod\.default on float32\[3, 5, 4\] in odd: .*not known", loss=square_loss)


def test_all_that_is_unknown_is_told_at_once() -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cummax(x, -1).values + torch.digamma(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(5)])
            self.a = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x * self.a)
            return torch.lgamma(x)

    with pytest.raises(GraphError) as caught:
        capture(Model(), (X,), loss=square_loss)
    first, *lines = str(caught.value).splitlines()
    assert first == "3 operations of this step are not supported:"
    assert [line.split()[0] for line in lines] == ["aten.cummax.default", "aten.digamma.default", "aten.lgamma.default"]
    assert "in layers.0, layers.1, layers.2 and 2 more (5 times): this operation is not known" in lines[0]
    assert "on float32[3, 5, 6] in Model: " in lines[2]


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda x, a: F.conv_transpose1d(x * a, torch.ones(5, 2, 3)), "up-sample, then convolve"),
        (lambda x, a: F.conv3d((x * a)[None, None], torch.ones(1, 1, 2, 2, 2)), "only 1 or 2"),
        (lambda x, a: (x * a).double().sum(-1), "float64"),
        (lambda x, a: (x * a).flip(0), r"aten\.flip\.default on float32\[3, 5, 6\] in Small: .*not known"),
        (
            lambda x, a: x * a * torch.empty(3, 1, 1).bernoulli_(0.9) / 0.9,
            r"aten\.bernoulli.* in Small: random numbers",
        ),
        (lambda x, a: x * a * (0.9 + torch.rand(3, 1, 1)).floor_() / 0.9, r"aten\.floor.* in Small"),
        (lambda x, a: x * a + torch.normal(0.0, 1.0, (6,)), r"aten\.normal.* in Small: random numbers"),
        (lambda x, a: x * a + torch.empty(6).uniform_(), r"aten\.uniform.* in Small: random numbers"),
        (lambda x, a: (x * a)[torch.randperm(3)], r"aten\.randperm.* in Small: random numbers"),
        (lambda x, a: F.adaptive_avg_pool1d(x * a, 4), r"^aten\.adaptive_avg_pool1d.* in Small: .* equal parts .*ed$"),
    ],
)
def test_known_limits_are_named(function: Any, match: str) -> None:
    refuse(Small(function, (6,)), (X,), match, loss=square_loss)


def test_what_torch_cannot_trace_is_told_in_a_sentence(capsys) -> None:
    branching = Small(lambda x, a: x * a if x.sum() > 0 else x - a, (6,))
    refuse(branching, (X,), "torch cannot trace the step of Small", loss=square_loss)
    refuse(Small(lambda x, a: x @ a, (5,)), (X,), "torch cannot trace the step of Small", loss=square_loss)
    dropping = Small(lambda x, a: x * a if torch.rand([]) < 0.1 else x - a, (6,))
    refuse(dropping, (X,), "layers are dropped at random: switch it off", loss=square_loss)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_bad_calls() -> None:
    module, batch = bert()
    refuse(module, {k: v for k, v in batch.items() if k != "labels"}, "no loss and logits .*: add labels")
    refuse(module, tuple(batch.values()), "needs a loss function")
    refuse(module, {**batch, "labels": 3}, "'labels' is a int, expected a tensor")
    refuse(copy.deepcopy(module).half(), batch, "only float32 models are captured")
    small = Small(lambda x, a: x * a, (6,))
    refuse(small, (X,), r"loss has shape \(3, 5, 6\)", loss=lambda m, b: (m(*b), ()))
    refuse(small, (X,), "does not depend on any trainable", loss=lambda m, b: (b[0].mean(), m(*b)))


# ---- the zoo --------------------------------------------------------------------------------------------------------


def test_zoo_needs_no_weights() -> None:
    with zoo.without_weights():
        module, _, _ = zoo.build("vit-tiny")
    assert all(p.is_meta for p in module.parameters())
    assert not any(b.is_meta for b in module.buffers())


@pytest.mark.parametrize("name", ["bert-tiny", "vit-odd"])
def test_zoo_captures_the_same_graph_every_time(name: str) -> None:
    first = zoo.capture_zoo(name)
    assert first.hash == zoo.capture_named(name).hash
    assert first.hash != zoo.capture_zoo(name, batch=2).hash
    assert first.meta["command"].startswith(f"layoutopt capture {name} --batch 3")


def test_minilm_has_the_published_shapes() -> None:
    graph = zoo.capture_zoo("minilm", batch=2, seq=16, num_labels=3, optimizer="none")
    parameters = {t.name: t.shape for t in graph.by_role("parameter")}
    assert sum(t.size_elems for t in graph.by_role("parameter")) == 22_713_216 + 3 * 385
    assert parameters["classifier.weight"] == (3, 384)
    assert parameters["bert.embeddings.word_embeddings.weight"] == (30522, 384)


@pytest.mark.parametrize("name", ["vit-digits", "minilm", "gpt2"])
def test_shipped_graphs_are_what_their_commands_make(name: str) -> None:
    from layoutopt.facade import capture_model
    from layoutopt.models import shipped

    graph = shipped(name)
    assert graph.meta["command"].startswith(f"layoutopt capture {name} --batch ")
    again, _ = capture_model(name)
    assert (again.hash, again.meta["facts"]) == (graph.hash, graph.meta["facts"]), (
        f"run `python benchmarks/capture_zoo.py --ship {name}`"
    )


def test_the_zoo_ships() -> None:
    from importlib.resources import files

    from layoutopt.models import shipped_facts

    found = shipped_facts()
    assert set(found) == {n for n in zoo.MODELS if not n.endswith("-odd") and n != "bert-tiny"}
    assert all(found[n]["what"] == zoo.MODELS[n] for n in found)
    millions = {n: round(f["parameters"] / 1e6) for n, f in found.items()}
    published = {"llama-3.2-1b": 1236, "qwen2.5-1.5b": 1544, "gemma-2-2b": 2614, "bert-large": 335, "vit-large": 304}
    published |= {"sd-1.5-unet": 860, "whisper-large-v3": 1543, "gpt2": 124, "opt-350m": 331, "opt-1.3b": 1316}
    assert {n: millions[n] for n in published} == published
    sizes = [len((files("layoutopt") / "data" / f"{n}.graph").read_bytes()) for n in found]
    assert max(sizes) < 5 << 20
    assert sum(sizes) < 10 << 20


def test_frozen_parameters_cost_nothing() -> None:
    pytest.importorskip("peft")
    full, _ = run_passes(zoo.capture_zoo("llama-odd"))
    lora, _ = run_passes(zoo.capture_zoo("llama-odd", mode="lora"))
    trained = {t.of for t in lora.by_role("state")}
    assert trained
    assert all(".lora_" in n for n in trained)
    assert {t.of for t in lora.by_role("gradient")} <= trained

    def saved_bytes(graph: TrainingGraph) -> int:
        later = {o.tensor for op in graph.ops if op.phase == "backward" for o in op.inputs}
        early = {o.tensor for op in graph.ops if op.phase == "forward" for o in op.outputs}
        return sum(graph.tensors[n].size_elems * graph.tensors[n].item_bytes for n in later & early)

    assert saved_bytes(lora) < 0.8 * saved_bytes(full)
    for name in ("down_proj", "o_proj"):  # frozen products: their inputs are needed by no gradient
        for op in lora.ops:
            if op.phase == "backward" and op.kind == "contraction" and op.source.endswith(name):
                assert any(name in o.tensor for o in op.inputs), "only the gradient of the input is left"


def test_users_own_model(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_capture.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Linear(3, 2), (torch.zeros(4, 3),), lambda m, b: (m(*b).mean(), m(*b))\n"
        "def wrong():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    graph = zoo.capture_named("mine_for_capture:make", optimizer="sgd")
    assert (graph.name, graph.outputs) == ("make", ("loss", "output"))
    for name, match in (
        ("mine_for_capture:wrong", "returned int, expected"),
        ("mine_for_capture:absent", "cannot load"),
        ("no_such_module_here:make", "cannot load"),
        ("minilm:", "neither a zoo model"),
        ("resnet", "unknown model 'resnet': choose among llama-3.2-1b"),
    ):
        with pytest.raises(GraphError, match=match):
            zoo.capture_named(name)
    with pytest.raises(GraphError, match="brings its own batch"):
        zoo.capture_named("mine_for_capture:make", batch=3)
    with pytest.raises(GraphError, match="takes images"):
        zoo.capture_named("vit-odd", seq=8)
    with pytest.raises(GraphError, match="unknown optimizer 'lion'"):
        zoo.capture_named("vit-odd", optimizer="lion")

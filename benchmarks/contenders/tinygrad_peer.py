"""tinygrad on its OpenCL device as a contender: BERT and ViT classifiers written for it, one TinyJit a step.

Needs only numpy, tinygrad and ``benchmarks/works.py``, so that it may run in an environment of its own. tinygrad takes
the first platform that the system's OpenCL loader lists (``OCL_ICD_VENDORS`` says which): where that is another driver
than ours, it is refused. ``contiguous`` hints make every linear layer, norm, softmax and activation a kernel's end,
forward and backward; without them (``tinygrad-plain``) tinygrad fuses reductions into each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.contenders.wire import forget_peak, resident_bytes, serve
from benchmarks.works import LR, WORKS, Work, batches

os.environ.setdefault("DEV", "CL")
from tinygrad import Device, Tensor, TinyJit, nn

EPS = 1e-12


class Classifier:
    """Encoder layers over parameters named as transformers names them; keeps what it was asked for."""

    def __init__(self, weights: Mapping[str, np.ndarray], work: Work, hints: bool) -> None:
        self.heads, self.hints = work.heads, hints
        self.weights = {name: Tensor(value).realize() for name, value in weights.items()}
        self.used: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor:
        """A parameter."""
        self.used[name] = self.weights[name]
        return self.used[name]

    def ends(self, x: Tensor) -> Tensor:
        """A kernel ends here, in both passes."""
        return x.contiguous().contiguous_backward() if self.hints else x

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x·Wᵀ + b."""
        return self.ends(x.linear(self.get(f"{name}.weight").transpose(), self.get(f"{name}.bias")))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Layer norm."""
        return self.ends(x.layernorm(eps=EPS) * self.get(f"{name}.weight") + self.get(f"{name}.bias"))

    def attention(self, x: Tensor, q: str, k: str, v: str) -> Tensor:
        """Of all tokens to all."""
        batch, tokens, width = x.shape
        size = width // self.heads
        qs, ks, vs = (
            self.ends(self.linear(x, name).reshape(batch, tokens, self.heads, size).transpose(1, 2))
            for name in (q, k, v)
        )
        scores = self.ends(qs @ ks.transpose(-1, -2)) * (1 / size**0.5)
        mixed = self.ends(self.ends(scores.softmax()) @ vs)
        return self.ends(mixed.transpose(1, 2).reshape(batch, tokens, width))

    def layers(self, prefix: str) -> int:
        """How many blocks there are."""
        return 1 + max(int(n[len(prefix) :].split(".")[0]) for n in self.weights if n.startswith(prefix))


class Bert(Classifier):
    """``BertForSequenceClassification``."""

    def lookup(self, ids: Tensor, name: str) -> Tensor:
        """Rows of a table."""
        table = nn.Embedding(*self.weights[name].shape)
        table.weight = self.get(name)
        return self.ends(table(ids))

    def __call__(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """Logits."""
        p = "bert.embeddings."
        x = self.lookup(input_ids, f"{p}word_embeddings.weight") + self.lookup(
            token_type_ids, f"{p}token_type_embeddings.weight"
        )
        x = self.norm(x + self.get(f"{p}position_embeddings.weight")[: input_ids.shape[1]], f"{p}LayerNorm")
        for i in range(self.layers("bert.encoder.layer.")):
            at = f"bert.encoder.layer.{i}."
            mixed = self.attention(x, *(f"{at}attention.self.{n}" for n in ("query", "key", "value")))
            x = self.norm(self.linear(mixed, f"{at}attention.output.dense") + x, f"{at}attention.output.LayerNorm")
            inner = self.ends(self.linear(x, f"{at}intermediate.dense").gelu("none"))
            x = self.norm(self.linear(inner, f"{at}output.dense") + x, f"{at}output.LayerNorm")
        return self.linear(self.linear(self.ends(x[:, 0]), "bert.pooler.dense").tanh(), "classifier")


class Vit(Classifier):
    """``ViTForImageClassification``."""

    def __call__(self, pixel_values: Tensor) -> Tensor:
        """Logits."""
        p = "vit.embeddings."
        kernel = self.get(f"{p}patch_embeddings.projection.weight")
        width, channels, side, _ = kernel.shape
        batch, _, height, _ = pixel_values.shape
        n = height // side
        patches = pixel_values.reshape(batch, channels, n, side, n, side).permute(0, 2, 4, 1, 3, 5)
        patches = self.ends(patches.reshape(batch, n * n, channels * side * side))
        bias = self.get(f"{p}patch_embeddings.projection.bias")
        x = self.ends(patches.linear(kernel.reshape(width, -1).transpose(), bias))
        token = self.get(f"{p}cls_token").expand(batch, 1, width)
        x = self.ends(token.cat(x, dim=1) + self.get(f"{p}position_embeddings"))
        for i in range(self.layers("vit.layers.")):
            at = f"vit.layers.{i}."
            mixed = self.attention(self.norm(x, f"{at}layernorm_before"), *(f"{at}attention.{c}_proj" for c in "qkv"))
            x = self.ends(self.linear(mixed, f"{at}attention.o_proj") + x)
            inner = self.ends(self.linear(self.norm(x, f"{at}layernorm_after"), f"{at}mlp.fc1").gelu("none"))
            x = self.ends(self.linear(inner, f"{at}mlp.fc2") + x)
        return self.linear(self.ends(self.norm(x, "vit.layernorm")[:, 0]), "classifier")


class TinygradPeer:
    """See the module."""

    def __init__(self, spec: dict[str, Any]) -> None:
        device = Device[Device.DEFAULT]
        driver = getattr(device, "driver_version", "?")
        if driver != spec["driver"]:
            raise SystemExit(
                f"tinygrad's OpenCL device has driver {driver}, ours {spec['driver']}: set OCL_ICD_VENDORS"
            )
        work = WORKS[spec["work"]]
        self._before = resident_bytes()
        with np.load(spec["weights"]) as stored:
            weights = {name: stored[name] for name in stored.files}
        if any(name.startswith("bert.") for name in weights):
            names, made = ("input_ids", "token_type_ids"), Bert
        elif any(name.startswith("vit.") for name in weights):
            names, made = ("pixel_values",), Vit
        else:
            raise SystemExit(f"no tinygrad model of {work.text}: only BERT and ViT classifiers are written for it")
        model = made(weights, work, spec["hints"])
        self._given = cycle([{k: batch[k] for k in (*names, "labels")} for batch in batches(work)])

        @TinyJit
        def step(labels: Tensor, **inputs: Tensor) -> Tensor:
            loss = model(**inputs).sparse_categorical_crossentropy(labels)
            parameters = list(model.used.values())
            for parameter, gradient in zip(parameters, loss.gradient(*parameters), strict=True):
                parameter.assign(parameter - LR * gradient)
            Tensor.realize(loss, *parameters)
            return loss

        self._jitted, self._device = step, device

    def _step(self) -> Tensor:
        batch = next(self._given)
        tensors = {k: Tensor(v.astype(np.int32) if v.dtype.kind == "i" else v).realize() for k, v in batch.items()}
        loss: Tensor = self._jitted(**tensors)
        return loss

    def losses(self, count: int) -> list[float]:
        """Step by step; the first two are not yet jitted."""
        return [float(self._step().item()) for _ in range(count)]

    def burst(self, count: int) -> float:
        """Waits once, at the end."""
        self._device.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            self._step()
        self._device.synchronize()
        return time.perf_counter() - begin

    def steady(self) -> None:
        """Peaks count from here."""
        forget_peak()

    def report(self) -> dict[str, Any]:
        """Memory, and the kernels of the jitted step."""
        return {
            "peak_bytes": resident_bytes(peak=True) - self._before,
            "peak_means": "growth of resident memory over the imports",
        }


if __name__ == "__main__":
    serve(TinygradPeer)

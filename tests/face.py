"""What the tests of the command line share: a user's own module, its graph, text checkpoints of a few kilobytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layoutopt.checkpoint import initial_values, save_safetensors
from layoutopt.cli import main
from layoutopt.graph import TrainingGraph

__all__ = ["USER_MODULE", "own_folder", "refused", "small_device", "text_checkpoint", "write_samples", "write_text"]

USER_MODULE = """
import torch
from torch import nn
from torch.nn import functional as F


def loss(module, batch):
    logits = module(batch["x"])
    return F.cross_entropy(logits, batch["labels"]), {"logits": logits}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


class Dropping(Net):
    def forward(self, x):
        return self.b(F.dropout(F.gelu(self.a(x)), 0.3, self.training))


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        return self.a(torch.fft.fft(x).real)




def batch():
    return {"x": torch.zeros(5, 6), "labels": torch.zeros(5, dtype=torch.int64)}


def net():
    return Net(), batch(), loss


def dropping():
    return Dropping(), batch(), loss


def fourier():
    return Fourier(), batch(), loss


def sorting():
    class Sorting(Net):
        def forward(self, x):
            return self.b(torch.sort(self.a(x), 1).values)

    return Sorting(), batch(), loss


def nothing():
    return 3
"""
WORDS = ("free", "prize", "win", "call", "hello", "mum", "home", "lunch")


def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a test's own to work in, and no calibration of the user's."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def refused(capsys, *arguments: object) -> str:
    """The one sentence that the command line prints on bad input; exit code 2, no traceback, nothing on stdout."""
    capsys.readouterr()
    code = main([str(a) for a in arguments])
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if not line.startswith("first line of")]
    assert code == 2, printed
    assert printed.out == ""
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("layoutopt: error: ")
    return lines[0]


def small_device(path: Path, **limits: int) -> Path:
    """The model of the generic CPU with other limits, as a file."""
    from costmodel import device

    model = device.load("generic-cpu")
    device.save(replace(model, limits=replace(model.limits, **limits)), path)
    return path


def write_samples(path: Path, count: int = 23, **changed: np.ndarray) -> Path:
    """Samples for the module ``net``: the class is the largest of three inputs."""
    x = np.random.default_rng(5).standard_normal((count, 6), np.float32)
    np.savez(path, **({"x": x, "labels": x[:, :3].argmax(1)} | changed))
    return path


def write_text(path: Path, count: int = 22, labels: tuple[str, ...] = ("ham", "spam"), header: str = "") -> Path:
    """Lines whose first words tell their label."""
    rng = np.random.default_rng(7)
    lines = [header] if header else []
    for i in range(count):
        label = i % len(labels)
        words = rng.choice(WORDS[:4] if label else WORDS[4:], 5)
        lines.append(f"{labels[label]}\t{' '.join(words)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def text_checkpoint(folder: Path, graph: TrainingGraph, classes: tuple[str, ...] = ("ham", "spam")) -> Path:
    """A checkpoint directory of a small BERT: random weights, a tokenizer of ten words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(("[PAD]", "[UNK]", *WORDS))}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "bert", "id2label": {str(i): name for i, name in enumerate(classes)}}
    (folder / "config.json").write_text(json.dumps(config))
    values = initial_values(graph, 3)
    save_safetensors(folder / "model.safetensors", {t.name: values[t.name] for t in graph.by_role("parameter")})
    return folder

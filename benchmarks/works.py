"""The works that whole steps are measured on: models, sizes, batches. As a script, prints them.

    python benchmarks/works.py

A step is forward, loss, backward and a plain SGD update of all parameters; float32, no dropout, no padding in the
batches. Only :func:`build` and :func:`capture` import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["BATCHES", "LR", "WORKS", "Work", "batches", "build", "capture", "deep"]

LR = 1e-2
"""Large enough that a wrong gradient shows in the next losses."""
BATCHES = 2
"""Batches that a run goes round: the third loss is of the first batch, two updates later."""
SEED = 0


@dataclass(frozen=True)
class Work:
    """One model at one size.

    Attributes:
        name: letter.
        text: what it is.
        zoo: the zoo's name of the model.
        batch: samples.
        seq: tokens a sample; 0 for images.
        labels: classes; 0 for a language model, whose labels are its tokens.
        vocabulary: tokens are below this.
        image: height and width of the images, channels; 0 for text.
        heads: of attention.
    """

    name: str
    text: str
    zoo: str
    batch: int
    seq: int = 0
    labels: int = 0
    vocabulary: int = 0
    image: tuple[int, int] = (0, 0)
    heads: int = 12

    @property
    def size(self) -> str:
        """Batch × sequence, or batch × image."""
        return f"{self.batch}×{self.seq}" if self.seq else f"{self.batch}×{self.image[0]}²"

    @property
    def command(self) -> str:
        """What a capture of it says in its metadata."""
        words = ["layoutopt capture", self.zoo, f"--batch {self.batch}"]
        words += [f"--seq {self.seq}"] if self.seq else []
        words += [f"--labels {self.labels}"] if self.labels else []
        return " ".join([*words, "--optimizer sgd"])


WORKS: dict[str, Work] = {
    w.name: w
    for w in (
        Work("A", "BERT classifier, 6 layers of 384 (MiniLM)", "minilm", 8, 128, 2, 30522),
        Work("B", "BERT-base classifier", "bert-base", 4, 128, 2, 30522),
        Work("C", "GPT-2 small with its full loss", "gpt2", 2, 128, 0, 50257),
        Work("D", "ViT-Tiny", "vit-tiny", 8, 0, 10, 0, (224, 3), 3),
        Work("E", "BERT-Large classifier", "bert-large", 8, 128, 2, 30522, heads=16),
        Work("F", "ViT-Large", "vit-large", 8, 0, 10, 0, (224, 3), 16),
        Work("tiny", "BERT of 2 layers of 60, for --smoke", "bert-tiny", 3, 13, 3, 101, heads=4),
        Work("tinyvit", "ViT of 2 layers of 60, for --smoke", "vit-odd", 3, 0, 10, 0, (8, 1), 4),
    )
}


def batches(work: Work) -> list[dict[str, np.ndarray]]:
    """The batches of a run: int64 and float32 arrays by the model's argument names; the same on every machine."""
    rng = np.random.default_rng(SEED)
    out = []
    for _ in range(BATCHES):
        if not work.seq:
            side, channels = work.image
            pixels = rng.standard_normal((work.batch, channels, side, side), np.float32)
            out.append({"pixel_values": pixels, "labels": rng.integers(0, work.labels, work.batch)})
            continue
        ids = rng.integers(1, work.vocabulary, (work.batch, work.seq))
        batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        if work.labels:
            batch |= {"token_type_ids": np.zeros_like(ids), "labels": rng.integers(0, work.labels, work.batch)}
        else:
            batch |= {"labels": ids.copy()}
        out.append(batch)
    return out


def build(work: Work) -> Any:
    """The torch module with its seeded weights, in training mode; its forward pass gives ``.loss``."""
    import torch

    from layoutopt import zoo

    torch.manual_seed(SEED)
    module, _, _ = zoo.build(work.zoo, batch=work.batch, seq=work.seq or None, num_labels=work.labels or None)
    return module.train()


def deep(layers: int = 205) -> tuple[Any, dict[str, Any]]:
    """BERT-base of so many layers, for ``layoutopt capture benchmarks.works:deep``: about 10,000 ops to plan."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=layers,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification",
    )
    with torch.device("meta"):
        module = BertForSequenceClassification(config)
    positions = torch.arange(config.max_position_embeddings)[None]
    module.bert.embeddings.position_ids = positions
    module.bert.embeddings.token_type_ids = torch.zeros_like(positions)
    ids = torch.zeros(4, 128, dtype=torch.int64)
    mask, labels = torch.ones_like(ids), torch.zeros(4, dtype=torch.int64)
    return module, {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids, "labels": labels}


def capture(work: Work) -> Any:
    """The step's graph, passes run."""
    from layoutopt import zoo
    from layoutopt.optimizers import Sgd
    from layoutopt.passes import run_passes

    captured = zoo.capture_zoo(
        work.zoo,
        batch=work.batch,
        seq=work.seq or None,
        num_labels=work.labels or None,
        optimizer=Sgd(lr=LR, momentum=0.0),
    )
    return run_passes(captured)[0]


def main() -> None:
    """Print the works."""
    for work in WORKS.values():
        print(f"{work.name:8}{work.size:>10}  {work.text}")


if __name__ == "__main__":
    main()

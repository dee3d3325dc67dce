"""Transformers of two small layers for the tests, with weights and without dropout; a test sets what else it needs."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

SIZES: dict[str, Any] = {
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert(**settings: Any) -> nn.Module:
    """A text classifier of three classes."""
    sizes = SIZES | {"vocab_size": 101, "max_position_embeddings": 40, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(**sizes | settings))


def vit(**settings: Any) -> nn.Module:
    """An image classifier of ten classes, of 8² pixels in patches of 2²."""
    sizes = SIZES | {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(**sizes | settings))

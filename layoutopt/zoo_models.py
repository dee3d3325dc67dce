"""The models of the zoo: what each is, and how its module and an example batch are made.

Sizes are those of the published checkpoints. The ``-odd`` models are the same code at two layers and awkward sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from layoutopt.errors import GraphError

__all__ = ["ZOO", "Entry", "Made", "Sizes"]

Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, Any]]
Made = tuple[nn.Module, Batch, Loss | None]


@dataclass(frozen=True)
class Sizes:
    """What a user may set: samples, tokens a sample (0 where a model has none), classes, and whether dropout is on."""

    batch: int
    seq: int = 0
    labels: int = 0
    dropout: bool = False


@dataclass(frozen=True)
class Entry:
    """A model.

    Attributes:
        text: what it is.
        make: the module, an example batch and the loss (None: the module gives its own).
        usual: sizes where the user sets none.
        head: prefixes of the parameters of its head.
        adapted: names of the layers that LoRA adapts.
    """

    text: str
    make: Callable[[Sizes], Made]
    usual: Sizes
    head: tuple[str, ...] = ("classifier",)
    adapted: tuple[str, ...] = ("query", "value")


def _library(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise GraphError(f"this model of the zoo needs {name}: pip install 'layoutopt[torch]'") from error


_DROPOUTS = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"),
    *("attention_dropout", "activation_dropout", "classifier_dropout", "seq_classif_dropout", "qa_dropout"),
)
_LAYER_DROPS = ("drop_path_rate", "layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def _config(name: str, s: Sizes, **settings: Any) -> Any:
    """A configuration, with dropout off unless it is asked for; whole layers are never dropped."""
    config = getattr(_library("transformers"), name)(**settings)
    for part in (config, *(getattr(config, n, None) for n in ("text_config", "vision_config"))):
        for key in (*_LAYER_DROPS, *(() if s.dropout else _DROPOUTS)):
            if isinstance(getattr(part, key, None), (int, float)):
                setattr(part, key, 0.0)
    return config


def _model(name: str, config: Any) -> nn.Module:
    module: nn.Module = getattr(_library("transformers"), name)(config)
    return module


def _tokens(s: Sizes, positions: int) -> Batch:
    if s.seq > positions:
        raise GraphError(f"sequence length {s.seq} is beyond the model's {positions} positions: choose a shorter one")
    ids = torch.zeros(s.batch, s.seq, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _classes(config: Any, s: Sizes) -> Batch:
    # The kind of loss must not depend on the labels of the example batch.
    config.problem_type = "single_label_classification"
    config.num_labels = s.labels
    return {"labels": torch.zeros(s.batch, dtype=torch.int64)}


# ---- text -----------------------------------------------------------------------------------------------------------


def _causal(kind: str, positions: int, **settings: Any) -> Callable[[Sizes], Made]:
    """A model that predicts the next token; the batch holds padding masks, and labels of -100 do not count."""

    def make(s: Sizes) -> Made:
        config = _config(f"{kind}Config", s, use_cache=False, **settings)
        batch = _tokens(s, positions)
        return (
            _model(f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}", config),
            {
                **batch,
                "labels": torch.zeros_like(batch["input_ids"]),
            },
            None,
        )

    return make


def _decoder(
    kind: str, hidden: int, ffn: int, layers: int, heads: int, groups: int, vocab: int, positions: int, **settings: Any
) -> Callable[[Sizes], Made]:
    """One with ``groups`` heads of keys and values, and input and output embeddings that are one."""
    return _causal(
        kind,
        positions,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocab,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        **settings,
    )


def _opt(
    hidden: int, ffn: int, layers: int, heads: int, embedded: int, positions: int = 2048, **settings: Any
) -> Callable[[Sizes], Made]:
    return _causal(
        "OPT",
        positions,
        hidden_size=hidden,
        ffn_dim=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        word_embed_proj_dim=embedded,
        max_position_embeddings=positions,
        **settings,
    )


def _bert(hidden: int, layers: int, heads: int, ffn: int, vocab: int = 30522, positions: int = 512) -> Any:
    def make(s: Sizes) -> Made:
        config = _config(
            "BertConfig",
            s,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=ffn,
            vocab_size=vocab,
            max_position_embeddings=positions,
        )
        batch = _tokens(s, positions)
        batch |= {"token_type_ids": torch.zeros_like(batch["input_ids"]), **_classes(config, s)}
        return _model("BertForSequenceClassification", config), batch, None

    return make


def _distilbert(positions: int = 512, **settings: Any) -> Callable[[Sizes], Made]:
    def make(s: Sizes) -> Made:
        config = _config("DistilBertConfig", s, max_position_embeddings=positions, **settings)
        batch = {**_tokens(s, positions), **_classes(config, s)}
        return _model("DistilBertForSequenceClassification", config), batch, None

    return make


_ROPE_OF_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ROPE_OF_QWEN = {"rope_type": "default", "rope_theta": 1000000.0}
_LLAMA: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_parameters": _ROPE_OF_LLAMA_3}
_GEMMA: dict[str, Any] = {"attn_implementation": "eager"}  # the one that caps the scores

# Sizes for tests: nothing is a multiple of a vector.
_ODD_DECODER = (60, 97, 2, 6, 2, 103, 40)
_ODD_MARKS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ODD_TOWER = {
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 97,
    "vocab_size": 103,
}


# ---- images ---------------------------------------------------------------------------------------------------------


def _image(kind: str, channels: int = 3, **settings: Any) -> Callable[[Sizes], Made]:
    side = settings["image_size"]

    def make(s: Sizes) -> Made:
        config = _config(f"{kind}Config", s, num_channels=channels, **settings)
        batch = {"pixel_values": torch.zeros(s.batch, channels, side, side), **_classes(config, s)}
        return _model(f"{kind}ForImageClassification", config), batch, None

    return make


def _vit(hidden: int, layers: int, heads: int, ffn: int, image: int, patch: int, channels: int) -> Any:
    return _image(
        "ViT",
        channels,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=ffn,
        image_size=image,
        patch_size=patch,
    )


def _clip(text: Mapping[str, Any], vision: Mapping[str, Any], **settings: Any) -> Callable[[Sizes], Made]:
    def loss(module: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        out = module(**batch, return_loss=True)
        return out.loss, {"logits_per_image": out.logits_per_image}

    def make(s: Sizes) -> Made:
        config = _config("CLIPConfig", s, text_config=dict(text), vision_config=dict(vision), **settings)
        side = config.vision_config.image_size
        batch = _tokens(s, config.text_config.max_position_embeddings)
        return _model("CLIPModel", config), {**batch, "pixel_values": torch.zeros(s.batch, 3, side, side)}, loss

    return make


def _unet(side: int, text: int, **settings: Any) -> Callable[[Sizes], Made]:
    """The denoiser of latent diffusion; its loss is the mean squared error of the noise it finds (Ho et al. 2020)."""

    def loss(module: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        found = module(batch["sample"], batch["timestep"], batch["encoder_hidden_states"], return_dict=False)[0]
        return F.mse_loss(found, batch["noise"]), {"noise_found": found}

    def make(s: Sizes) -> Made:
        module = _library("diffusers").UNet2DConditionModel(sample_size=side, cross_attention_dim=text, **settings)
        latents = torch.zeros(s.batch, 4, side, side)
        return (
            module,
            {
                "sample": latents,
                "timestep": torch.zeros(s.batch, dtype=torch.int64),
                "encoder_hidden_states": torch.zeros(s.batch, s.seq, text),
                "noise": torch.zeros_like(latents),
            },
            loss,
        )

    return make


# ---- sound ----------------------------------------------------------------------------------------------------------


def _whisper(
    hidden: int, ffn: int, layers: int, heads: int, vocab: int, mel_bins: int, **settings: Any
) -> Callable[[Sizes], Made]:
    def make(s: Sizes) -> Made:
        halves = {
            f"{half}_{key}": value
            for half in ("encoder", "decoder")
            for key, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", ffn))
        }
        sizes = {"d_model": hidden, "vocab_size": vocab, "num_mel_bins": mel_bins, **halves}
        config = _config("WhisperConfig", s, use_cache=False, **sizes, **settings)
        if s.seq > config.max_target_positions:
            raise GraphError(
                f"{s.seq} tokens of text are beyond the model's {config.max_target_positions}: choose fewer"
            )
        frames = torch.zeros(s.batch, config.num_mel_bins, 2 * config.max_source_positions)
        labels = torch.zeros(s.batch, s.seq, dtype=torch.int64)
        return _model("WhisperForConditionalGeneration", config), {"input_features": frames, "labels": labels}, None

    return make


# ---- the list -------------------------------------------------------------------------------------------------------

_QV = ("q_proj", "v_proj")
_LM_HEAD = {"head": ("lm_head",), "adapted": _QV}
_TEXT, _PICTURES, _ODD, _ODD_TEXT = Sizes(8, 128, 2), Sizes(8, 0, 1000), Sizes(3, 13, 3), Sizes(3, 13)

ZOO: dict[str, Entry] = {
    "llama-3.2-1b": Entry(
        "Llama 3.2, 16 layers of 2048, grouped heads, 1.24 B parameters",
        _decoder("Llama", 2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, **_LLAMA),
        Sizes(1, 512),
        **_LM_HEAD,
    ),
    "qwen2.5-1.5b": Entry(
        "Qwen 2.5, 28 layers of 1536, grouped heads, 1.54 B parameters",
        _decoder("Qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, rope_parameters=_ROPE_OF_QWEN),
        Sizes(1, 512),
        **_LM_HEAD,
    ),
    "gemma-2-2b": Entry(
        "Gemma 2, 26 layers of 2304, windows of 4096, capped scores, 2.61 B parameters",
        _causal("Gemma2", 8192, num_hidden_layers=26, **_GEMMA),
        Sizes(1, 512),
        **_LM_HEAD,
    ),
    "bert-large": Entry("BERT, 24 layers of 1024, 335 M parameters", _bert(1024, 24, 16, 4096), _TEXT),
    "vit-large": Entry(
        "ViT, 24 layers of 1024, images 224², 304 M parameters",
        _vit(1024, 24, 16, 4096, 224, 16, 3),
        _PICTURES,
        adapted=_QV,
    ),
    "sd-1.5-unet": Entry(
        "Stable Diffusion 1.5's UNet, latents 64², 860 M parameters",
        _unet(64, 768),
        Sizes(1, 77),
        ("conv_out",),
        ("to_q", "to_v"),
    ),
    "whisper-large-v3": Entry(
        "Whisper large v3, 32 + 32 layers of 1280, 30 s of sound, 1.54 B parameters",
        _whisper(1280, 5120, 32, 20, 51866, 128),
        Sizes(1, 64),
        ("proj_out",),
        _QV,
    ),
    "gpt2": Entry(
        "GPT-2, 12 layers of 768, 124 M parameters", _causal("GPT2", 1024), Sizes(4, 256), ("lm_head",), ("c_attn",)
    ),
    "opt-125m": Entry(
        "OPT, 12 layers of 768, 125 M parameters",
        _opt(768, 3072, 12, 12, 768),
        Sizes(4, 128),
        **_LM_HEAD,
    ),
    "opt-350m": Entry(
        "OPT, 24 layers of 1024, 331 M parameters",
        _opt(1024, 4096, 24, 16, 512, do_layer_norm_before=False),
        Sizes(4, 128),
        **_LM_HEAD,
    ),
    "opt-1.3b": Entry(
        "OPT, 24 layers of 2048, 1.32 B parameters",
        _opt(2048, 8192, 24, 32, 2048),
        Sizes(2, 128),
        **_LM_HEAD,
    ),
    "minilm": Entry("BERT, 6 layers of 384 (MiniLM), 22 M parameters", _bert(384, 6, 12, 1536), Sizes(16, 64, 2)),
    "distilbert": Entry(
        "DistilBERT, 6 layers of 768, 67 M parameters",
        _distilbert(),
        _TEXT,
        ("pre_classifier", "classifier"),
        ("q_lin", "v_lin"),
    ),
    "bert-base": Entry("BERT, 12 layers of 768, 110 M parameters", _bert(768, 12, 12, 3072), _TEXT),
    "vit-tiny": Entry(
        "ViT, 12 layers of 192, images 224², 5.5 M parameters",
        _vit(192, 12, 3, 768, 224, 16, 3),
        _PICTURES,
        adapted=_QV,
    ),
    "swin-tiny": Entry(
        "Swin, 2+2+6+2 layers of 96 to 768, windows of 7², 28 M parameters",
        _image("Swin", image_size=224),
        _PICTURES,
        adapted=_QV,
    ),
    "clip": Entry(
        "CLIP ViT-B/32, 12 + 12 layers, contrastive loss, 151 M parameters",
        # The usual token of the end is 49407, after which the text is read.
        _clip({"eos_token_id": 49407}, {}),
        Sizes(16, 77),
        ("visual_projection", "text_projection", "logit_scale"),
        _QV,
    ),
    "vit-digits": Entry(
        "ViT, 4 layers of 64, digits of 8², the demo",
        _vit(64, 4, 4, 128, 8, 2, 1),
        Sizes(64, 0, 10),
        adapted=_QV,
    ),
    "llama-odd": Entry(
        "Llama, 2 layers of 60, for tests",
        _decoder("Llama", *_ODD_DECODER, **(_ODD_MARKS | _LLAMA)),
        _ODD_TEXT,
        **_LM_HEAD,
    ),
    "qwen-odd": Entry(
        "Qwen 2, 2 layers of 60, for tests",
        _decoder("Qwen2", *_ODD_DECODER, **_ODD_MARKS),
        _ODD_TEXT,
        **_LM_HEAD,
    ),
    "gemma-odd": Entry(
        "Gemma 2, 2 layers of 60, windows of 5, for tests",
        _decoder(
            "Gemma2",
            *_ODD_DECODER,
            **(_ODD_MARKS | _GEMMA),
            head_dim=10,
            sliding_window=5,
            query_pre_attn_scalar=10,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        _ODD_TEXT,
        **_LM_HEAD,
    ),
    "gpt2-odd": Entry(
        "GPT-2, 2 layers of 60, for tests",
        _causal("GPT2", 40, n_embd=60, n_layer=2, n_head=6, n_inner=97, n_positions=40, vocab_size=103),
        _ODD_TEXT,
        ("lm_head",),
        ("c_attn",),
    ),
    "opt-odd": Entry(
        "OPT, 2 layers of 60, for tests",
        _opt(60, 97, 2, 6, 28, 40, vocab_size=103, do_layer_norm_before=False),
        _ODD_TEXT,
        **_LM_HEAD,
    ),
    "bert-tiny": Entry("BERT, 2 layers of 60, odd sizes for tests", _bert(60, 2, 4, 96, 101, 40), _ODD),
    "distilbert-odd": Entry(
        "DistilBERT, 2 layers of 60, for tests",
        _distilbert(40, dim=60, n_layers=2, n_heads=4, hidden_dim=97, vocab_size=103),
        _ODD,
        ("pre_classifier", "classifier"),
        ("q_lin", "v_lin"),
    ),
    "vit-odd": Entry(
        "ViT, 2 layers of 60, odd sizes for tests",
        _vit(60, 2, 4, 96, 8, 2, 1),
        Sizes(3, 0, 10),
        adapted=_QV,
    ),
    "swin-odd": Entry(
        "Swin, 2+2 layers of 12, windows of 3², for tests",
        _image("Swin", image_size=24, patch_size=2, embed_dim=12, depths=[2, 2], num_heads=[2, 3], window_size=3),
        Sizes(3, 0, 5),
        adapted=_QV,
    ),
    "clip-odd": Entry(
        "CLIP, 2 + 2 layers, for tests",
        _clip(
            {**_ODD_TOWER, "max_position_embeddings": 17, "eos_token_id": 102},
            {**_ODD_TOWER, "image_size": 15, "patch_size": 5},
            projection_dim=22,
        ),
        _ODD_TEXT,
        ("visual_projection", "text_projection", "logit_scale"),
        _QV,
    ),
    "unet-odd": Entry(
        "A UNet of two resolutions with cross-attention, for tests",
        _unet(
            6,
            14,
            block_out_channels=(12, 12),  # equal, so that its many convolutions share kernels
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=2,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        Sizes(3, 7),
        ("conv_out",),
        ("to_q", "to_v"),
    ),
    "whisper-odd": Entry(
        "Whisper, 2 + 2 layers of 60, for tests",
        _whisper(
            *(60, 97, 2, 6, 103, 9),
            max_source_positions=21,
            max_target_positions=16,
            decoder_start_token_id=1,
            **_ODD_MARKS,
        ),
        _ODD_TEXT,
        ("proj_out",),
        _QV,
    ),
}

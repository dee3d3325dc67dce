"""Labelled text files: ``label<TAB>text`` lines, tokenised for a BERT-like model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from layoutopt.errors import LayoutOptError

__all__ = ["LabelledText", "encode", "label_ids", "read_labelled_text"]

HEADER_WORDS = frozenset({"label", "class", "category", "target"})


@dataclass(frozen=True)
class LabelledText:
    """The lines of a file: ``labels[i]`` belongs to ``texts[i]``; ``header`` is the header line that was skipped."""

    labels: tuple[str, ...]
    texts: tuple[str, ...]
    header: str = ""

    @property
    def classes(self) -> tuple[str, ...]:
        """The distinct labels, sorted."""
        return tuple(sorted(set(self.labels)))

    @property
    def fingerprint(self) -> str:
        """Short hash of every label and text, in order."""
        lines = "\n".join(f"{label}\t{text}" for label, text in zip(self.labels, self.texts, strict=True))
        return hashlib.sha256(lines.encode()).hexdigest()[:16]


def read_labelled_text(path: str | Path) -> LabelledText:
    """Read a UTF-8 file of ``label<TAB>text`` lines; a first line labelled "label", "class", … is a header.

    Raises:
        LayoutOptError: the file is missing, empty, not UTF-8, or a line has no tab; the message says which line.
    """
    file = Path(path)
    if not file.is_file():
        raise LayoutOptError(f"no data file at {file}: expected a UTF-8 text file of label<TAB>text lines")
    try:
        content = file.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise LayoutOptError(f"{file} is not UTF-8 text (byte {error.start}): convert it first") from error
    labels, texts, header = [], [], ""
    for number, line in enumerate(content.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip():
            continue
        label, tab, text = line.partition("\t")
        if not tab:
            raise LayoutOptError(f"{file} line {number} has no tab: expected label<TAB>text, got {line[:40]!r}")
        if number == 1 and label.strip().lower() in HEADER_WORDS:
            header = line
            continue
        if not label.strip() or not text.strip():
            raise LayoutOptError(f"{file} line {number} has an empty {'text' if label.strip() else 'label'}")
        labels.append(label.strip())
        texts.append(text)
    if not labels:
        raise LayoutOptError(f"{file} holds no labelled text: expected at least one label<TAB>text line")
    return LabelledText(tuple(labels), tuple(texts), header)


def label_ids(labels: Sequence[str], classes: Sequence[str], where: str) -> np.ndarray:
    """Class numbers, int32 [n].

    Raises:
        LayoutOptError: a label that is not among ``classes``, naming it and ``where`` it stands.
    """
    number = {label: i for i, label in enumerate(classes)}
    unknown = sorted(set(labels) - set(number))
    if unknown:
        raise LayoutOptError(
            f"{where} has the label {unknown[0]!r}, never seen in training: the model knows {', '.join(classes)}"
        )
    return np.array([number[label] for label in labels], dtype=np.int32)


def encode(texts: Sequence[str], tokenizer_file: str | Path, seq: int) -> dict[str, np.ndarray]:
    """Token ids and masks of ``texts``, truncated and padded to ``seq``.

    Args:
        texts: n strings.
        tokenizer_file: a Hugging Face ``tokenizer.json``.
        seq: tokens per text.

    Returns:
        ``input_ids``, ``attention_mask`` and ``token_type_ids``, int32 [n, seq].

    Raises:
        LayoutOptError: the tokenizer file is damaged, or the package ``tokenizers`` is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise LayoutOptError("reading text needs tokenizers: pip install 'layoutopt[examples]'") from error
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the package raises nothing narrower
        raise LayoutOptError(f"{tokenizer_file} is not a tokenizer file, or is damaged ({error})") from error
    tokenizer.enable_truncation(seq)
    padding = tokenizer.padding or {}
    tokenizer.enable_padding(length=seq, pad_id=padding.get("pad_id", 0), pad_token=padding.get("pad_token", "[PAD]"))
    rows = tokenizer.encode_batch(list(texts))
    return {
        "input_ids": np.array([r.ids for r in rows], dtype=np.int32),
        "attention_mask": np.array([r.attention_mask for r in rows], dtype=np.int32),
        "token_type_ids": np.array([r.type_ids for r in rows], dtype=np.int32),
    }

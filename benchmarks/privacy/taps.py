"""What is attacked: messages in disjoint parts, and a public backbone's activations of them as a server gets them.

Tap 0 is the embedding's result and tap k that of block k. The last block's is the backbone's final output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layoutopt import textclass, textdata
from layoutopt.errors import LayoutOptError
from layoutopt.quantize import Format, dequantise, quantise

__all__ = ["Backbone", "Messages", "Parts", "Rows", "pretrained", "received", "tiny"]

_BATCH = 32
_SPECIAL = ("[CLS]", "[SEP]", "[PAD]")


@dataclass(frozen=True)
class Messages:
    """Texts as token ids.

    Attributes:
        ids: int32 [n, seq], padded.
        mask: int32 [n, seq], 1 where a token is.
        labels: int32 [n].
        special: ids that stand for no text.
        fingerprint: of the file.
    """

    ids: np.ndarray
    mask: np.ndarray
    labels: np.ndarray
    special: tuple[int, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, rows: np.ndarray | slice) -> Messages:
        """Some of them."""
        return Messages(self.ids[rows], self.mask[rows], self.labels[rows], self.special, self.fingerprint)

    def is_text(self, ids: np.ndarray) -> np.ndarray:
        """Which ids stand for text."""
        return ~np.isin(ids, self.special)

    @classmethod
    def read(cls, data_file: Path, tokenizer_file: Path, seq: int) -> Messages:
        """A file's messages, each once: one that is sent twice would otherwise be in two parts."""
        text = textdata.read_labelled_text(data_file)
        encoded = textdata.encode(text.texts, tokenizer_file, seq)
        special = textdata.encode([" ".join(_SPECIAL)], tokenizer_file, seq)["input_ids"][0]
        labels = textdata.label_ids(text.labels, text.classes, str(data_file))
        _, first = np.unique(encoded["input_ids"], axis=0, return_index=True)
        first.sort()
        every = cls(
            encoded["input_ids"], encoded["attention_mask"], labels, tuple(sorted(set(special))), text.fingerprint
        )
        return every.part(first)


@dataclass(frozen=True)
class Parts:
    """Disjoint messages: those whose sender is attacked, and what an attacker has of the same kind.

    Attributes:
        device: the device trains on these and sends their taps; text is recovered from the first of them.
        held_out: the device's, to see what its training is worth.
        public: the attacker's.
    """

    device: Messages
    held_out: Messages
    public: Messages

    @classmethod
    def of(cls, messages: Messages, device: int, held_out: int, public: int, seed: int) -> Parts:
        """Cut shuffled messages.

        Raises:
            LayoutOptError: there are too few.
        """
        wanted = device + held_out + public
        if wanted > len(messages):
            raise LayoutOptError(f"the study needs {wanted} different messages, the file holds {len(messages)}")
        order = np.random.default_rng(seed).permutation(len(messages))
        cuts = np.split(order[:wanted], [device, device + held_out])
        return cls(*(messages.part(cut) for cut in cuts))


@dataclass(frozen=True)
class Rows:
    """Activations of the tokens of messages, one after the other, without padding.

    Attributes:
        taps: float32 [tokens, width] by tap.
        ids: int64 [tokens].
        position: int64 [tokens], in the message.
        message: int64 [tokens], its number.
    """

    taps: dict[int, np.ndarray]
    ids: np.ndarray
    position: np.ndarray
    message: np.ndarray

    def pivots(self, tap: int) -> np.ndarray:
        """Only the first token's activation, float32 [messages, width]."""
        return self.taps[tap][self.position == 0]


class Backbone:
    """A BERT whose weights everybody has.

    Args:
        model: ``transformers.BertModel``.
    """

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._shallow: dict[int, Any] = {}
        self.blocks: int = model.config.num_hidden_layers
        self.width: int = model.config.hidden_size
        self.words: np.ndarray = model.embeddings.word_embeddings.weight.detach().numpy()

    @torch.no_grad()
    def every_state(self, ids: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
        """All taps, each [n, seq, width]."""
        found = self._model(
            input_ids=torch.from_numpy(ids).long(),
            attention_mask=torch.from_numpy(mask).long(),
            output_hidden_states=True,
        )
        return [state.numpy() for state in found.hidden_states]

    @torch.no_grad()
    def state(self, ids: np.ndarray, tap: int) -> np.ndarray:
        """One tap of messages of the same length, [n, seq, width]; blocks behind it are not computed."""
        return self._upto(tap)(input_ids=torch.from_numpy(ids).long()).last_hidden_state.numpy()

    def _upto(self, tap: int) -> Any:
        if tap not in self._shallow:
            config = type(self._model.config)(**{**self._model.config.to_dict(), "num_hidden_layers": 0})
            shallow = type(self._model)(config, add_pooling_layer=False).eval()
            shallow.embeddings = self._model.embeddings
            shallow.encoder.layer = self._model.encoder.layer[:tap]
            self._shallow[tap] = shallow
        return self._shallow[tap]

    @torch.no_grad()
    def embedded(self, position: int) -> np.ndarray:
        """Tap 0 of every token of the vocabulary at a position, [vocabulary, width]."""
        ids = torch.arange(len(self.words))[:, None]
        return self._model.embeddings(input_ids=ids, position_ids=torch.full_like(ids, position))[:, 0].numpy()

    def rows(self, messages: Messages, taps: tuple[int, ...] | None = None) -> Rows:
        """Activations of every token, of all taps by default."""
        taps = tuple(range(self.blocks + 1)) if taps is None else taps
        where = np.nonzero(messages.mask)
        found = {tap: np.empty((len(where[0]), self.width), np.float32) for tap in taps}
        starts = np.concatenate([[0], np.cumsum(messages.mask.sum(1))])
        for batch, states in self._batches(messages):
            for at, message in enumerate(batch):
                span = slice(starts[message], starts[message + 1])
                for tap in taps:
                    found[tap][span] = states[tap][at, : span.stop - span.start]
        return Rows(found, messages.ids[where].astype(np.int64), where[1], where[0])

    def pivots(self, messages: Messages) -> np.ndarray:
        """The first token's activations, float32 [taps, messages, width]."""
        found = np.empty((self.blocks + 1, len(messages), self.width), np.float32)
        for batch, states in self._batches(messages):
            for tap, state in enumerate(states):
                found[tap, batch] = state[:, 0]
        return found

    def _batches(self, messages: Messages) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Messages of about the same length together: padding costs time."""
        lengths = messages.mask.sum(1)
        order = np.argsort(lengths, kind="stable")
        for begin in range(0, len(order), _BATCH):
            batch = order[begin : begin + _BATCH]
            longest = int(lengths[batch].max())
            yield batch, self.every_state(messages.ids[batch, :longest], messages.mask[batch, :longest])


def pretrained() -> tuple[Backbone, Path]:
    """MiniLM and its tokenizer's file."""
    from transformers import BertModel

    directory = textclass.pretrained("minilm").directory
    return Backbone(BertModel.from_pretrained(directory, add_pooling_layer=False)), directory / "tokenizer.json"


def tiny(seed: int) -> tuple[Backbone, Path]:
    """Two blocks of random weights with MiniLM's tokenizer: runs everything, says nothing."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    file = textclass.pretrained("minilm").directory / "tokenizer.json"
    return Backbone(BertModel(config, add_pooling_layer=False)), file


def received(rows: np.ndarray, fmt: str) -> np.ndarray:
    """Activations as the server reads them: stored in a format and back.

    Args:
        rows: float32 [n, width].
        fmt: as ``Format.parse`` takes it.
    """
    form = Format.parse(fmt)
    return dequantise(*quantise(rows, form), rows.shape[1], form)

"""Text from activations of all tokens: look-up among embeddings, trained inverters, search with the public backbone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from benchmarks.privacy.taps import Backbone, Rows

__all__ = ["ContextInverter", "LinearInverter", "look_up", "recovery", "refine"]

_CHUNK = 4096


def recovery(ranked: np.ndarray, rows: Rows, is_text: np.ndarray) -> dict[str, float]:
    """How much of the text is found.

    Args:
        ranked: int64 [tokens, k], the likeliest ids, best first.
        rows: what they were found from.
        is_text: bool [tokens], False for the tokens that every message has.

    Returns:
        Shares: ``top1`` and ``top5`` of text tokens (where five or more are ranked), ``with_special`` of all tokens,
        ``whole`` of messages.
    """
    hit = ranked[:, 0] == rows.ids
    found = {"top1": float(hit[is_text].mean()), "with_special": float(hit.mean())}
    if ranked.shape[1] >= 5:
        found["top5"] = float((ranked[is_text, :5] == rows.ids[is_text, None]).any(1).mean())
    missed = np.zeros(rows.message.max() + 1)
    np.add.at(missed, rows.message[is_text], ~hit[is_text])
    return {**found, "whole": float((missed[np.unique(rows.message)] == 0).mean())}


def look_up(backbone: Backbone, tap_rows: Sequence[np.ndarray], position: np.ndarray, k: int = 5) -> list[np.ndarray]:
    """The tokens whose embedding at that position is nearest; exact on tap 0 where nothing was rounded.

    Args:
        backbone: the public model.
        tap_rows: activations, each [tokens, width], that are looked up in one pass.
        position: int64 [tokens].
        k: how many to name.

    Returns:
        int64 [tokens, k] for each of ``tap_rows``.
    """
    found = [np.empty((len(position), k), np.int64) for _ in tap_rows]
    for place in np.unique(position):
        here = position == place
        candidates = torch.from_numpy(backbone.embedded(int(place)))
        half_squares = (candidates**2).sum(1) / 2
        for rows, ranked in zip(tap_rows, found, strict=True):
            for chunk in np.array_split(np.nonzero(here)[0], -(-here.sum() // _CHUNK)):
                score = torch.from_numpy(rows[chunk]) @ candidates.T - half_squares
                ranked[chunk] = torch.topk(score, k, dim=1).indices.numpy()
    return found


def _directions(words: np.ndarray) -> torch.Tensor:
    """Word embeddings about their mean, of length 1."""
    table = torch.from_numpy(words - words.mean(0))
    return table / table.norm(dim=1, keepdim=True).clamp_min(1e-6)


@dataclass(frozen=True)
class LinearInverter:
    """A linear map, fitted in closed form, from a token's activation to the direction of its word's embedding.

    It can name words that no public message holds, since their embeddings are public.
    """

    mean: np.ndarray
    weight: np.ndarray
    table: torch.Tensor

    @classmethod
    def fit(cls, rows: np.ndarray, ids: np.ndarray, words: np.ndarray, ridge: float = 1e-3) -> LinearInverter:
        """Fit on public activations.

        Args:
            rows: float32 [tokens, width].
            ids: int64 [tokens].
            words: the public model's word embeddings, [vocabulary, d].
            ridge: over the mean variance of an activation.
        """
        table = _directions(words)
        mean = rows.mean(0)
        x, y = (rows - mean).astype(np.float64), table[ids].numpy().astype(np.float64)
        gram = x.T @ x
        gram[np.diag_indices_from(gram)] += ridge * np.trace(gram) / len(gram)
        return cls(mean, np.linalg.solve(gram, x.T @ y).astype(np.float32), table)

    def ranked(self, rows: np.ndarray, k: int = 5) -> np.ndarray:
        """The likeliest ids, int64 [tokens, k]."""
        found = np.empty((len(rows), k), np.int64)
        for begin in range(0, len(rows), _CHUNK):
            guess = torch.from_numpy((rows[begin : begin + _CHUNK] - self.mean) @ self.weight)
            found[begin : begin + _CHUNK] = torch.topk(guess @ self.table.T, k, dim=1).indices.numpy()
        return found


class ContextInverter:
    """A transformer over the activations of a whole message, trained on public ones to name every token.

    Args:
        rows: public activations of a tap, [tokens, width].
        where: the public tokens.
        words: the public model's word embeddings, whose directions are its output layer.
        epochs: passes over the public messages.
        seed: of initial weights, order and sampled words.
    """

    _WIDTH, _BATCH, _SAMPLED, _SHARPNESS = 256, 16, 1024, 16.0

    def __init__(self, rows: np.ndarray, where: Rows, words: np.ndarray, epochs: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._mean, self._spread = rows.mean(0), float(rows.std())
        self._table = _directions(words)
        self._enter = nn.Linear(rows.shape[1], self._WIDTH)
        layer = nn.TransformerEncoderLayer(self._WIDTH, 4, 512, 0.0, "gelu", batch_first=True, norm_first=True)
        self._mix = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self._leave = nn.Linear(self._WIDTH, words.shape[1])
        self._skip = nn.Linear(rows.shape[1], words.shape[1])
        self._train(rows, where, epochs, np.random.default_rng(seed))

    def _train(self, rows: np.ndarray, where: Rows, epochs: int, draw: np.random.Generator) -> None:
        weights = [p for part in (self._enter, self._mix, self._leave, self._skip) for p in part.parameters()]
        messages = np.unique(where.message)
        steps = epochs * -(-len(messages) // self._BATCH)
        optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
        for _ in range(epochs):
            order = draw.permutation(messages)
            for begin in range(0, len(order), self._BATCH):
                pick = np.isin(where.message, order[begin : begin + self._BATCH])
                truth = torch.from_numpy(where.ids[pick])
                sampled = torch.from_numpy(draw.integers(0, len(self._table), self._SAMPLED))
                names, target = torch.unique(torch.cat([truth, sampled]), return_inverse=True)
                guess = self._guess(rows[pick], where.message[pick])
                loss = nn.functional.cross_entropy(guess @ self._table[names].T, target[: len(truth)])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()

    def _guess(self, rows: np.ndarray, message: np.ndarray) -> torch.Tensor:
        """A direction per token, [tokens, d], made longer by how sharply it is meant."""
        x = torch.from_numpy((rows - self._mean) / self._spread)
        parts = torch.split(x, np.unique(message, return_counts=True)[1].tolist())
        padded = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        absent = torch.stack([torch.arange(padded.shape[1]) >= len(p) for p in parts])
        mixed = self._leave(self._mix(self._enter(padded), src_key_padding_mask=absent))
        return self._SHARPNESS * nn.functional.normalize(mixed[~absent] + self._skip(x), dim=1)

    @torch.no_grad()
    def ranked(self, rows: np.ndarray, where: Rows, k: int = 5) -> np.ndarray:
        """The likeliest ids, int64 [tokens, k]."""
        self._mix.eval()
        found = np.empty((len(rows), k), np.int64)
        for some in np.array_split(np.unique(where.message), max(1, len(where.ids) // _CHUNK)):
            pick = np.isin(where.message, some)
            guess = self._guess(rows[pick], where.message[pick])
            found[pick] = torch.topk(guess @ self._table.T, k, dim=1).indices.numpy()
        return found


def refine(backbone: Backbone, tap: int, seen: np.ndarray, candidates: np.ndarray, sweeps: int = 2) -> np.ndarray:
    """One message's tokens, chosen so that the public backbone gives what was seen.

    Each sweep tries every candidate at every position beside the present guess of the others, and takes the best of
    each position, or, where these don't go together, the best one alone.

    Args:
        backbone: the public model.
        tap: which one was seen.
        seen: [tokens, width], rounded as it was sent.
        candidates: int64 [tokens, k], the guess to start from first.
        sweeps: how often at most.

    Returns:
        int64 [tokens].
    """
    tokens, k = candidates.shape
    place = np.arange(tokens)

    def distances(tried: np.ndarray) -> np.ndarray:
        parts = np.array_split(tried, -(-len(tried) // 64))
        return np.concatenate([((backbone.state(part, tap) - seen) ** 2).sum((1, 2)) for part in parts])

    guess = candidates[:, 0].copy()
    present = distances(guess[None])[0]
    for _ in range(sweeps):
        tried = np.tile(guess, (tokens, k, 1))
        tried[place, :, place] = candidates
        found = distances(tried.reshape(-1, tokens)).reshape(tokens, k)
        best = found.argmin(1)
        alone = found[place, best]
        if alone.min() >= present:
            break
        together = np.where(alone < present, candidates[place, best], guess)
        reached = distances(together[None])[0]
        at = int(alone.argmin())
        if reached > alone[at]:
            together, reached = guess.copy(), alone[at]
            together[at] = candidates[at, best[at]]
        guess, present = together, reached
    return guess

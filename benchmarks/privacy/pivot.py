"""What one token's activation says of its message: the words in it, and which of known messages it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve
from sklearn.metrics import average_precision_score

from benchmarks.privacy.taps import Messages

__all__ = ["WordBags", "matched", "ridge_scores", "word_figures"]

_RIDGES = (1e-2, 1e-1, 1.0)
_COMMON = 100


@dataclass(frozen=True)
class WordBags:
    """Which words occur in which messages.

    Attributes:
        words: int64 [v], ids of tokens that enough public messages hold, the most frequent first.
        public, sent: bool [messages, v].
        covered: share of the sent messages' tokens that are among the words.
    """

    words: np.ndarray
    public: np.ndarray
    sent: np.ndarray
    covered: float

    @classmethod
    def of(cls, public: Messages, sent: Messages, least: int) -> WordBags:
        """Bags of two sets of messages, over the words that ``least`` public ones hold."""
        top = int(max(public.ids.max(), sent.ids.max())) + 1
        bags = [np.zeros((len(m), top), bool) for m in (public, sent)]
        for bag, messages in zip(bags, (public, sent), strict=True):
            bag[np.nonzero(messages.mask)[0], messages.ids[messages.mask > 0]] = True
            bag[:, list(public.special)] = False
        often = bags[0].sum(0)
        words = np.argsort(-often, kind="stable")
        words = words[often[words] >= least]
        return cls(words, bags[0][:, words], bags[1][:, words], float(bags[1][:, words].sum() / bags[1].sum()))


def ridge_scores(public: np.ndarray, truth: np.ndarray, sent: np.ndarray) -> tuple[np.ndarray, float]:
    """How strongly each sent message speaks for each word, by a linear map that was fitted on public ones.

    How much it is shrunk is chosen on a fifth of the public messages, and with it the score above which a word counts
    as found, for the best F1.

    Args:
        public: float32 [messages, features].
        truth: bool [messages, v].
        sent: float32 [others, features].

    Returns:
        Scores [others, v], and the threshold.
    """
    cut = len(public) * 4 // 5
    part = _Ridge.of(public[:cut], truth[:cut])
    tried = [part.scores(public[cut:], ridge) for ridge in _RIDGES]
    quality = [average_precision_score(truth[cut:].ravel(), scores.ravel()) for scores in tried]
    best = int(np.argmax(quality))
    threshold = _best_threshold(tried[best].ravel(), truth[cut:].ravel())
    return _Ridge.of(public, truth).scores(sent, _RIDGES[best]), threshold


@dataclass(frozen=True)
class _Ridge:
    """The sums that a fit needs."""

    mean: np.ndarray
    base: np.ndarray
    gram: np.ndarray
    cross: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> _Ridge:
        mean, base = x.mean(0), y.mean(0)
        centred = x - mean
        return cls(mean, base, (centred.T @ centred).astype(np.float64), centred.T @ (y - base).astype(np.float32))

    def scores(self, x: np.ndarray, ridge: float) -> np.ndarray:
        shrunk = self.gram.copy()
        shrunk[np.diag_indices_from(shrunk)] += ridge * np.trace(self.gram) / len(shrunk)
        weight = solve(shrunk, self.cross, assume_a="pos").astype(np.float32)
        return (x - self.mean) @ weight + self.base


def _best_threshold(scores: np.ndarray, truth: np.ndarray) -> float:
    order = np.argsort(-scores)
    hits = np.cumsum(truth[order])
    f1 = 2 * hits / (np.arange(1, len(order) + 1) + truth.sum())
    return float(scores[order[f1.argmax()]])


def word_figures(scores: np.ndarray, truth: np.ndarray, threshold: float) -> dict[str, float]:
    """How well words are told.

    Args:
        scores: [messages, v].
        truth: bool [messages, v], the most frequent word first.
        threshold: a word with at least this score counts as found.

    Returns:
        ``average_precision`` over all pairs of message and word; ``rarer`` the same without the 100 commonest words
        (of few words, half); ``precision`` and ``recall`` at the threshold; ``by_count``: the share of right words
        among as many of a message's best as it has words.
    """
    rarer = min(_COMMON, truth.shape[1] // 2)
    found = scores >= threshold
    ranks = np.argsort(-scores, 1)
    counts = truth.sum(1)
    right = [truth[i, ranks[i, :n]].sum() for i, n in enumerate(counts)]
    return {
        "average_precision": float(average_precision_score(truth.ravel(), scores.ravel())),
        "rarer": float(average_precision_score(truth[:, rarer:].ravel(), scores[:, rarer:].ravel())),
        "precision": float((found & truth).sum() / max(found.sum(), 1)),
        "recall": float((found & truth).sum() / truth.sum()),
        "by_count": float(np.sum(right) / counts.sum()),
    }


def matched(sent: np.ndarray, known: np.ndarray, which: np.ndarray) -> float:
    """How often what was sent lies nearest to its own message's activation among those of known messages.

    Of several that are equally near, one is guessed.

    Args:
        sent: float32 [n, features], as the server reads them.
        known: float32 [messages, features], computed with the public backbone and rounded likewise.
        which: int [n], the right one.
    """
    x, y = sent.astype(np.float64), known.astype(np.float64)
    distance = (x**2).sum(1)[:, None] - 2 * x @ y.T + (y**2).sum(1)
    nearest = distance <= distance.min(1, keepdims=True) + 1e-9 * (y**2).sum(1).max()
    return float((nearest[np.arange(len(x)), which] / nearest.sum(1)).mean())

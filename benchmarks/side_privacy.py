"""What a curious server learns from side-tuning: text from activations, labels from targets; and what hiding costs.

    python benchmarks/side_privacy.py --data FILE [--only tokens,words,labels,noise] [--json OUT] [--smoke]

FILE: label<TAB>text lines. MiniLM's weights are public, and the server is taken to have them and other messages of the
same kind, disjoint from the device's. Activations are float32's and what int8, int4 and fp4 leave of them.

*tokens*: activations of all tokens. Each is looked up among the embeddings of the whole vocabulary; a linear map and a
small transformer are trained on public messages to name it; with what they name the public backbone is searched for the
text that gives the very activations seen. *words*: only the first token's activation (pivot). Which words are in the
message (a linear map, beside the words' frequency alone), and which of known messages it is. *labels*: what is read
from labels, from prediction differences and from variants of them, beside the accuracy of the side network that is
trained on each. *noise*: Gaussian noise on the pivot, the same three questions.

Better attackers exist (more text, larger decoders): every figure is a lower bound of what leaks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.minilm import smoke_file
from benchmarks.privacy import inversion, labels, pivot, sendings, taps, training
from benchmarks.recording import Record
from benchmarks.studies import ended

FORMATS = ("float32", "int8:64", "int4:64", "fp4:64")
SEED = 0
NOISE = (0.5, 1.0, 2.0)
"""In spreads of a tap over messages."""
DELTA = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Messages of each use.

    Attributes:
        seq: tokens a message at most.
        device, held_out, public: messages of each part.
        victims: of the device's, those whose text is attacked.
        readers: of the public ones, those that inverters of all tokens are trained on.
        searched: of the victims, those that are searched with the backbone.
        epochs: of the context inverter.
        least: public messages that hold a word which is looked for.
        steps: of the side network.
        seeds: trainings per figure.
    """

    seq: int = 64
    device: int = 1500
    held_out: int = 500
    public: int = 2000
    victims: int = 150
    readers: int = 1000
    searched: int = 12
    epochs: int = 6
    least: int = 5
    steps: int = 1000
    seeds: int = 3


SMOKE = Sizes(16, 16, 8, 16, 4, 8, 2, 1, 2, 4, 1)


@dataclass(frozen=True)
class Study:
    """What every part of the study needs."""

    backbone: taps.Backbone
    parts: taps.Parts
    sizes: Sizes

    @property
    def victims(self) -> taps.Messages:
        """The messages that are attacked."""
        return self.parts.device.part(slice(self.sizes.victims))

    @property
    def depth(self) -> int:
        """The last tap."""
        return self.backbone.blocks

    @cached_property
    def pivots(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the device's messages, of those held out and of the public's, float32 [taps, messages, width] each."""
        parts = self.parts
        return tuple(self.backbone.pivots(m) for m in (parts.device, parts.held_out, parts.public))


def tokens(study: Study) -> Iterator[dict[str, Any]]:
    """Text from all tokens' activations, by attack, tap and format."""
    seen = study.backbone.rows(study.victims)
    known = study.backbone.rows(study.parts.public.part(slice(study.sizes.readers)))
    is_text, words = study.victims.is_text(seen.ids), study.backbone.words
    every = range(study.depth + 1)

    def row(attack: str, tap: str, fmt: str, ranked: np.ndarray) -> dict[str, Any]:
        return {"attack": attack, "tap": tap, "format": fmt, **inversion.recovery(ranked, seen, is_text)}

    looked = [(0, fmt) for fmt in FORMATS] + [(tap, "float32") for tap in every[1:]]
    found = inversion.look_up(study.backbone, [taps.received(seen.taps[t], f) for t, f in looked], seen.position)
    yield from (row("look-up", str(tap), fmt, ranked) for (tap, fmt), ranked in zip(looked, found, strict=True))

    for tap in every:
        for fmt in FORMATS:
            inverter = inversion.LinearInverter.fit(taps.received(known.taps[tap], fmt), known.ids, words)
            yield row("linear", str(tap), fmt, inverter.ranked(taps.received(seen.taps[tap], fmt)))
    for first in every[1:-1]:
        both = [np.concatenate([taps.received(r.taps[t], "int4:64") for t in every[first:]], 1) for r in (known, seen)]
        inverter = inversion.LinearInverter.fit(both[0], known.ids, words)
        yield row("linear", f"{first}-{study.depth}", "int4:64", inverter.ranked(both[1]))
    for tap in sorted({1, (study.depth + 1) // 2, study.depth}):
        yield from deepened(study, known, seen, tap, "int4:64")


def deepened(study: Study, known: taps.Rows, seen: taps.Rows, tap: int, fmt: str) -> Iterator[dict[str, Any]]:
    """The trained transformer, and the search that starts from what it names."""
    rows = taps.received(seen.taps[tap], fmt)
    inverter = inversion.ContextInverter(
        taps.received(known.taps[tap], fmt), known, study.backbone.words, study.sizes.epochs, SEED
    )
    ranked = inverter.ranked(rows, seen, k=8)
    is_text = study.victims.is_text(seen.ids)
    head = {"tap": str(tap), "format": fmt}
    yield {"attack": "transformer", **head, **inversion.recovery(ranked, seen, is_text)}
    lengths = np.bincount(seen.message)
    chosen = np.argsort(np.abs(lengths - np.median(lengths)), kind="stable")[: study.sizes.searched]
    pick = np.isin(seen.message, chosen)
    better = ranked[:, :1].copy()
    for message in chosen:
        own = seen.message == message
        better[own, 0] = inversion.refine(study.backbone, tap, rows[own], ranked[own])
    some = taps.Rows({}, seen.ids[pick], seen.position[pick], seen.message[pick])
    for attack, found in (("transformer, of those searched", ranked[:, :1]), ("search", better)):
        yield {"attack": attack, **head, **inversion.recovery(found[pick], some, is_text[pick])}


def words(study: Study) -> Iterator[dict[str, Any]]:
    """Words from the pivot's activations, by tap and format, and look-up among known messages."""
    device, _, everyone = study.pivots
    bags = pivot.WordBags.of(study.parts.public, study.victims, study.sizes.least)
    base = np.broadcast_to(bags.public.mean(0), bags.sent.shape)
    head = {"words": len(bags.words), "covered": bags.covered}
    yield {"tap": "none", "format": "-", **head, **pivot.word_figures(base, bags.sent, 0.5)}
    last = study.depth
    # As a device computes them, all padded alike; an attacker's batches round otherwise.
    sent = np.stack([state[:, 0] for state in study.backbone.every_state(study.victims.ids, study.victims.mask)])
    single = [((tap,), fmt) for tap in range(1, last + 1) for fmt in FORMATS]
    several = [(tuple(range(first, last + 1)), fmt) for first in range(1, last) for fmt in ("int8:64", "int4:64")]
    for some, fmt in single + several:
        chosen = list(some)
        scale = spread(everyone[chosen])
        known = beside(everyone[chosen], scale, fmt)
        seen, others = (beside(states[chosen], scale, fmt) for states in (sent, device))
        scores, threshold = pivot.ridge_scores(known, bags.public, seen)
        yield {
            "tap": named(some),
            "format": fmt,
            **head,
            **pivot.word_figures(scores, bags.sent, threshold),
            "known_message": pivot.matched(seen, np.concatenate([others, known]), np.arange(len(study.victims))),
            **(
                worth(study, *(arrived(states[chosen], fmt) for states in study.pivots[:2])) if some[-1] == last else {}
            ),
        }


def named(some: tuple[int, ...]) -> str:
    """A tap, or the first and the last of several neighbours."""
    return str(some[0]) if len(some) == 1 else f"{some[0]}-{some[-1]}"


def arrived(states: np.ndarray, fmt: str) -> np.ndarray:
    """Taps [taps, n, width] as they arrive."""
    return np.stack([taps.received(state, fmt) for state in states])


def beside(states: np.ndarray, scale: np.ndarray, fmt: str) -> np.ndarray:
    """Taps as they arrive, each over its spread, side by side [n, taps * width]."""
    return np.concatenate(list(arrived(states, fmt) / scale), 1)


def trained_on(study: Study, chosen: list[int], fmt: str) -> dict[str, list[float]]:
    """What side networks on some taps in a format are worth."""
    device, held_out, _ = study.pivots
    return worth(study, arrived(device[chosen], fmt), arrived(held_out[chosen], fmt))


def worth(study: Study, device: np.ndarray, held_out: np.ndarray) -> dict[str, list[float]]:
    """What side networks that are trained on such pivots and the labels know of those held out."""
    y, truth = study.parts.device.labels, study.parts.held_out.labels
    classes, steps = int(y.max()) + 1, study.sizes.steps
    networks = [training.trained(device, y, classes, steps, seed) for seed in range(study.sizes.seeds)]
    return quality([network(held_out).argmax(1) for network in networks], truth)


def quality(answers: list[np.ndarray], truth: np.ndarray) -> dict[str, list[float]]:
    """Accuracy, and its mean over classes, of several answers."""
    return {
        "accuracy": [float((answer == truth).mean()) for answer in answers],
        "balanced": [balanced(answer, truth) for answer in answers],
    }


def label_rows(study: Study) -> Iterator[dict[str, Any]]:
    """What is told of labels, by what is sent for them, and what the side network is then worth."""
    device, held_out, public = study.pivots
    y, truth = study.parts.device.labels, study.parts.held_out.labels
    classes = int(y.max()) + 1
    own = sendings.Device(y, arrived(device[1:], "int8:64"), arrived(held_out[1:], "int8:64"), classes)
    guessed = sendings.linear_head(public[-1], study.parts.public.labels)(own.states[-1]).argmax(1)
    yield {
        "sent": "no target at all",
        "clusters": labels.agreement(labels.by_clusters(own.states[-1], classes, SEED), y),
        "others": {"a classifier of public messages": balanced(guessed, y)},
    }
    for sending in sendings.sendings(own, np.random.default_rng(SEED)):
        yield told(own, sending, truth, study.sizes)


def told(own: sendings.Device, sending: sendings.Sending, truth: np.ndarray, sizes: Sizes) -> dict[str, Any]:
    """One variant: the attacks on it, and trainings with it."""
    groups = sending.groups or own.classes
    networks = [training.trained(own.states, sending.targets, groups, sizes.steps, seed) for seed in range(sizes.seeds)]
    answers = [sending.decide(network(own.held_out)) for network in networks]
    outputs = networks[0](own.states)
    return {
        "sent": sending.name,
        "read": labels.agreement(sending.read, own.labels),
        "clusters": labels.agreement(labels.by_clusters(one_hot(sending.targets), own.classes, SEED), own.labels),
        "network": labels.agreement(outputs.argmax(1), own.labels),
        "others": {name: labels.agreement(found(outputs), own.labels) for name, found in sending.others.items()},
        **quality(answers, truth),
    }


def balanced(answer: np.ndarray, truth: np.ndarray) -> float:
    """The mean over classes of the share that is found; one over the number of classes if all get one answer."""
    return float(np.mean([(answer[truth == label] == label).mean() for label in np.unique(truth)]))


def one_hot(targets: np.ndarray) -> np.ndarray:
    """Targets as vectors."""
    return np.eye(int(targets.max()) + 1)[targets] if targets.ndim == 1 else targets


def noise(study: Study) -> Iterator[dict[str, Any]]:
    """Gaussian noise on the pivots of some taps: what is left of the text, of known messages, and of accuracy."""
    device, held_out, public = study.pivots
    bags = pivot.WordBags.of(study.parts.public, study.victims, study.sizes.least)
    draw, victims = np.random.default_rng(SEED), len(study.victims)
    for first in dict.fromkeys((1, study.depth // 2 + 1)):
        some = slice(first, study.depth + 1)
        scale = spread(public[some])
        exact = np.concatenate([np.concatenate(list(pile[some] / scale), 1) for pile in (device, public)])
        for level in NOISE:
            noisy = [noised(pile[some], level * scale, draw) for pile in (device, held_out, public)]
            seen, known = (np.concatenate(list(noisy[pile] / scale), 1) for pile in (0, 2))
            scores, threshold = pivot.ridge_scores(known, bags.public, seen[:victims])
            yield {
                "taps": f"{first}-{study.depth}",
                "noise": level,
                "epsilon": privacy_of(public[some], level),
                **pivot.word_figures(scores, bags.sent, threshold),
                "known_message": pivot.matched(seen[:victims], exact, np.arange(victims)),
                **worth(study, noisy[0], noisy[1]),
            }


def spread(states: np.ndarray) -> np.ndarray:
    """How far an activation lies from the mean over messages, root mean square, [taps, 1, 1]."""
    return (states - states.mean(1, keepdims=True)).std((1, 2), keepdims=True)


def noised(states: np.ndarray, sigma: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Pivots with Gaussian noise, stored in int8."""
    return arrived(states + sigma.astype(np.float32) * draw.standard_normal(states.shape, np.float32), "int8:64")


def privacy_of(states: np.ndarray, level: float) -> float:
    """Epsilon for one message at delta 1e-5, were its pivots cut off at the largest distance from the mean seen here.

    Any two messages are then at most twice that apart; the Gaussian mechanism gives rho = distance² / (2 sigma²) of
    zero-concentrated privacy, and epsilon = rho + 2 sqrt(rho ln(1/delta)) (Bun and Steinke 2016).
    """
    scaled = (states - states.mean(1, keepdims=True)) / spread(states)
    distance = 2 * float(np.sqrt((scaled**2).sum((0, 2)).max()))
    rho = (distance / level) ** 2 / 2
    return rho + 2 * float(np.sqrt(rho * np.log(1 / DELTA)))


STUDIES = {"tokens": tokens, "words": words, "labels": label_rows, "noise": noise}


def show(row: dict[str, Any]) -> None:
    """A line."""
    print("  ".join(f"{name} {shown(value)}" for name, value in row.items() if value not in (None, {})), flush=True)


def shown(value: Any) -> str:
    """A number, a mean of several, or several by name."""
    match value:
        case float():
            return f"{value:.3f}" if value < 100 else f"{value:.0f}"
        case list():
            return f"{np.mean(value):.3f}"
        case dict():
            return ", ".join(f"{name} {shown(part)}" for name, part in value.items())
    return str(value)


def opened(args: argparse.Namespace) -> tuple[Study, str]:
    """The backbone, the messages, and the data's fingerprint."""
    sizes = SMOKE if args.smoke else Sizes()
    backbone, tokenizer = taps.tiny(SEED) if args.smoke else taps.pretrained()
    with tempfile.TemporaryDirectory() as folder:
        messages = taps.Messages.read(smoke_file(Path(folder)) if args.smoke else args.data, tokenizer, sizes.seq)
    parts = taps.Parts.of(messages, sizes.device, sizes.held_out, sizes.public, SEED)
    return Study(backbone, parts, sizes), messages.fingerprint


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", default=",".join(STUDIES), help="parts of the study")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a tiny random model and made-up lines")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if not args.smoke and not args.data:
        parser.error("give --data FILE of label<TAB>text lines")
    if unknown := sorted(set(chosen) - set(STUDIES)):
        parser.error(f"no part {unknown[0]!r}: choose of {', '.join(STUDIES)}")
    study, fingerprint = opened(args)
    record = Record(args.json, "side_privacy", data=fingerprint, seed=SEED, sizes=asdict(study.sizes))
    found: dict[str, list[dict[str, Any]]] = {}
    for part in chosen:
        print(part)
        found[part] = []
        for row in STUDIES[part](study):
            show(row)
            found[part].append(row)
            record.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(ended("side_privacy", main))

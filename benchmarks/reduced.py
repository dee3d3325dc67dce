"""Zoo models at full width and reduced depth, batch and sequence: steps that a small machine can run and plan quickly.

    python benchmarks/reduced.py [MODEL …] [-o DIR] [--smoke]

A model is written ``NAME[/LAYERS][@BATCH[xSEQ]]``: ``gpt2/2@1x64`` is GPT-2 with its first two blocks, one sample of 64
tokens; ``swin-tiny/1@2`` keeps one block of every stage. ``NAME`` alone is the graph that ships (or a graph file, or a
zoo model at its usual sizes). As a script, prints what each comes to, and with ``-o`` writes graph files, for machines
that have no torch. Importing this imports no torch; making a graph
that does not ship does.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layoutopt.errors import GraphError, LayoutOptError
from layoutopt.graph import TrainingGraph
from layoutopt.graphfile import save
from layoutopt.models import find_graph, shipped_names

__all__ = ["DEFAULT", "Spec", "parse", "reduced_graph"]

DEFAULT = (
    *("vit-digits", "minilm/2", "vit-tiny/2@2", "distilbert/2@2x64", "bert-base/2@2x64", "gpt2/2@1x64"),
    *(
        "opt-350m/2@1x64",
        "swin-tiny/1@2",
        "clip/2@2x77",
        "bert-large/2@1x64",
        "vit-large/2@1",
        "whisper-large-v3/1@1x16",
    ),
    *("llama-3.2-1b/1@1x32", "qwen2.5-1.5b/1@1x32", "opt-1.3b/1@1x32", "unet-odd"),
)
"""The zoo at sizes that a small machine runs."""

_BLOCKS = frozenset(("layer", "layers", "h", "blocks"))
"""What transformers call the list of a model's blocks."""


@dataclass(frozen=True)
class Spec:
    """What of a model is captured; 0 leaves it as the zoo has it."""

    name: str
    layers: int = 0
    batch: int = 0
    seq: int = 0


def parse(text: str) -> Spec:
    """``NAME[/LAYERS][@BATCH[xSEQ]]``.

    Raises:
        GraphError: it is not of this form, or a number is 0.
    """
    found = re.fullmatch(r"([^@/]+)(?:/(\d+))?(?:@(\d+)(?:x(\d+))?)?", text)
    sizes = [int(n) for n in found.groups()[1:] if n] if found else [0]
    if found is None or not all(sizes):
        raise GraphError(f"{text!r} is no model: expected NAME[/LAYERS][@BATCH[xSEQ]], such as gpt2/2@1x64")
    name, layers, batch, seq = found.groups()
    return Spec(name, int(layers or 0), int(batch or 0), int(seq or 0))


def reduced_graph(text: str) -> TrainingGraph:
    """The training step (AdamW, all parameters) of a model written as above.

    Raises:
        GraphError: there is no such model, or it has no blocks to leave out.
    """
    if Path(text).is_file() or text in shipped_names():
        return find_graph(text)
    from layoutopt import zoo
    from layoutopt.capture import capture
    from layoutopt.optimizers import optimizer_from
    from layoutopt.passes import run_passes

    spec = parse(text)
    with zoo.without_weights():
        module, batch, loss = zoo.build(spec.name, batch=spec.batch or None, seq=spec.seq or None)
    if spec.layers and not _shortened(module, spec.layers):
        raise GraphError(f"{spec.name} has no more than {spec.layers} equal blocks in a row: leave /{spec.layers} out")
    captured = capture(module, batch, loss=loss, optimizer=optimizer_from("adamw"), name=text)
    return run_passes(captured)[0]


def _shortened(module: Any, layers: int) -> int:
    """Leave out what comes after the first blocks of each list of equal ones; how many lists that shortened."""
    from torch import nn

    short = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            alike = isinstance(child, nn.ModuleList) and len({str(m) for m in child}) == 1
            if alike and name in _BLOCKS and len(child) > layers:
                setattr(parent, name, child[:layers])
                short += 1
    return short


def main() -> int:
    """Print the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(DEFAULT))
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="write a graph file of each")
    parser.add_argument("--smoke", action="store_true", help="one model")
    args = parser.parse_args()
    print(f"{'model':28}{'ops':>6}{'M parameters':>14}{'MiB of tensors':>16}")
    for name in ["bert-tiny/1@2x5"] if args.smoke else args.models:
        try:
            graph = reduced_graph(name)
            if args.output:
                save(graph, args.output / f"{re.sub('[/@]', '-', name)}.graph")
        except LayoutOptError as error:
            print(f"reduced: {error}", file=sys.stderr)
            return 2
        parameters = sum(t.size_elems for t in graph.by_role("parameter"))
        size = sum(t.size_elems * t.item_bytes for t in graph.tensors.values())
        print(f"{name:28}{len(graph.ops):>6}{parameters / 1e6:>14.1f}{size / 2**20:>16.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How well each way of fine-tuning learns: MiniLM on labelled text, whole, by LoRA, by its head alone, by side-tuning.

    python benchmarks/side_accuracy.py DATA [--seeds 0,1,2] [--ways full,lora,head,side] [--taps float32,int8:64,…]
                                       [--modes labels,private,…] [--epochs N] [--side-epochs N] [--json OUT]
                                       [--search] [--smoke]

Every way starts from the same pretrained weights and sees the same samples in the same order: a seed gives the split,
the order, and what is fresh. Texts are cut or filled to SEQ tokens; dropout is off; AdamW, at a constant rate (whole,
LoRA, head) or as the task says (side). Accuracy is that of the last epoch, on the fifth of the data that is held out;
what each epoch reached is in the record.

*Whole and LoRA* train in PyTorch (on CUDA where there is one), which computes the very graph that ``layoutopt train``
runs in OpenCL and is the faster on a busy CPU (``benchmarks/minilm.py`` sets their losses side by side). They take
``--epochs``; *the head* and *side-tuning* take ``--side-epochs``, to convergence: the backbone runs once for all.

*Side-tuning* trains with the server's own trainer on taps after every block, of the first token (which the head reads),
quantised as the device does. Mode *labels* sends the class. Mode *private* sends the difference between the class and
what a head says that stays on the device, fitted to the first ``HEAD_SAMPLES`` samples as ``layoutopt side device``
does; what that head reaches alone is in the record.

``--search`` tries rates and ranks of side-tuning on a split that no seed above has.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.minilm import infer, smoke_file, torch_model
from benchmarks.recording import Record, Rows
from layoutopt import textclass, textdata
from layoutopt.errors import LayoutOptError
from layoutopt.quantize import Format, dequantise, quantise
from layoutopt.train import IGNORE, Dataset

SEQ, BATCH = 64, 16
HELD_OUT = 0.2
WAYS = ("full", "lora", "head", "side")
TAPS = ("float32", "int8:64", "int4:64", "fp4:64")
MODES = ("labels", "private")
RATES = {"full": 5e-5, "lora": 1e-3, "head": 5e-3, "side": 1e-3}
RANK = 16
HEAD_SAMPLES = 512
SEARCH_SEED = 1000
SEARCHED = tuple((lr, rank) for lr in (3e-4, 1e-3, 3e-3) for rank in (16, 64))


class Work:
    """The data and the pretrained model, and what of them no seed changes.

    Args:
        file: of label<TAB>text lines.
    """

    def __init__(self, file: Path) -> None:
        self.source = textclass.pretrained("minilm")
        text = textdata.read_labelled_text(file)
        encoded = textdata.encode(text.texts, self.source.directory / "tokenizer.json", SEQ)
        labels = textdata.label_ids(text.labels, text.classes, str(file))
        self.data = Dataset({**encoded, "labels": labels})
        self.classes = len(text.classes)
        self.fingerprint = text.fingerprint

    def split(self, seed: int) -> tuple[Dataset, Dataset]:
        """Training and held-out samples; "sample" is a sample's number in the data."""
        return Dataset({**self.data.inputs, "sample": np.arange(len(self.data))}).split(HELD_OUT, seed)

    def model(self, seed: int) -> Any:
        """The pretrained model with a fresh classifier, in torch."""
        import torch
        from safetensors.torch import load_file

        torch.manual_seed(seed)
        model = torch_model(self.source.directory, self.classes)
        loaded = load_file(self.source.directory / "model.safetensors")
        missing, _ = model.load_state_dict({f"bert.{name}": value for name, value in loaded.items()}, strict=False)
        lacking = [name for name in missing if not name.startswith("classifier.") and "position_ids" not in name]
        if lacking:
            raise LayoutOptError(f"the pretrained weights lack {', '.join(lacking)}")
        return model

    @cached_property
    def features(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every sample its first token after every block, float32 [n, blocks, width], and what the pooler makes of
        the last, float32 [n, width].
        """
        import torch

        bert = self.model(0).bert.eval()
        lengths = self.data.inputs["attention_mask"].sum(1)
        width, blocks = bert.config.hidden_size, bert.config.num_hidden_layers
        taps = np.empty((len(self.data), blocks, width), np.float32)
        pooled = np.empty((len(self.data), width), np.float32)
        order = np.argsort(lengths, kind="stable")
        with torch.no_grad():
            for rows in np.array_split(order, -(-len(order) // 64)):
                # Padding beyond the longest text of a batch is hidden from all tokens: it need not be there.
                inputs = {
                    k: torch.from_numpy(v[rows, : lengths[rows].max()]).long()
                    for k, v in self.data.inputs.items()
                    if k != "labels"
                }
                found = bert(**inputs, output_hidden_states=True)
                taps[rows] = torch.stack([h[:, 0] for h in found.hidden_states[1:]], 1).numpy()
                pooled[rows] = found.pooler_output.numpy()
        return taps, pooled


def epoch_batches(data: Dataset, seed: int, epoch: int) -> Iterator[dict[str, np.ndarray]]:
    """An epoch's batches, in the order that ``layoutopt train`` has for the seed."""
    order = np.random.default_rng((seed, epoch)).permutation(len(data))
    for batch, _ in data.batches(BATCH, order):
        yield batch


def accuracy(logits: np.ndarray, data: Dataset) -> float:
    """The share of samples whose largest logit is their class's."""
    return float((logits.argmax(1) == data.inputs["labels"]).mean())


# ---- everything on the device ---------------------------------------------------------------------------------------


def trained_whole(work: Work, way: str, seed: int, epochs: int) -> dict[str, Any]:
    """Fine-tune whole or by LoRA."""
    import torch

    from layoutopt.modes import set_mode

    training, held_out = work.split(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = work.model(seed)
    set_mode(model, way, head=("classifier",), adapted=("query", "value"), fresh_head=True)
    model.to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATES[way], weight_decay=0.01)
    unnumbered = Dataset({k: v for k, v in held_out.inputs.items() if k != "sample"})
    reached = []
    for epoch in range(epochs):
        model.train()
        for batch in epoch_batches(training, seed, epoch):
            inputs = {k: torch.from_numpy(np.asarray(v)).long().to(device) for k, v in batch.items() if k != "sample"}
            optimizer.zero_grad(set_to_none=True)
            model(**inputs).loss.backward()
            optimizer.step()
        reached.append(accuracy(infer(model, unnumbered), held_out))
    return {
        "lr": RATES[way],
        "on": device.type,
        "trained": sum(p.numel() for p in parameters),
        "accuracy_by_epoch": reached,
    }


def trained_head(work: Work, seed: int, epochs: int) -> tuple[Any, dict[str, Any]]:
    """The classifier, trained on the pooler's features; and its row."""
    import torch

    training, held_out = work.split(seed)
    head = work.model(seed).classifier
    pooled = torch.from_numpy(work.features[1])
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATES["head"], weight_decay=0.01)
    reached = []
    for epoch in range(epochs):
        for batch in epoch_batches(training, seed, epoch):
            loss = torch.nn.functional.cross_entropy(
                head(pooled[batch["sample"]]), torch.from_numpy(np.asarray(batch["labels"])).long(), ignore_index=IGNORE
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            reached.append(accuracy(head(pooled[held_out.inputs["sample"]]).numpy(), held_out))
    trained = sum(p.numel() for p in head.parameters())
    return head, {"lr": RATES["head"], "trained": trained, "accuracy_by_epoch": reached}


# ---- with a server --------------------------------------------------------------------------------------------------


def trained_beside(work: Work, taps: str, mode: str, seed: int, epochs: int, lr: float, rank: int) -> dict[str, Any]:
    """Side-tuning on taps as the server receives them."""
    from layoutopt.side.task import Batch, Task
    from layoutopt.side.trainer import Trainer

    training, held_out = work.split(seed)
    stored, _ = work.features
    fmt = Format.parse(taps)
    quantised = [quantise(np.ascontiguousarray(stored[:, i]), fmt) for i in range(stored.shape[1])]
    before = (
        None if mode == "labels" else _said_before(work, dequantise(*quantised[-1], stored.shape[2], fmt), training)
    )
    per_epoch = -(-len(training) // BATCH)
    task = Task(
        model="minilm",
        graph=work.fingerprint,
        width=stored.shape[2],
        taps=tuple(f"block {i}" for i in range(stored.shape[1])),
        format=taps,
        tokens="pivot",
        seq=SEQ,
        batch=BATCH,
        classes=work.classes,
        mode="labels" if mode == "labels" else "private",
        pooler=True,
        rank=rank,
        lr=lr,
        warmup=per_epoch // 2,
        steps=epochs * per_epoch,
        seed=seed,
    )
    pooler = work.model(seed).bert.pooler.dense
    head = {f"pooler.{name}": p.detach().numpy() for name, p in pooler.named_parameters()}
    last = held_out.inputs["sample"]
    reached, step = [], 0
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer.open(Path(folder), task, head=head)
        for epoch in range(epochs):
            for batch in epoch_batches(training, seed, epoch):
                real = np.asarray(batch["labels"]) != IGNORE
                rows = batch["sample"][real]
                labels = work.data.inputs["labels"][rows]
                targets = labels if before is None else np.eye(work.classes, dtype=np.float32)[labels] - before[rows]
                taken = tuple((words[rows], scales[rows]) for words, scales in quantised)
                sent = Batch(step, tuple(map(int, rows)), taken, None, targets)
                trainer.accept(sent)
                trainer.apply()
                step += 1
            found = side_results(trainer.weights(), task, [(words[last], scales[last]) for words, scales in quantised])
            reached.append(accuracy(found if before is None else found + before[last], held_out))
        trainer.close()
    head_alone = None if before is None else accuracy(before[last], held_out)
    return {
        "lr": lr,
        "rank": rank,
        "device_head_accuracy": head_alone,
        "trained": task.parameters,
        "sent_bytes_per_sample": task.sample_bytes,
        "accuracy_by_epoch": reached,
    }


def _said_before(work: Work, features: np.ndarray, training: Dataset) -> np.ndarray:
    """What the head that stays on the device says of every sample, float32 [n, classes].

    Args:
        work: the samples.
        features: the last tap as the device sends it, float32 [n, width].
        training: whose first samples the head is fitted to.
    """
    from layoutopt.side.device_head import fit_head

    first = training.inputs["sample"][:HEAD_SAMPLES]
    return fit_head(features[first], work.data.inputs["labels"][first], work.classes).probabilities(features)


def side_results(weights: dict[str, np.ndarray], task: Any, taps: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """What a side network says of samples.

    Args:
        weights: of the network.
        task: that it was trained for.
        taps: words and scales of the samples' rows, by tap.
    """
    import torch

    from layoutopt.side.network import SideNetwork

    numbers = [torch.from_numpy(dequantise(words, scales, task.width, task.fmt)) for words, scales in taps]
    with torch.no_grad():
        found: np.ndarray = SideNetwork(task, weights)(numbers).numpy()
    return found


# ---- rows -----------------------------------------------------------------------------------------------------------


def row(work: Work, way: str, taps: str, mode: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One training."""
    began, cpu = time.monotonic(), time.process_time()
    if way == "side":
        found = trained_beside(work, taps, mode, seed, args.side_epochs, args.lr, args.rank)
    elif way == "head":
        found = trained_head(work, seed, args.side_epochs)[1]
    else:
        found = trained_whole(work, way, seed, args.epochs)
    key = {"way": way, "taps": taps, "mode": mode, "seed": seed, "accuracy": found["accuracy_by_epoch"][-1]}
    return {**key, **found, "seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu}


def wanted(args: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    """Way, taps, mode and seed of every row, seed by seed."""
    for seed in args.seeds:
        for way in args.ways:
            if way != "side":
                yield way, "", "", seed
                continue
            yield from ((way, taps, mode, seed) for mode in args.modes for taps in args.taps)


def show(rows: list[dict[str, Any]]) -> None:
    """Mean and extremes over seeds, and the distance to full fine-tuning in points."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for one in rows:
        groups.setdefault((one["way"], one["taps"], one["mode"]), []).append(100 * one["accuracy"])
    whole = groups.get(("full", "", ""))
    print(f"{'way':6}{'taps':10}{'mode':14}{'seeds':>6}{'accuracy %':>12}{'from':>8}{'to':>8}{'points to full':>16}")
    for (way, taps, mode), reached in groups.items():
        mean = sum(reached) / len(reached)
        far = f"{mean - sum(whole) / len(whole):+.2f}" if whole else "-"
        print(f"{way:6}{taps:10}{mode:14}{len(reached):6}{mean:12.2f}{min(reached):8.2f}{max(reached):8.2f}{far:>16}")


def search(work: Work, args: argparse.Namespace) -> None:
    """Rates and ranks of side-tuning on a split of its own."""
    for lr, rank in SEARCHED:
        found = trained_beside(work, "float32", "labels", SEARCH_SEED, args.side_epochs, lr, rank)
        reached = " ".join(f"{100 * a:.2f}" for a in found["accuracy_by_epoch"])
        print(f"lr {lr:g}, rank {rank}: {reached}", flush=True)


def main() -> int:
    """Train every way with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, help="label<TAB>text lines")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--taps", default=",".join(TAPS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--side-epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=RATES["side"], help="of side-tuning")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--json", type=Path, help="rows that are in it already are not made again")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a few made-up lines, one epoch")
    args = parser.parse_args()
    if args.smoke:
        args.seeds, args.taps = "0", "float32,int4:64"
        args.epochs = args.side_epochs = 1
    elif args.data is None:
        parser.error("give a file of label<TAB>text lines")
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    args.ways, args.taps, args.modes = args.ways.split(","), args.taps.split(","), args.modes.split(",")
    try:
        with tempfile.TemporaryDirectory() as folder:
            work = Work(smoke_file(Path(folder)) if args.smoke else args.data)
        if args.search:
            search(work, args)
            return 0
        return run(work, args)
    except LayoutOptError as error:
        print(f"side_accuracy: {error}", file=sys.stderr)
        return 2


def run(work: Work, args: argparse.Namespace) -> int:
    """Make the rows that are not there yet, and show all."""
    settings = {
        "data": work.fingerprint,
        "samples": len(work.data),
        "classes": work.classes,
        "seq": SEQ,
        "batch": BATCH,
        "epochs": args.epochs,
        "side_epochs": args.side_epochs,
        "side_lr": args.lr,
        "side_rank": args.rank,
    }
    rows = Rows(args.json, Record(args.json, "side_accuracy"), settings)
    for way, taps, mode, seed in wanted(args):
        if rows.find(way=way, taps=taps, mode=mode, seed=seed) is None:
            made = rows.add(row(work, way, taps, mode, seed, args))
            print(
                f"{way} {taps} {mode} seed {seed}: {100 * made['accuracy']:.2f}% in {made['seconds']:.0f} s", flush=True
            )
    show(rows.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Fine-tune MiniLM on labelled text, here and in PyTorch: the same weights, the same batches, the same order.

    python benchmarks/minilm.py --data FILE [--device SEL] [--device-model D] [--steps N] [--json OUT] [--smoke]

Prints both loss curves' distance, both held-out accuracies, the largest difference of the logits after our checkpoint
is loaded by transformers, and step times (one framework after the other, medians). ``--smoke`` makes two steps on a few
made-up lines and times nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

BATCH, SEQ, LR, SEED = 16, 64, 5e-5, 0


def smoke_file(folder: Path) -> Path:
    """Forty made-up lines of two classes."""
    lines = [f"{'odd' if i % 2 else 'even'}\tthe number {i} is {'odd' if i % 2 else 'even'}" for i in range(40)]
    path = folder / "smoke.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


def ours(args: argparse.Namespace, data_file: Path, run_dir: Path) -> dict[str, Any]:
    """Train with layoutopt; returns losses, accuracy, seconds per step and what the torch side needs."""
    from kernels.execute import Executor
    from kernels.runtime import Runtime, pick
    from layoutopt import textclass, textdata
    from layoutopt.facade import capture_model, solve_plan
    from layoutopt.models import device_model, uncalibrated
    from layoutopt.train import Dataset, Schedule, evaluate, fit

    source = textclass.pretrained("minilm")
    text = textdata.read_labelled_text(data_file)
    labels = textdata.label_ids(text.labels, text.classes, str(data_file))
    encoded = textdata.encode(text.texts, source.directory / "tokenizer.json", SEQ)
    graph, _ = capture_model("minilm", batch=BATCH, seq=SEQ, optimizer="adamw", labels=len(text.classes))
    data = Dataset({k: v for k, v in {**encoded, "labels": labels}.items() if k in graph.tensors})
    training, held_out = data.split(0.2, SEED)
    start = textclass.initial(graph, source, SEED)
    runtime = Runtime(pick(args.device))
    if args.smoke:
        model = uncalibrated(runtime)
    else:
        model = device_model(args.device_model, runtime, [graph], budget_s=110, announce=print)
    executor = Executor(runtime, graph, solve_plan(graph, model, strategy="rowmajor" if args.smoke else "ilp"), start)
    stamps = [time.perf_counter()]
    steps = args.steps or -(-len(training) // BATCH)
    history = fit(
        executor,
        training,
        epochs=1,
        schedule=Schedule(LR, steps),
        seed=SEED,
        last_step=steps,
        on_step=lambda *_: stamps.append(time.perf_counter()),
    )
    accuracy, logits = evaluate(executor, held_out)
    state = textclass.RunState(len(history.losses), 1, SEED, text.classes, BATCH, SEQ, LR, 0.2, text.fingerprint)
    textclass.save_run(run_dir, graph, executor.values(), source, state)
    return {
        "losses": history.losses,
        "accuracy": accuracy,
        "logits": logits,
        "step_s": statistics.median(np.diff(stamps)),
        "training": training,
        "held_out": held_out,
        "start": {t.name: start[t.name] for t in graph.by_role("parameter")},
        "source": source,
        "classes": len(text.classes),
        "device": runtime.info.label,
        "optimizer": graph.meta["optimizer"],
    }


def torch_model(directory: Path, classes: int) -> Any:
    """BERT with dropout off."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig.from_pretrained(directory)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.num_labels = classes
    return BertForSequenceClassification(config)


def theirs(mine: dict[str, Any], steps: int) -> dict[str, Any]:
    """The same in PyTorch."""
    import torch

    model = torch_model(mine["source"].directory, mine["classes"])
    missing, unexpected = model.load_state_dict(
        {name: torch.from_numpy(np.array(value)) for name, value in mine["start"].items()}, strict=False
    )
    if unexpected or any("position_ids" not in name for name in missing):
        raise SystemExit(f"the models differ: missing {missing}, unexpected {unexpected}")
    model.train()
    decay = mine["optimizer"].get("weight_decay", 0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=decay)
    training, losses, stamps = mine["training"], [], [time.perf_counter()]
    order = np.random.default_rng((SEED, 0)).permutation(len(training))
    for batch, _ in training.batches(BATCH, order):
        if len(losses) == steps:
            break
        optimizer.zero_grad(set_to_none=True)
        loss = model(**{k: torch.from_numpy(v).long() for k, v in batch.items()}).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        stamps.append(time.perf_counter())
    return {"losses": losses, "logits": infer(model, mine["held_out"]), "step_s": statistics.median(np.diff(stamps))}


def infer(model: Any, data: Any) -> np.ndarray:
    """Logits of a torch model over a dataset."""
    import torch

    model.eval()
    device = next(model.parameters()).device
    rows = []
    with torch.no_grad():
        for batch, real in data.batches(BATCH):
            inputs = {k: torch.from_numpy(v).long().to(device) for k, v in batch.items() if k != "labels"}
            rows.append(model(**inputs).logits.cpu().numpy()[:real])
    return np.concatenate(rows)


def main() -> None:
    """Run both and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--device")
    parser.add_argument("--device-model")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--json")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if not args.smoke and not args.data:
        parser.error("give --data FILE of label<TAB>text lines")
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        if args.smoke:
            args.steps = 2
        mine = ours(args, smoke_file(where) if args.smoke else Path(args.data), where / "run")
        peer = theirs(mine, len(mine["losses"]))
        from transformers import AutoModelForSequenceClassification

        loaded = infer(AutoModelForSequenceClassification.from_pretrained(where / "run"), mine["held_out"])
    a, b = np.array(mine["losses"]), np.array(peer["losses"])
    truth = mine["held_out"].inputs["labels"]
    record = {
        "device": mine["device"],
        "steps": len(a),
        "loss_first": [float(a[0]), float(b[0])],
        "loss_last_tenth": [float(x[-max(len(x) // 10, 1) :].mean()) for x in (a, b)],
        "loss_difference_first_10": float(np.abs(a - b)[:10].max()),
        "loss_difference_max": float(np.abs(a - b).max()),
        "accuracy": [mine["accuracy"], float((peer["logits"].argmax(1) == truth).mean())],
        "logits_difference_checkpoint_in_transformers": float(np.abs(loaded - mine["logits"]).max()),
        "step_s": None if args.smoke else [float(mine["step_s"]), float(peer["step_s"])],
        "ratio": None if args.smoke else float(mine["step_s"] / peer["step_s"]),
        "losses": [a.tolist(), b.tolist()],
    }
    for key, value in record.items():
        if key != "losses":
            print(f"{key}: {value}")
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

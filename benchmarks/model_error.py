"""How far the cost model's predictions are off, on kernels that they were not learnt from.

    python benchmarks/model_error.py DEVICE_MODEL... [--folds N] [--no-ablation] [--json FILE] [--smoke]

A calibrated device model holds what it measured. This deals those measurements into parts, predicts each part from a
fit on the others and compares: absolute percentage error (median, 90th percentile, share within 10% and 20%), Kendall's
tau over all kernels and among those of one operation, and the share of kernels within their 90% intervals. What is kept
together in a part makes the test easier or harder:

- *kernels*: each by itself, as a calibration's own held-out fifth. Others of its operation are in the sample.
- *operations*: all kernels of one operation.
- *layouts*: all whose operands lie in the same layouts.
- *shapes*: all of one tuple of shapes, whatever is computed. As layouts have extents, neither kernel, shapes nor
  layouts were in the sample then.

Then what each part of the model is worth, over *kernels* and *operations*: the corrections left out, each group of
features dropped, half and a quarter of the sample. And the errors family by family. A file that is older than the
record of layouts is not split by them. ``--smoke`` judges a made-up device once.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from rich.console import Console
from rich.table import Table

from costmodel import device as devices
from costmodel.constants import family_of, fit_constants, kind_of, levels, samples_of
from costmodel.deviation import Predictor
from costmodel.device import DeviceModel, HeldOut, Measurement
from costmodel.fit import predictions, report
from layoutopt.errors import DeviceError, LayoutOptError
from layoutopt.files import write_atomic

GROUPS = {
    "launches, groups, items": ("launches", "groups", "items"),
    "arithmetic": ("trips", "flops", "flop_slots", "transcendentals", "transcendental_slots"),
    "index arithmetic": ("index_shifts", "index_divisions"),
    "loads and stores": ("vector_loads", "scalar_loads", "vector_stores", "scalar_stores"),
    "requests and strides": ("request_lines", "strided", "conflicts"),
    "cache traffic": ("near_bytes", "middle_bytes", "memory_bytes", "strided_middle_bytes", "unique_bytes"),
}
"""Features that say one sort of thing; ``launches`` itself stays, something has to be left."""

Predict = Callable[[Sequence[Measurement], Sequence[Measurement], Sequence[str]], tuple[np.ndarray, np.ndarray]]


def shapes_of(spec: str) -> str:
    """The shapes in a spec text."""
    return " ".join(word for word in spec.split() if word.startswith("["))


SPLITS: dict[str, Callable[[Measurement], str]] = {
    "kernels": lambda m: repr((m.variant, m.spec, m.features, m.layouts)),
    "operations": lambda m: m.spec,
    "shapes": lambda m: shapes_of(m.spec),
    "layouts": lambda m: m.layouts,
}


def part_of(key: str, folds: int) -> int:
    """Which part a group of kernels goes to: by its name alone."""
    return crc32(key.encode()) % folds


def without_corrections(
    train: Sequence[Measurement], test: Sequence[Measurement], names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Predictions of the constants alone."""
    predictor = Predictor(fit_constants(samples_of(train), names), (), names)
    guess = [sum(predictor.items(levels(m.variant, kind_of(m.spec)), m.features).values()) for m in test]
    return np.array(guess), np.zeros(len(test))


def cross_judged(
    measurements: Sequence[Measurement],
    names: Sequence[str],
    split: str,
    folds: int,
    share: float = 1.0,
    predict: Predict = predictions,
) -> tuple[HeldOut, dict[str, HeldOut]]:
    """The errors over all parts of a split: together, and by family.

    Args:
        measurements: of kernels.
        names: of features.
        split: one of ``SPLITS``.
        folds: parts.
        share: of each sample that is learnt from.
        predict: from a sample and a part.

    Raises:
        DeviceError: there is no sample for some part.
    """
    key = SPLITS[split]
    rows: list[tuple[Measurement, float, float]] = []
    sizes = []
    for part in range(folds):
        test = [m for m in measurements if part_of(key(m), folds) == part]
        train = [m for m in measurements if part_of(key(m), folds) != part]
        train = [m for m in train if crc32(b"share" + SPLITS["kernels"](m).encode()) % 1000 < 1000 * share]
        if not test:
            continue
        if not train:
            raise DeviceError(f"leaving {split} out leaves nothing to learn from: measure more kinds of kernels")
        sizes.append(len(train))
        guess, width = predict(train, test, names)
        rows += zip(test, guess.tolist(), width.tolist(), strict=True)

    def judged(some: Sequence[tuple[Measurement, float, float]]) -> HeldOut:
        guess, width = (np.array([row[k] for row in some]) for k in (1, 2))
        truth = np.array([max(m.time_ns, 1.0) for m, _, _ in some])
        return report(guess, width, truth, [m.spec for m, _, _ in some], round(float(np.mean(sizes))))

    families = sorted({family_of(m.variant) for m, _, _ in rows})
    return judged(rows), {f: judged([row for row in rows if family_of(row[0].variant) == f]) for f in families}


def dropped(
    measurements: Sequence[Measurement], names: Sequence[str], group: Sequence[str]
) -> tuple[list[Measurement], tuple[str, ...]]:
    """The measurements without some features."""
    kept = [i for i, name in enumerate(names) if name == "launches" or name not in group]
    fewer = [replace(m, features=tuple(m.features[i] for i in kept)) for m in measurements]
    return fewer, tuple(names[i] for i in kept)


def study(model: DeviceModel, folds: int, ablation: bool) -> dict[str, Any]:
    """Everything about one device model, as a record."""
    measurements, names = list(model.measurements.values()), model.features
    splits = [s for s in SPLITS if s != "layouts" or all(m.layouts for m in measurements)]
    whole = {split: cross_judged(measurements, names, split, folds) for split in splits}
    out: dict[str, Any] = {
        "device": model.name,
        "driver": model.driver,
        "platform": model.platform,
        "date": model.date,
        "kernels": len(measurements),
        "operations": len({m.spec for m in measurements}),
        "shapes": len({shapes_of(m.spec) for m in measurements}),
        "layouts": len({m.layouts for m in measurements if m.layouts}),
        "held_out": plain(model.held_out) if model.held_out else None,
        "splits": {split: plain(judged) for split, (judged, _) in whole.items()},
        "families": {family: plain(judged) for family, judged in whole["kernels"][1].items()},
        "ablation": {},
    }
    if ablation:
        for split in ("kernels", "operations"):
            out["ablation"][split] = ablated(measurements, names, split, folds)
    return out


def ablated(measurements: Sequence[Measurement], names: Sequence[str], split: str, folds: int) -> dict[str, Any]:
    """The errors without this and that."""
    out = {"all of it": cross_judged(measurements, names, split, folds)[0]}
    out["no corrections"] = cross_judged(measurements, names, split, folds, predict=without_corrections)[0]
    for label, group in GROUPS.items():
        out[f"no {label}"] = cross_judged(*dropped(measurements, names, group), split, folds)[0]
    for label, share in (("half the sample", 0.5), ("a quarter of the sample", 0.25)):
        out[label] = cross_judged(measurements, names, split, folds, share)[0]
    return {label: plain(judged) for label, judged in out.items()}


def plain(judged: HeldOut) -> dict[str, Any]:
    """For the record; when it was judged does not matter."""
    return {key: value for key, value in asdict(judged).items() if key != "date"}


def tables(record: dict[str, Any]) -> list[Table]:
    """For people."""
    sizes = f"{record['kernels']} kernels of {record['operations']} operations"
    title = f"{record['device']}, driver {record['driver']}: {sizes}"
    own = {"its own held-out fifth": record["held_out"]} if record["held_out"] else {}
    out = [table(title, "left out", own | record["splits"]), table("by family", "family", record["families"])]
    out += [table(f"{split} left out", "model", rows) for split, rows in record["ablation"].items()]
    return out


def table(title: str, what: str, rows: dict[str, dict[str, Any]]) -> Table:
    """One row each."""
    made = Table(title=title, title_justify="left")
    made.add_column(what)
    for column in (
        "kernels",
        "median",
        "90th %",
        "within 10%",
        "within 20%",
        "tau",
        "tau of one op",
        "in 90%",
        "+width",
    ):
        made.add_column(column, justify="right")
    for label, r in rows.items():
        known = r["covered_90"] > 0
        shares = [f"{r[key]:.1%}" for key in ("median_error", "p90_error", "within_10", "within_20")]
        taus = [f"{r[key]:.3f}" for key in ("tau", "tau_within_spec")]
        intervals = [f"{r['covered_90']:.1%}", f"{r['half_width_90']:.0%}"] if known else ["", ""]
        made.add_row(label, str(r["kernels"]), *shares, *taus, *intervals)
    return made


def made_up(kernels: int = 90) -> DeviceModel:
    """A device whose times have a known law, and noise."""
    rng = np.random.default_rng(0)
    names = ("launches", "groups", "flops", "near_bytes")
    rows = {}
    for i in range(kernels):
        values = (1.0, *(10 ** rng.uniform(3, 6, 3)))
        ns = int(np.dot(values, (3000.0, 0.1, 0.02, 0.3)) * np.exp(0.05 * rng.standard_normal()))
        label, size = f"pointwise.n(v={i % 2 + 1})", i % 15 + 1
        rows[f"{i:024x}"] = Measurement(
            label, f"pointwise [{size}] -> [{size}]", (ns,) * 3, values, layouts=f"l{i // 2}"
        )
    return replace(devices.load("generic-cpu"), name="made up", features=names, measurements=rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="*", metavar="DEVICE_MODEL", help="device model files")
    parser.add_argument("--folds", type=int, default=5, help="parts that the measurements are dealt into")
    parser.add_argument("--no-ablation", action="store_true", help="only the errors of the whole model")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="a made-up device, two parts")
    args = parser.parse_args()
    if args.folds < 2 or not (args.models or args.smoke):
        print("model_error: name at least one device model file, and at least 2 folds", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 140)
    records = []
    try:
        for model in [made_up()] if args.smoke else [devices.load(path) for path in args.models]:
            if len(model.measurements) < args.folds:
                raise DeviceError(
                    f"device model {model.name!r} holds {len(model.measurements)} measured kernels, too few to leave "
                    f"parts out: calibrate it"
                )
            records.append(study(model, 2 if args.smoke else args.folds, not args.no_ablation))
            for shown in tables(records[-1]):
                console.print(shown)
        if args.json:
            versions = {p: version(p) for p in ("numpy", "scipy")} | {"python": platform.python_version()}
            write_atomic(
                args.json,
                json.dumps({"benchmark": "model_error", "versions": versions, "models": records}, indent=1) + "\n",
            )
    except LayoutOptError as error:
        print(f"model_error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``layoutopt advise``: which way of fine-tuning fits a device and a link, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt import complete
from layoutopt.display_parts import bytes_text
from layoutopt.errors import LayoutOptError
from layoutopt.show import Progress, emit, out, table

if TYPE_CHECKING:
    from layoutopt.advise import Advice, Way

__all__ = ["advise"]

HEAD = (
    *("way", "memory MiB", "fits", "device ms", "link ms", "step ms"),
    *("sent a sample", "first epoch", "later ones", "energy", "energy J"),
)


def advise(
    model: Annotated[
        str, typer.Argument(help="A zoo model (see `layoutopt capture --list`).", autocompletion=complete.models)
    ],
    device_model: Annotated[
        str, typer.Option("--device-model", help="A file or a built-in name.", autocompletion=complete.device_models)
    ],
    link: Annotated[str, typer.Option("--link", help="From the device to the server: 20Mbps, 1Gbps, …")],
    memory: Annotated[str | None, typer.Option("--memory", help="512MiB, …; the device's own by default.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Samples a step.")] = None,
    seq: Annotated[int | None, typer.Option("--seq", min=1, help="Tokens a sample (text models).")] = None,
    labels: Annotated[int | None, typer.Option("--labels", min=1, help="Number of classes.")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Of an epoch, for what an epoch sends.")] = 1000,
    window: Annotated[int, typer.Option("--window", min=1, help="Batches that may wait to be sent.")] = 4,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy", help="Of all plans: greedy is quick, ilp exact.", autocompletion=complete.strategies
        ),
    ] = "greedy",
    time_limit: Annotated[float, typer.Option("--time-limit", help="Seconds for the exact solver, a plan.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Compare full fine-tuning, LoRA, a head alone, recomputation and side-tuning; say which fit."""
    from costmodel.device import load
    from layoutopt.advise import Ask, link_bits_per_s
    from layoutopt.advise import advise as advised
    from layoutopt.facade import memory_bytes
    from layoutopt.planner import check_strategy

    check_strategy(strategy)
    ask = Ask(
        model,
        link_bits_per_s(link),
        memory_bytes(memory),
        batch,
        seq,
        labels,
        samples,
        window,
        strategy,
        time_limit,
    )
    if ":" in model or model.endswith(".onnx"):
        raise LayoutOptError(f"{model} is not in the zoo: what LoRA, a head and taps are is known of zoo models only")
    known = load(device_model)
    with Progress("planning", quiet=json) as bar:
        advice = advised(ask, known, bar.fraction)
    if json:
        emit(as_json(advice))
        return
    table(HEAD, [cells(way, advice) for way in advice.ways])
    for line in notes(advice):
        out(line)


def as_json(advice: Advice) -> dict[str, Any]:
    """All of it in bytes, seconds and joules; what is not known is null."""
    from layoutopt.energy import SOURCE

    ask = advice.ask
    return {
        "model": ask.model,
        "device": advice.device,
        "batch": advice.batch,
        "memory_limit_bytes": advice.limit_bytes,
        "link_bits_per_s": ask.link_bits_per_s,
        "epoch_samples": ask.epoch_samples,
        "window": ask.window,
        "energy_constants": SOURCE,
        "ways": [_row(way, advice) for way in advice.ways],
    }


def _row(way: Way, advice: Advice) -> dict[str, Any]:
    found = {
        "way": way.name,
        "within_memory": way.within,
        "levers": list(way.levers),
        "weights": way.weights,
        "taps": way.taps or None,
        "tokens": way.tokens or None,
        "fits": way.fits,
        "why_not": way.why_not or None,
    }
    if way.plan is None or way.energy is None:
        return found
    return found | {
        "memory_bytes": way.memory_bytes,
        "arena_bytes": way.arena_bytes,
        "parameter_bytes": way.parameter_bytes,
        "unsent_bytes": way.unsent_bytes,
        "device_s": way.device_s,
        "link_s": way.link_s,
        "server_s": None if way.taps else 0.0,
        "step_s": way.step_s,
        "sample_bytes": way.sample_bytes,
        "first_epoch_bytes": way.first_epoch_bytes,
        "later_epoch_bytes": way.later_epoch_bytes,
        "device_j": way.energy.device_j,
        "link_j": way.energy.link_j,
        "modelled_energy_of_full": _of_full(way, advice),
    }


def _of_full(way: Way, advice: Advice) -> float | None:
    """Modelled energy over that of full fine-tuning, planned without a limit."""
    first = advice.ways[0].energy
    return way.energy.modelled_j / first.modelled_j if first and way.energy else None


_NAMES = {"full": "full", "lora": "LoRA", "head": "head alone", "side": "side-tuning"}


def title(way: Way) -> str:
    """A way in words."""
    if way.plan is None:
        return f"{_NAMES[way.name]} by all levers" if way.name != "side" else _NAMES[way.name]
    if way.taps:
        weights = {"fp32": "float32"}.get(way.weights, way.weights)
        return f"side-tuning: weights {weights}, taps {way.taps}, {way.tokens}"
    used = dict.fromkeys(_lever(rewrite) for rewrite in way.levers)
    return _NAMES[way.name] + (f" within memory: {', '.join(used) or 'other layouts'}" if way.within else "")


def _lever(rewrite: str) -> str:
    family, _, parameter = rewrite.partition(":")
    if family in ("anew", "recompute"):
        return "recomputation"
    return {"micro": f"{parameter} micro-batches", "pieces": f"loss in {parameter} pieces"}.get(family, rewrite)


def cells(way: Way, advice: Advice) -> list[str]:
    """A way as a line of the table."""
    if way.plan is None:
        return [title(way), "-", "no", *["-"] * (len(HEAD) - 3)]
    relative = _of_full(way, advice)
    return [
        title(way),
        f"{way.memory_bytes / 2**20:.1f}",
        "yes" if way.fits else "no",
        f"{way.device_s * 1e3:.2f}",
        f"{way.link_s * 1e3:.2f}" if way.taps else "-",
        f"{way.step_s * 1e3:.2f}",
        bytes_text(way.sample_bytes) if way.taps else "0",
        bytes_text(way.first_epoch_bytes) if way.taps else "0",
        bytes_text(way.later_epoch_bytes) if way.taps else "0",
        f"{relative:.2f}" if relative is not None else "-",
        _joules(way),
    ]


def _joules(way: Way) -> str:
    if way.energy is None or way.energy.device_j is None or way.energy.link_j is None:
        return "not known"
    return f"{way.energy.device_j + way.energy.link_j:.3g}"


def notes(advice: Advice) -> Iterator[str]:
    """What the table leaves to say."""
    from layoutopt.energy import BUSY_W, LINK_J_PER_BYTE, SOURCE

    ask, fitting = advice.ask, [way for way in advice.ways if way.fits]
    yield (
        f"{len(fitting)} of {len(advice.ways)} fit into {advice.limit_bytes / 2**20:.1f} MiB of {advice.device}, "
        f"{advice.batch} samples a step"
    )
    yield from (f"{title(way)}: {way.why_not}" for way in advice.ways if way.plan is None)
    for what, key in (("the shortest step", "step_s"), ("the least memory", "memory_bytes")):
        if fitting:
            yield f"{what} that fits: {title(min(fitting, key=lambda way: getattr(way, key)))}"
    yield (
        f"memory: the plan's arena, parameters included, and {ask.window} batches of taps that wait to be sent; "
        "step: the longer of device and link, which overlap; what the server takes is not known"
    )
    yield (
        f"an epoch: {ask.epoch_samples} samples; in later ones the server has their taps; sent bytes are without "
        "what gRPC and TLS add"
    )
    yield f"energy: of arithmetic and memory over full fine-tuning's, for ratios only ({SOURCE}), without the radio"
    lacking = _unstated(advice.ways)
    if lacking:
        yield f"energy J: not known, since the device model {advice.device} states no {' and no '.join(lacking)}"
    else:
        yield f"energy J: of a step, by {BUSY_W} and {LINK_J_PER_BYTE} of the device model"


def _unstated(ways: Sequence[Way]) -> list[str]:
    from layoutopt.energy import BUSY_W, LINK_J_PER_BYTE

    known = [way.energy for way in ways if way.energy is not None]
    device = any(e.device_j is None for e in known)
    return [BUSY_W] * device + [LINK_J_PER_BYTE] * any(e.link_j is None for e in known)

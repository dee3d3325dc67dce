"""Advice: every way is planned, its numbers are its plan's, and the command line says which fit."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import pytest

from costmodel.device import DeviceModel, Fact, load
from layoutopt import advise as module
from layoutopt.advise import MODES, TAPS, TOKENS, WEIGHTS, Advice, Ask, Way, advise, link_bits_per_s, sample_bytes
from layoutopt.cli import main
from layoutopt.cli_advise import cells
from layoutopt.energy import BUSY_W, LINK_J_PER_BYTE
from layoutopt.errors import LayoutOptError
from layoutopt.quantize import Format
from layoutopt.side.task import Task
from layoutopt.stepcost import predict_step

pytest.importorskip("peft", reason="needs the extra 'torch'")

RATE = 20e6
BATCH, SEQ, WIDTH, BLOCKS = 4, 12, 60, 2
WORDS = ("advise", "bert-tiny", "--device-model", "immortalis-g925", "--link", "20Mbps", "--batch", "4", "--seq", "12")


@lru_cache(maxsize=2)
def advice(memory_bytes: int | None = None) -> Advice:
    ask = Ask("bert-tiny", RATE, memory_bytes, BATCH, SEQ, epoch_samples=100, window=3)
    return advise(ask, load("immortalis-g925"))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Side-tuning in two ways only, but in the advice that tests share."""
    advice()
    monkeypatch.setattr(module, "WEIGHTS", ("nf4",))
    monkeypatch.setattr(module, "TAPS", ("int4:64",))


def sides(found: Advice) -> list[Way]:
    return [way for way in found.ways if way.taps]


def named(name: str, found: Advice) -> Way:
    return next(way for way in found.ways if way.name == name)


def test_every_way_is_there():
    counted = Counter(way.name for way in advice().ways)
    assert counted == {**dict.fromkeys(MODES, 1), "side": len(WEIGHTS) * len(TAPS) * len(TOKENS)}
    assert len({(w.name, w.weights, w.taps, w.tokens) for w in advice().ways}) == len(advice().ways)


def test_numbers_are_the_plans():
    for way in advice().ways:
        assert way.plan is not None
        assert way.arena_bytes == way.plan.arena_bytes
        assert way.memory_bytes == way.plan.arena_bytes + 3 * BATCH * way.sample_bytes
        assert 0 < way.parameter_bytes < way.arena_bytes
        assert way.fits
        assert way.step_s == max(way.device_s, way.link_s)
        assert way.link_s == way.sample_bytes * BATCH * 8 / RATE
        assert way.first_epoch_bytes == 100 * way.sample_bytes


def test_time_is_that_of_the_plans_step():
    from layoutopt.facade import capture_model

    graph, _ = capture_model("bert-tiny", batch=BATCH, seq=SEQ, mode="lora")
    way = named("lora", advice())
    assert way.plan is not None
    roomy = replace(load("immortalis-g925").limits, global_mem_bytes=1 << 40, max_alloc_bytes=1 << 40)
    assert way.device_s == predict_step(way.plan, graph, replace(load("immortalis-g925"), limits=roomy)).step_s


def test_training_less_takes_less():
    full, lora, head = (named(name, advice()) for name in MODES)
    assert full.arena_bytes > lora.arena_bytes > head.arena_bytes
    assert all(way.arena_bytes < full.arena_bytes for way in sides(advice()))


def test_weights_of_fewer_bits_take_less():
    by_weights = {way.weights: way.parameter_bytes for way in sides(advice()) if way.taps == "int4:64"}
    assert by_weights["fp32"] > by_weights["int8"] > by_weights["nf4"]


def test_fewer_bits_and_tokens_send_less():
    sent = {(way.taps, way.tokens): way.sample_bytes for way in sides(advice())}
    for tokens in TOKENS:
        assert sent["float32", tokens] > sent["int8:64", tokens] > sent["int4:64", tokens] == sent["fp4:64", tokens]
    assert all(sent[taps, "all"] > 10 * sent[taps, "pivot"] for taps in TAPS)
    assert {way.later_epoch_bytes for way in sides(advice())} == {800}
    assert all(way.sample_bytes == way.later_epoch_bytes == 0 for way in advice().ways if not way.taps)


@pytest.mark.parametrize("taps", TAPS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_what_is_sent_is_what_the_server_expects(taps: str, tokens: str):
    task = Task("m", "g", WIDTH, ("a", "b"), taps, tokens, SEQ, BATCH, 3, "labels")  # type: ignore[arg-type]
    rows = task.rows_per_sample
    assert sample_bytes(BLOCKS, rows, WIDTH, Format.parse(taps), tokens) == task.sample_bytes + 8
    way = next(w for w in sides(advice()) if (w.taps, w.tokens) == (taps, tokens))
    assert way.sample_bytes == task.sample_bytes + 8


@pytest.mark.usefixtures("few")
def test_what_is_too_large_is_planned_within_memory_too():
    whole = named("full", advice())
    found = advice(whole.arena_bytes - 1)
    first, within = [way for way in found.ways if way.name == "full"]
    assert not first.fits
    assert str(whole.arena_bytes) in first.why_not
    assert within.fits
    assert within.memory_bytes < whole.memory_bytes
    assert within.device_s >= first.device_s
    assert all(way.fits == (way.memory_bytes <= found.limit_bytes) for way in found.ways)


@pytest.mark.usefixtures("few")
def test_energy_is_known_where_the_model_states_it():
    for way in advice().ways:
        assert way.energy is not None
        assert way.energy.device_j is None
        assert way.energy.link_j == (None if way.taps else 0)
        assert way.energy.modelled_j > 0
    stated = {BUSY_W: Fact(2.0, "a test", "assumed"), LINK_J_PER_BYTE: Fact(1e-6, "a test", "assumed")}
    base = load("immortalis-g925")
    model: DeviceModel = replace(base, facts={**base.facts, **stated})
    found = advise(Ask("bert-tiny", RATE, None, BATCH, SEQ), model)
    for way in found.ways:
        assert way.energy is not None
        assert way.energy.device_j == 2 * way.device_s
        assert way.energy.link_j == pytest.approx(1e-6 * BATCH * way.sample_bytes)


def test_a_model_without_known_blocks_says_so():
    advisor = module._Advisor(Ask("swin-odd", RATE), load("immortalis-g925"), lambda *_: None)
    advisor.batch = 3
    (way,) = advisor.with_a_server()
    assert not way.fits
    assert way.plan is None
    assert "blocks that layoutopt can tap" in way.why_not
    assert cells(way, advice())[:3] == ["side-tuning", "-", "no"]


@pytest.mark.usefixtures("few")
def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS]) == 0
    shown = capsys.readouterr().out
    for part in ("full", "LoRA", "head alone", "weights nf4, taps int4:64, pivot", "not known", "Horowitz", "fit into"):
        assert part in shown


@pytest.mark.usefixtures("few")
def test_the_command_as_json(capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, "--memory", "100KiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory_limit_bytes"] == 100 * 1024
    none = [row for row in found["ways"] if "memory_bytes" not in row]
    assert none
    assert all(row["why_not"] and not row["fits"] for row in none)
    rows = [row for row in found["ways"] if "memory_bytes" in row]
    assert all(row["fits"] == (row["memory_bytes"] <= 100 * 1024) for row in rows)
    assert {row["server_s"] for row in rows if row["taps"]} == {None}
    assert rows[0]["modelled_energy_of_full"] == 1


@pytest.mark.parametrize("text", ["fast", "0Mbps", "20", "20MB/s", "-1Mbps"])
def test_what_is_no_rate_is_refused(text: str):
    with pytest.raises(LayoutOptError, match="not a rate"):
        link_bits_per_s(text)


def test_rates():
    assert link_bits_per_s("20Mbps") == link_bits_per_s("20 Mbit/s") == 20e6
    assert link_bits_per_s("1.5gbps") == 1.5e9
    assert link_bits_per_s("800bps") == 800


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"--link": "quick"}, "not a rate"),
        ({"--memory": "much"}, "not a size"),
        ({"--device-model": "no-such-phone"}, "no-such-phone"),
        ({"--strategy": "best"}, "unknown strategy"),
        ({"--seq": "4000"}, "positions"),
        ({"bert-tiny": "bert-huge"}, "unknown model"),
        ({"bert-tiny": "mine:net"}, "not in the zoo"),
    ],
)
def test_bad_input_is_one_sentence(changed: dict[str, str], word: str, capsys: pytest.CaptureFixture[str]):
    words = list(WORDS)
    for key, value in changed.items():
        if not key.startswith("-"):
            words[words.index(key)] = value
        elif key in words:
            words[words.index(key) + 1] = value
        else:
            words += [key, value]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert word in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out

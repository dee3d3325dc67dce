"""What crosses the wire: everything that a real training sends is recorded, and neither tokens nor text are in it.

The command line runs a small BERT over texts; its activations go over a plaintext connection to a real server, and a
proxy keeps every byte of both directions.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("grpc", reason="needs the extra 'side'")
pytest.importorskip("torch", reason="needs the extra 'torch'")
pytest.importorskip("tokenizers", reason="needs the extra 'examples'")

from costmodel import device as device_models
from kernels.runtime import Runtime, devices
from layoutopt.facade import capture_model
from layoutopt.models import uncalibrated
from layoutopt.quantize import quantise
from layoutopt.side.device import HEAD_FILE, NETWORK_FILE
from layoutopt.side.evaluate import load_network
from layoutopt.side.sampling import Arrays
from layoutopt.textdata import encode
from tests.face import own_folder, text_checkpoint
from tests.link import Link
from tests.side import FakeBackbone, device, server, small_task

WIDTHS = ("u1", "<u2", ">u2", "<i4", ">i4", "<i8", ">i8", "<f4", ">f4", "<f8", ">f8", "<f2", ">f2")
RUN = 6
"""Neighbouring ids: none is found by chance in a few megabytes, even as single bytes."""
SEQ = 16


def varints(ids: list[int]) -> bytes:
    """As protobuf packs whole numbers."""
    out = bytearray()
    for number in ids:
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


def encodings(ids: list[int]) -> Iterator[tuple[str, bytes]]:
    """How a run of ids might be written down."""
    array = np.array(ids)
    for dtype in WIDTHS:
        if np.array_equal(array.astype(dtype).astype(np.int64), array):
            yield dtype, array.astype(dtype).tobytes()
    yield "varint", varints(ids)
    yield "zigzag", varints([2 * i for i in ids])
    yield (
        "nibbles",
        bytes(a | b << 4 for a, b in zip(ids[::2], ids[1::2], strict=True)) if max(ids) < 16 else varints(ids),
    )
    for separator in (" ", ",", ", ", "\n", "\t"):
        yield f"digits {separator!r}", separator.join(map(str, ids)).encode()
    yield "hex", array.astype("<u2").tobytes().hex().encode()


def ids_found(recorded: bytes, rows: list[list[int]]) -> list[str]:
    """Runs of these ids that occur, and how they are written."""
    found = []
    for ids in rows:
        runs = [ids[i : i + RUN] for i in range(len(ids) - RUN + 1)]
        # Few different ones (padding, say) are found where there is no token.
        telling = [run for run in runs if len(set(run)) >= RUN - 1 and min(run) > 0]
        found += [f"{name} {run}" for run in telling for name, data in encodings(run) if data in recorded]
    return found


def text_found(recorded: bytes, texts: list[str]) -> list[str]:
    """Words, and parts of lines in base64, that occur."""
    words = {word for text in texts for word in text.split() if len(word) > 4}
    found = [
        f"{word} {code}"
        for word in words
        for code in ("utf-8", "utf-16-le", "utf-16-be")
        if word.encode(code) in recorded
    ]
    for text in texts:
        for shift in range(3):
            # Where a line begins in a base64 text moves its letters: the inner ones are the same in all.
            part = base64.b64encode(b"\0" * shift + text.encode())[4:-4]
            found += [f"base64 {text}"] if part in recorded else []
    return found


# ---- the search itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WIDTHS)
def test_ids_that_do_leak_are_found(dtype: str) -> None:
    noise = np.random.default_rng(0).bytes(10_000)
    ids = [3, 17, 92, 4, 45, 8, 77]
    assert ids_found(noise, [ids]) == []
    assert ids_found(noise + np.array(ids).astype(dtype).tobytes() + noise, [ids])
    assert ids_found(noise + varints(ids) + noise, [ids])
    assert ids_found(noise + str(ids).encode() + noise, [ids])


def test_text_that_does_leak_is_found() -> None:
    text = "a private sentence about something"
    assert text_found(b"\0" * 100, [text]) == []
    for leak in (b"sentence", "private".encode("utf-16-le"), base64.b64encode(b"xy" + text.encode() + b"more")):
        assert text_found(b"\0" * 50 + leak + b"\0" * 50, [text])


def test_a_device_that_leaks_over_the_wire_is_found(tmp_path: Path) -> None:
    """The same recording catches a backbone whose activations are its token ids."""
    task = small_task(steps=4, format="float32")
    ids = np.random.default_rng(2).integers(1, 500, (32, task.width))

    class Leaking(FakeBackbone):
        def run(self, samples: np.ndarray) -> Arrays:
            honest = super().run(samples)
            return Arrays((quantise(ids[samples].astype(np.float32), task.fmt), *honest.taps[1:]), None, honest.targets)

    with server(tmp_path) as found, Link(found.port, record=True) as link:
        device(link.address, task, Leaking(task))
        assert ids_found(bytes(link.up), ids[:, :8].tolist())


# ---- a real training ------------------------------------------------------------------------------------------------


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Lines of label and text, in words that occur nowhere else."""
    rng = np.random.default_rng(4)
    vocabulary = ["".join(rng.choice(list("bcdfghklmnprstvwz"), 7)) for _ in range(60)]
    lines = [f"{('ham', 'spam')[i % 2]}\t{' '.join(rng.choice(vocabulary, 12))}" for i in range(40)]
    (tmp_path / "data.txt").write_text("\n".join(lines) + "\n")
    return vocabulary


def give_words(checkpoint: Path, vocabulary: list[str]) -> None:
    """Replace the checkpoint's tokenizer by one of these words."""
    file = checkpoint / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] = {w: i for i, w in enumerate(("[PAD]", "[UNK]", *vocabulary))}
    file.write_text(json.dumps(tokenizer))


@pytest.mark.device
@pytest.mark.parametrize(
    "options", [("--mode", "labels", "--tokens", "all"), ("--mode", "private", "--tap-format", "int4:8")]
)
def test_no_token_and_no_text_crosses_the_wire(
    options: tuple[str, ...], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_folder(tmp_path, monkeypatch)
    graph = capture_model("bert-tiny", batch=4, seq=SEQ, optimizer="adamw", labels=2)[0]
    start = text_checkpoint(tmp_path / "start", graph)
    give_words(start, words)
    model = tmp_path / "device.toml"
    device_models.save(uncalibrated(Runtime(devices()[0])), model)
    data = tmp_path / "data.txt"
    arguments = ["--data", str(data), "--checkpoint", str(start), "--device", "0", "--device-model", str(model)]
    arguments += ["--strategy", "rowmajor", "--json"]
    with server(tmp_path / "state") as found, Link(found.port, record=True) as link:
        out = tmp_path / "out"
        words_of_device = [
            "side",
            "device",
            "bert-tiny",
            "--server",
            link.address,
            "--out",
            str(out),
            "--seq",
            str(SEQ),
        ]
        # In a process of its own, as a device is: nothing of the server's is near its memory.
        command = [sys.executable, "-m", "layoutopt", *words_of_device, "--batch", "4", "--epochs", "2"]
        done = subprocess.run([*command, *options, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert ("activations of all tokens tell" in done.stderr) == ("all" in options)
        facts = json.loads(done.stdout)
        recorded = bytes(link.up + link.down)
    lines = [line.partition("\t")[2] for line in data.read_text().splitlines()]
    ids = encode(lines, start / "tokenizer.json", SEQ)["input_ids"].tolist()
    assert len(recorded) > facts["sent_bytes"] > 32 * load_network(out / NETWORK_FILE).task.sample_bytes
    assert ids_found(recorded, ids) == []
    assert text_found(recorded, lines) == []
    assert (out / HEAD_FILE).exists() == ("private" in options)

"""The bundle for a phone: made here, run where only numpy and pyopencl are, and its result loaded here."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from costmodel import device
from costmodel.device import DeviceModel
from costmodel.features import FEATURES
from costmodel.fit import fit, samples_of
from costmodel.model import CostModel
from layoutopt.cli import main
from layoutopt.errors import LayoutOptError
from layoutopt.graphfile import decode, encode_body
from layoutopt.models import find_graph
from layoutopt.phone import FOLDER, export_bundle
from layoutopt.standins import fitting, pack, structs

ON_A_PHONE = ("numpy", "pyopencl", "pytools", "siphash24", "typing_extensions", "platformdirs")
"""What `pip install pyopencl` brings."""
DRIVER = "pocl_binary_distribution"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """The bundle, unpacked."""
    folder = tmp_path_factory.mktemp("phone")
    export_bundle(folder / "b.zip", [find_graph("vit-digits")])
    with zipfile.ZipFile(folder / "b.zip") as packed:
        packed.extractall(folder)
    return folder / FOLDER


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A folder with nothing but what a phone has."""
    folder = tmp_path_factory.mktemp("packages")
    for name in (*ON_A_PHONE, DRIVER):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # a driver that is installed with the system
        for top in {f.parts[0] for f in files} - {"..", "__pycache__"}:
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if not (folder / top).exists():
                (folder / top).symlink_to(source)
    return folder


def run(bundle: Path, packages: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"PYTHONPATH": str(packages)}
    command = [sys.executable, "-S", "-B", str(bundle / "run.py"), *arguments]  # -S: no installed packages
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_equal_bundles_hold_what_calibrating_imports_and_no_more(tmp_path, capsys):
    assert main(["calibrate", "--export", str(tmp_path / "a.zip")]) == 0
    assert "run `python3 run.py`" in capsys.readouterr().out
    names = export_bundle(tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    assert {
        "run.py",
        "README.txt",
        "costmodel/calibrate.py",
        "layoutopt/probing.py",
        "standins/msgspec/msgpack.py",
    } <= set(names)
    assert {"layoutopt/cli.py", "layoutopt/capture.py", "layoutopt/solve.py"}.isdisjoint(names)
    assert any(name.endswith(".cl") for name in names)
    assert (tmp_path / "a.zip").stat().st_size < 1 << 20


def test_a_bundle_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(LayoutOptError, match="is no directory"):
        export_bundle(tmp_path / "absent" / "b.zip")


def test_it_calibrates_where_only_numpy_and_pyopencl_are(bundle, packages, tmp_path, device_index):
    done = run(bundle, packages, tmp_path, "--device", str(device_index), "--budget", "6", "-o", "m.toml")
    assert done.returncode == 0, done.stderr
    assert "bring it back and plan with --device-model m.toml" in done.stdout
    made = device.load(tmp_path / "m.toml")
    from kernels.runtime import devices

    here = devices()[device_index]
    assert (made.name, made.driver, made.origin, made.limits) == (here.name, here.driver, "calibrated", here.limits)
    assert made.features == FEATURES
    assert made.graphs == (find_graph("vit-digits").hash,), "the same hash as here"
    assert made.probes["copy_memory"].rounds_ns
    assert len(made.measurements) >= 1
    again = fit(samples_of(made.measurements.values()), FEATURES)
    assert made.constants.keys() == again.keys(), "fitted there without scipy as here with it"
    for key, constants in again.items():
        assert made.constants[key].median_error == pytest.approx(constants.median_error, abs=0.02)
    assert CostModel(made).model is made


def test_what_is_wrong_is_said_in_a_sentence(bundle, packages, tmp_path, device_index):
    done = run(bundle, packages, tmp_path, "--device", "nonesuch")
    assert done.returncode == 2
    assert done.stderr.startswith("run.py: error: ")
    assert "Traceback" not in done.stderr
    listed = run(bundle, packages, tmp_path, "--list")
    assert listed.returncode == 0
    assert f"{device_index}: " in listed.stdout
    assert not list(tmp_path.iterdir()), "nothing is written"


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=30,
)


# ---- stand-ins -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 10**6))
def test_non_negative_least_squares_as_scipys(rows, columns, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((rows, columns)), rng.standard_normal(rows)
    if seed % 3 == 0 and columns > 1:
        a[:, -1] = a[:, 0]  # no one answer
    x, norm = fitting.nnls(a, b)
    assert (x >= 0).all()
    assert norm == pytest.approx(optimize.nnls(a, b)[1], abs=1e-8)
    assert norm == pytest.approx(float(np.linalg.norm(a @ x - b)), abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=20))
def test_tau_as_scipys(pairs):
    x, y = np.array(pairs, dtype=float).T
    want, got = stats.kendalltau(x, y).statistic, fitting.kendalltau(x, y).statistic
    assert got == pytest.approx(want, nan_ok=True)


def test_plain_values_and_structs():
    value = {"a": (1, 2.5, ("x", None, True)), "b": {"c": []}}
    assert structs.to_builtins(value) == {"a": [1, 2.5, ["x", None, True]], "b": {"c": []}}
    for text in ('a "quoted" é\n\\', "", "\u2028"):
        assert msgspec.json.decode(structs.json.encode(text)) == text

    shipped = device.load("adreno-740")
    assert structs.convert(structs.to_builtins(asdict(shipped)), DeviceModel) == shipped
    for wrong in ({**asdict(shipped), "name": 3}, {**asdict(shipped), "caches": 1}):
        with pytest.raises(structs.ValidationError, match="expected"):
            structs.convert(wrong, DeviceModel)

    class Pair(structs.Struct, frozen=True):
        left: int
        right: int = 2

    assert Pair(1) == Pair(1, 2)
    with pytest.raises(AttributeError):
        Pair(1).left = 3


@given(PLAIN)
def test_message_pack_as_msgspecs(value):
    assert pack.encode(value) == msgspec.msgpack.encode(value)
    assert pack.decode(msgspec.msgpack.encode(value)) == value


@pytest.mark.parametrize("size", [31, 32, 255, 256, 65535, 65536])
def test_lengths_of_message_pack(size):
    for value in ("x" * size, b"x" * size, [None] * size, {str(i): i for i in range(size)}):
        assert pack.encode(value) == msgspec.msgpack.encode(value)
        assert pack.decode(pack.encode(value)) == value


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xd9\x05ab", b"\x93\x01", b"\xcb\x00", b"\x01\x02", b"\xa5ab"])
def test_damaged_message_pack_is_refused(data):
    with pytest.raises(ValueError, match=r"end early|begins nothing|after the value"):
        pack.decode(data)


def test_graphs_are_the_same_bytes(monkeypatch):
    from layoutopt import graphfile

    graph = find_graph("vit-digits")
    want, whole = encode_body(graph), graphfile.encode(graph)
    monkeypatch.setattr(msgspec, "msgpack", pack)
    assert encode_body(graph) == want
    assert decode(whole).hash == graph.hash

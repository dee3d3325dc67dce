"""``layoutopt side``: keys, serve and device on the command line; bad input is one sentence and exit code 2."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs the extra 'side'")
pytest.importorskip("grpc", reason="needs the extra 'side'")
pytest.importorskip("torch", reason="needs the extra 'torch'")

from layoutopt.cli import main
from layoutopt.side.keys import DeviceKeys
from tests.face import own_folder, refused
from tests.side import SMALL, device
from tests.side_process import ServerProcess

DEVICE = ("device", "minilm", "--data", "data.txt", "--out", "out")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_folder(tmp_path, monkeypatch)


def test_keys_are_made_and_told_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["side", "keys", "k", "--device", "phone", "--host", "gpu.example.org"]) == 0
    text = capsys.readouterr().out
    assert "k/server: for the server" in text
    assert "k/devices/phone: for the device phone" in text
    assert DeviceKeys.load("k/devices/phone").token not in text
    assert main(["side", "keys", "k", "--device", "tablet", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["authority"], made["server"], made["devices"]) == (False, False, ["tablet"])
    assert main(["side", "keys", "k"]) == 0
    assert "give --device NAME" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("keys", "k", "--device", "a/b"), "'a/b' is no device name"),
        (("keys", "k", "--device", "a", "--device", "a"), "named twice"),
        (("serve", "--state", "s", "--listen", "0.0.0.0:7311"), "without keys nothing leaves this machine"),
        (("serve", "--state", "s", "--listen", "nowhere"), "'nowhere' is no address"),
        (("serve", "--state", "s", "--listen", "127.0.0.1:99999"), "is no address"),
        (("serve", "--state", "s", "--keys", "absent"), "cannot read absent/server.key"),
        (("serve", "--state", "s", "--engine", "slurm"), "unknown engine 'slurm'"),
        (("serve", "--state", "s", "--memory", "much"), "much"),
        ((*DEVICE, "--server", "example.org:7311"), "without keys nothing leaves this machine"),
        ((*DEVICE, "--server", "example.org"), "is no address"),
        ((*DEVICE, "--server", "127.0.0.1:1", "--keys", "absent"), "cannot read absent/device.key"),
        ((*DEVICE, "--server", "127.0.0.1:1", "--name", "a b"), "is no device name"),
        ((*DEVICE, "--server", "127.0.0.1:1", "--mode", "secret"), "--mode 'secret': choose labels or private"),
        ((*DEVICE, "--server", "127.0.0.1:1", "--tokens", "some"), "--tokens 'some': choose pivot or all"),
        ((*DEVICE, "--server", "127.0.0.1:1", "--optimizer", "lion"), "--optimizer 'lion'"),
        ((*DEVICE, "--server", "127.0.0.1:1", "--schedule", "step"), "--schedule 'step'"),
        ((*DEVICE, "--server", "127.0.0.1:1", "--storage", "int3"), "--storage 'int3'"),
        ((*DEVICE, "--server", "127.0.0.1:1", "--tap-format", "int3"), "unknown number format 'int3'"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(capsys, "side", *arguments)
    assert not list(Path().iterdir())


def test_a_file_where_a_folder_should_be(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    for arguments in (("keys", "file"), ("serve", "--state", "file")):
        assert "file is a file" in refused(capsys, "side", *arguments)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_serves_until_it_is_asked_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    process = ServerProcess(tmp_path / "state")
    if number is signal.SIGTERM:
        assert device(f"127.0.0.1:{process.port}").losses.keys() == set(range(SMALL.steps))
    process.process.send_signal(number)
    assert process.close() == 0, process.errors
    assert process.errors[-1] == "layoutopt: the server has stopped; every acknowledged step is in its folder\n"
    assert not any("Traceback" in line for line in process.errors)


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    process = ServerProcess(tmp_path / "state")
    listen = f"127.0.0.1:{process.port}"
    assert f"cannot listen on {listen}" in refused(capsys, "side", "serve", "--state", "other", "--listen", listen)
    process.kill()

"""Who may train: certificates of both ends, a token per device, and names that belong to them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="needs the extra 'side'")
pytest.importorskip("grpc", reason="needs the extra 'side'")
pytest.importorskip("torch", reason="needs the extra 'torch'")

import grpc

from layoutopt.errors import LayoutOptError
from layoutopt.side.client import Remote, train
from layoutopt.side.keys import DeviceKeys, ServerKeys, make_keys
from layoutopt.side.wire import RefusedError
from layoutopt.side.workers import Workers
from tests.side import QUICK, SECRET, SMALL, Caller, FakeBackbone, Server, alone, device, same_weights, small_task

TASK = small_task(steps=4)
FEW = replace(QUICK, give_up_s=0.3)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Ours, and those of somebody else who named a device alike."""
    folders = {who: tmp_path_factory.mktemp(who) for who in ("ours", "theirs")}
    for folder in folders.values():
        make_keys(folder, ["phone", "tablet"], [])
    return folders


@pytest.fixture
def running(keys: dict[str, Path], tmp_path: Path) -> Iterator[Server]:
    workers = Workers(tmp_path / "state", engine="here")
    with Server(workers, ServerKeys.load(keys["ours"] / "server")) as found:
        yield found


def of(folder: Path, name: str = "phone") -> DeviceKeys:
    return DeviceKeys.load(folder / "devices" / name)


def call(address: str, certificate: DeviceKeys | None, name: str, token: str, authority: DeviceKeys) -> Caller:
    """A call as whoever likes, over TLS."""
    if certificate is None:
        credentials = grpc.ssl_channel_credentials(authority.authority)
    else:
        credentials = grpc.ssl_channel_credentials(authority.authority, certificate.key, certificate.certificate)
    return Caller(address, name, token, credentials)


def test_a_device_with_its_keys_trains(running: Server, keys: dict[str, Path], tmp_path: Path) -> None:
    report = device(running.address, TASK, keys=of(keys["ours"]))
    same_weights(report.weights, alone(tmp_path / "alone", TASK))


def refusal_of(running: Server, keys: dict[str, Path], certificate: str, name: str, token: str) -> Any:
    ours = keys["ours"]
    with call(running.address, of(ours, certificate), name, of(ours, token).token if token else "", of(ours)) as caller:
        return caller.refused()


@pytest.mark.parametrize(
    ("certificate", "name", "token", "says"),
    [
        ("tablet", "phone", "phone", "device phone shows the certificate of tablet"),
        ("phone", "phone", "tablet", "no device phone with this token is known"),
        ("phone", "phone", "", "no device phone with this token is known"),
        ("tablet", "phone", "tablet", "no device phone with this token is known"),
        ("phone", "watch", "phone", "no device watch with this token is known"),
    ],
)
def test_a_foreign_token_or_certificate_is_refused(
    running: Server,
    keys: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    certificate: str,
    name: str,
    token: str,
    says: str,
) -> None:
    caplog.set_level(logging.WARNING, "layoutopt.side")
    assert says in refusal_of(running, keys, certificate, name, token).reason
    assert any(says in record.message for record in caplog.records)
    assert not (tmp_path / "state" / name).exists()


def test_certificates_of_another_authority_get_no_call(running: Server, keys: dict[str, Path]) -> None:
    ours, theirs = of(keys["ours"]), of(keys["theirs"])
    for certificate in (None, theirs):
        with call(running.address, certificate, "phone", ours.token, ours) as caller:
            with pytest.raises(grpc.RpcError) as refused:
                caller.open(TASK)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_device_speaks_to_its_own_server_only(running: Server, keys: dict[str, Path]) -> None:
    with pytest.raises(LayoutOptError, match="nothing got on"):
        device(running.address, TASK, keys=of(keys["theirs"]), settings=FEW)


def test_plaintext_to_a_server_with_keys_gets_nowhere(running: Server) -> None:
    with pytest.raises(LayoutOptError, match="nothing got on"):
        device(running.address, TASK, settings=FEW)


def test_a_name_that_is_not_the_keys_is_refused_before_anything_is_sent(keys: dict[str, Path]) -> None:
    with pytest.raises(LayoutOptError, match="these keys are of device phone, not of tablet"):
        Remote("127.0.0.1:1", "tablet", of(keys["ours"]))


def test_a_device_that_was_struck_off_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["phone"], [])
    registry = tmp_path / "keys" / "server" / "devices.json"
    workers = Workers(tmp_path / "state", engine="here")
    with Server(workers, ServerKeys.load(registry.parent)) as found:
        mine = of(tmp_path / "keys")
        device(found.address, TASK, keys=mine)
        registry.write_text(json.dumps({}))
        with pytest.raises(RefusedError, match="the server refuses: no device phone with this token"):
            device(found.address, TASK, keys=mine)


def test_without_tls_tokens_are_asked_for_all_the_same(tmp_path: Path, keys: dict[str, Path]) -> None:
    workers = Workers(tmp_path / "state", engine="here")
    with Server(workers, ServerKeys.load(keys["ours"] / "server"), tls=False) as found:
        remote = Remote(found.address, "phone", of(keys["ours"]), tls=False)
        train(TASK, FakeBackbone(SMALL), remote, QUICK, secret=SECRET)
        with Caller(found.address, "phone", "wrong") as caller:
            assert "with this token" in caller.refused().reason

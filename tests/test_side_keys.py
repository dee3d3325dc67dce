"""Certificates and tokens: what is written where, who can read it, and what they prove."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs the extra 'side'")

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from layoutopt.errors import LayoutOptError
from layoutopt.side.keys import DeviceKeys, Registry, ServerKeys, check_name, make_keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("keys")
    made = make_keys(root, ["phone", "tablet"], ["gpu.example.org", "10.0.0.7", "::1"])
    assert (made.authority, made.server, made.devices) == (True, True, ("phone", "tablet"))
    return root


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(found: x509.Certificate) -> list[str]:
    return [str(n.value) for n in found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value]


def usage(found: x509.Certificate) -> list[x509.ObjectIdentifier]:
    return list(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_a_server_has_its_hosts_and_serves_only(folder: Path) -> None:
    found = certificate(folder / "server" / "server.pem")
    assert names(found) == ["gpu.example.org", "10.0.0.7", "::1"]
    assert usage(found) == [ExtendedKeyUsageOID.SERVER_AUTH]
    found.verify_directly_issued_by(certificate(folder / "ca.pem"))


def test_a_device_has_its_name_and_calls_only(folder: Path) -> None:
    found = certificate(folder / "devices" / "phone" / "device.pem")
    assert names(found) == ["phone"]
    assert usage(found) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    found.verify_directly_issued_by(certificate(folder / "ca.pem"))
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_secrets_are_for_their_owner_alone(folder: Path) -> None:
    device = folder / "devices" / "phone"
    for path in (folder / "ca.key", folder / "server" / "server.key", device / "device.key", device / "token"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list((folder / "server").glob("ca.key"))
    assert not list(folder.glob("devices/*/ca.key"))


def test_the_server_has_hashes_of_tokens_and_no_token(folder: Path) -> None:
    tokens = [DeviceKeys.load(folder / "devices" / name).token for name in ("phone", "tablet")]
    assert len(set(tokens)) == 2
    assert min(map(len, tokens)) >= 40
    for path in (folder / "server").iterdir():
        assert not any(token.encode() in path.read_bytes() for token in tokens)
    registry = ServerKeys.load(folder / "server").registry
    assert registry.knows("phone", tokens[0])
    assert not registry.knows("phone", tokens[1])
    assert not registry.knows("nobody", tokens[0])
    assert not registry.knows("nobody", "")


def test_devices_come_and_go_while_a_server_runs(tmp_path: Path) -> None:
    make_keys(tmp_path, ["phone"], [])
    registry = ServerKeys.load(tmp_path / "server").registry
    server_before = (tmp_path / "server" / "server.pem").read_bytes()
    made = make_keys(tmp_path, ["tablet"], [])
    assert (made.authority, made.server, made.devices) == (False, False, ("tablet",))
    assert (tmp_path / "server" / "server.pem").read_bytes() == server_before
    new = DeviceKeys.load(tmp_path / "devices" / "tablet")
    assert registry.knows("tablet", new.token)
    path = tmp_path / "server" / "devices.json"
    hashes = json.loads(path.read_text())
    del hashes["tablet"]
    path.write_text(json.dumps(hashes))
    assert not registry.knows("tablet", new.token)


def test_new_hosts_make_a_new_server_certificate(tmp_path: Path) -> None:
    make_keys(tmp_path, [], [])
    assert names(certificate(tmp_path / "server" / "server.pem")) == ["localhost", "127.0.0.1", "::1"]
    assert make_keys(tmp_path, [], ["other.example.org"]).server
    assert names(certificate(tmp_path / "server" / "server.pem")) == ["other.example.org"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a" * 65, "späti", "a\n", "a b"])
def test_names_that_are_no_folders(name: str, tmp_path: Path) -> None:
    with pytest.raises(LayoutOptError, match="is no device name"):
        check_name(name)
    with pytest.raises(LayoutOptError, match="is no device name"):
        make_keys(tmp_path, [name], [])
    assert not list(tmp_path.iterdir())


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutOptError, match=r"device phone has keys in .*: delete that folder"):
        make_keys(folder, ["phone"], [])
    with pytest.raises(LayoutOptError, match="named twice"):
        make_keys(folder, ["new", "new"], [])
    with pytest.raises(LayoutOptError, match="no host name"):
        make_keys(tmp_path / "a", [], ["bücher.example"])
    with pytest.raises(LayoutOptError, match=r"cannot read .*server.key"):
        ServerKeys.load(tmp_path)
    with pytest.raises(LayoutOptError, match=r"cannot read .*device.key"):
        DeviceKeys.load(tmp_path)
    damaged = tmp_path / "devices.json"
    for text in ("[1]", "{", '{"phone": 3}'):
        damaged.write_text(text)
        with pytest.raises(LayoutOptError, match="is damaged"):
            Registry(damaged).hashes()

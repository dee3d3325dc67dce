"""Who may talk to whom: a certificate authority, certificates of server and devices, and a token per device.

``make_keys`` writes a folder::

    ca.key, ca.pem            the authority; its key makes certificates and belongs on no server and no device
    server/                   for the server: server.key, server.pem, ca.pem, devices.json (hashes of tokens)
    devices/NAME/             for the device NAME: device.key, device.pem, ca.pem, token

A device proves who it is twice: by a certificate whose only name is its own, and by its token, of which the server has
the hash. Either alone is refused.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layoutopt.errors import LayoutOptError
from layoutopt.files import check_folder, write_atomic
from layoutopt.side.needs import need

__all__ = ["DeviceKeys", "Made", "Registry", "ServerKeys", "check_name", "make_keys"]

DAYS = 825
"""How long the certificates of server and devices hold."""
_CA_DAYS = 3650
_TOKEN_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> str:
    """A device's name, which is also a folder's.

    Raises:
        LayoutOptError: it is no such name.
    """
    if not _NAME.fullmatch(name):
        raise LayoutOptError(
            f"{name[:80]!r} is no device name: expected 1 to 64 of a-z A-Z 0-9 . _ -, a letter or digit first"
        )
    return name


@dataclass(frozen=True)
class Made:
    """What ``make_keys`` wrote.

    Attributes:
        folder: of all.
        authority: whether the authority is new.
        server: whether the server's certificate is new.
        devices: names of new devices.
    """

    folder: Path
    authority: bool
    server: bool
    devices: tuple[str, ...]


@dataclass(frozen=True)
class DeviceKeys:
    """What a device holds; all PEM but the token."""

    name: str
    key: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    authority: bytes = field(repr=False)
    token: str = field(repr=False)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> DeviceKeys:
        """Read ``devices/NAME``; the name is the certificate's.

        Raises:
            LayoutOptError: a file is missing or no certificate.
        """
        key, certificate, authority, token = (
            _read(Path(folder) / name, "device") for name in ("device.key", "device.pem", "ca.pem", "token")
        )
        return cls(_name_of(certificate, folder), key, certificate, authority, token.decode("ascii", "replace").strip())


@dataclass(frozen=True)
class ServerKeys:
    """What a server holds; PEM."""

    key: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    authority: bytes = field(repr=False)
    registry: Registry

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> ServerKeys:
        """Read ``server``.

        Raises:
            LayoutOptError: a file is missing or unreadable.
        """
        key, certificate, authority = (
            _read(Path(folder) / name, "server") for name in ("server.key", "server.pem", "ca.pem")
        )
        registry = Registry(Path(folder) / "devices.json")
        registry.hashes()
        return cls(key, certificate, authority, registry)


class Registry:
    """The devices that a server knows; devices that come or go while it runs are seen when they next connect.

    Args:
        path: ``devices.json``: a hash of the token by device.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each device's token, in hexadecimal.

        Raises:
            LayoutOptError: the file is missing or damaged.
        """
        try:
            found = json.loads(_read(self.path, "server"))
            if not all(isinstance(value, str) for pair in found.items() for value in pair):
                raise ValueError("expected an object of strings")
        except (ValueError, AttributeError) as error:
            raise LayoutOptError(f"{self.path} is damaged ({error}): run `layoutopt side keys` again") from error
        return found

    def knows(self, name: str, token: str) -> bool:
        """Whether a device of this name holds this token."""
        expected = self.hashes().get(name, "")
        return hmac.compare_digest(expected, _hash(token))


def _hash(token: str) -> str:
    # Tokens are 256 random bits: there is nothing to guess, so no salt and no slow hash.
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def make_keys(folder: str | os.PathLike[str], devices: Sequence[str], hosts: Sequence[str], days: int = DAYS) -> Made:
    """Make what is missing: the authority, the server's certificate, certificates and tokens of devices.

    Args:
        folder: where; it may hold keys from before, which stay.
        devices: names of new devices.
        hosts: names and addresses under which devices reach the server; they replace those from before.
        days: how long the certificates hold.

    Raises:
        LayoutOptError: a bad name, a device that exists, or a folder that cannot be written.
    """
    root = Path(folder)
    for name in devices:
        check_name(name)
        if (root / "devices" / name).exists():
            raise LayoutOptError(
                f"device {name} has keys in {root / 'devices' / name}: delete that folder to renew them"
            )
    if len(set(devices)) < len(devices):
        raise LayoutOptError(f"a device is named twice in {', '.join(devices)}: give each name once")
    check_folder(root)
    need("cryptography", "making keys")
    root.mkdir(parents=True, exist_ok=True)
    new_authority = not (root / "ca.key").exists()
    authority = _new_authority(root) if new_authority else _load_authority(root)
    new_server = bool(hosts) or not (root / "server" / "server.pem").exists()
    if new_server:
        _write_server(root / "server", authority, hosts or ("localhost", "127.0.0.1", "::1"), days)
    registry = root / "server" / "devices.json"
    hashes = Registry(registry).hashes() if registry.exists() else {}
    for name in devices:
        hashes[name] = _hash(_write_device(root / "devices" / name, name, authority, days))
    write_atomic(registry, json.dumps(hashes, indent=1, sort_keys=True))
    return Made(root, new_authority, new_server, tuple(devices))


# ---- certificates ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Authority:
    key: Any
    certificate: Any
    pem: bytes


def _new_authority(root: Path) -> _Authority:
    key = _new_key()
    certificate = _certificate("layoutopt side-tuning authority", key, None, (), _CA_DAYS)
    _write_secret(root / "ca.key", _key_pem(key))
    pem = _pem(certificate)
    write_atomic(root / "ca.pem", pem)
    return _Authority(key, certificate, pem)


def _load_authority(root: Path) -> _Authority:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    pem = _read(root / "ca.pem", "authority")
    try:
        key = load_pem_private_key(_read(root / "ca.key", "authority"), None)
        return _Authority(key, x509.load_pem_x509_certificate(pem), pem)
    except (ValueError, TypeError) as error:
        raise LayoutOptError(f"the authority in {root} is damaged ({error}): choose a new folder") from error


def _write_server(folder: Path, authority: _Authority, hosts: Sequence[str], days: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    key = _new_key()
    certificate = _certificate("layoutopt side-tuning server", key, authority, hosts, days)
    _write_secret(folder / "server.key", _key_pem(key))
    write_atomic(folder / "server.pem", _pem(certificate))
    write_atomic(folder / "ca.pem", authority.pem)


def _write_device(folder: Path, name: str, authority: _Authority, days: int) -> str:
    folder.mkdir(parents=True)
    key, token = _new_key(), secrets.token_urlsafe(_TOKEN_BYTES)
    _write_secret(folder / "device.key", _key_pem(key))
    _write_secret(folder / "token", token.encode())
    write_atomic(folder / "device.pem", _pem(_certificate(name, key, authority, (), days)))
    write_atomic(folder / "ca.pem", authority.pem)
    return token


def _certificate(name: str, key: Any, authority: _Authority | None, hosts: Sequence[str], days: int) -> Any:
    """A certificate: an authority's where none signs it, a server's where it has hosts, a device's otherwise."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if authority is None else authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=0 if authority is None else None), True)
    )
    if authority is not None:
        usage = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        names = [_general_name(host) for host in hosts] or [x509.DNSName(name)]
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
    return builder.sign(key if authority is None else authority.key, hashes.SHA256())


def _general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise LayoutOptError(f"{host!r} is no host name and no address: expected such as gpu.example.org") from error


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _key_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _name_of(certificate: bytes, folder: str | os.PathLike[str]) -> str:
    need("cryptography", "reading keys")
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        subject = x509.load_pem_x509_certificate(certificate).subject
    except ValueError as error:
        raise LayoutOptError(f"{Path(folder) / 'device.pem'} is no certificate ({error})") from error
    return check_name(str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value))


def certificate_names(auth_context: Mapping[str, Sequence[bytes]]) -> set[str]:
    """The names in the certificate that a connection's other end has shown; empty without TLS."""
    return {name.decode("utf-8", "replace") for name in auth_context.get("x509_subject_alternative_name", ())}


# ---- files ----------------------------------------------------------------------------------------------------------


def _write_secret(path: Path, data: bytes) -> None:
    """A file that nobody else may read, at no moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        os.fchmod(handle.fileno(), 0o600)
        handle.write(data)


def _read(path: Path, whose: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        folder = {"server": "DIR/server", "device": "DIR/devices/NAME", "authority": "DIR"}[whose]
        raise LayoutOptError(
            f"cannot read {path} ({error.strerror}): expected what `layoutopt side keys DIR` writes to {folder}"
        ) from error

"""Certificates and keys, made with `cryptography` (a dependency of Flower); private ones have mode 600."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from weft.errors import WeftError

YEARS = 5
CURVE = ec.SECP384R1  # required by Flower


def make_certificates(folder: Path, host: str) -> None:
    """A certificate authority for the hub, and a server certificate for `host` and loopback."""
    ca_key, server_key = ec.generate_private_key(CURVE()), ec.generate_private_key(CURVE())
    ca_name = _name("weft hub authority")
    ca = (
        _builder(ca_name, ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    names = [_general_name(name) for name in dict.fromkeys(["localhost", "127.0.0.1", host])]
    server = (
        _builder(_name(host), ca_name, server_key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    for name, key in (("ca.key", ca_key), ("server.key", server_key)):
        write_secret(folder / name, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for name, certificate in (("ca.crt", ca), ("server.pem", server)):
        (folder / name).write_bytes(certificate.public_bytes(Encoding.PEM))


def expiry(folder: Path) -> datetime.datetime:
    """When the first of a hub's certificates expires: that of the authority, which every site has, or the server's."""
    ends: list[datetime.datetime] = []
    for path in (folder / "ca.crt", folder / "server.pem"):
        try:
            ends.append(x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc)
        except (OSError, ValueError):
            raise WeftError(f"{path} cannot be read; restore it from a copy, or create a new hub") from None
    return min(ends)


def make_site_key() -> tuple[str, str]:
    """The private and the public key of a site in OpenSSH format."""
    key = ec.generate_private_key(CURVE())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return private.decode(), public.decode() + "\n"


def write_secret(path: Path, blob: bytes) -> None:
    """Write a new file that only its owner can read, from its first byte on."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(blob)
    except FileExistsError:
        raise WeftError(f"{path} already exists; remove it first") from None


def check_secret(path: Path) -> None:
    """Reject a key that others can read."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        raise WeftError(f"the key {path} is missing; restore it from a copy") from None
    if mode & 0o077:
        raise WeftError(f"others can read the key {path} (mode {mode:o}); chmod 600 {path}")


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)

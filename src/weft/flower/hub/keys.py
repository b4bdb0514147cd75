"""Certificates and keys, made with `cryptography` (which Flower brings along); private ones with mode 600."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from weft.errors import WeftError

YEARS = 5
CURVE = ec.SECP384R1  # the one that Flower asks for


def make_certificates(folder: Path, host: str) -> None:
    """An authority of the hub's own, and a certificate for its server, good for `host` and for loopback."""
    authority_key, server_key = ec.generate_private_key(CURVE()), ec.generate_private_key(CURVE())
    authority_name = _name("weft hub authority")
    authority = (
        _builder(authority_name, authority_name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    names = [_alternative(name) for name in dict.fromkeys(["localhost", "127.0.0.1", host])]
    known = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    server = (
        _builder(_name(host), authority_name, server_key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(known, critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    write_secret(folder / "ca.key", _private_pem(authority_key))
    write_secret(folder / "server.key", _private_pem(server_key))
    (folder / "ca.crt").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(serialization.Encoding.PEM))


def end_of_certificates(folder: Path) -> datetime.datetime:
    """When the first of a hub's certificates ends: the authority's, which every site has, or the server's."""
    ends: list[datetime.datetime] = []
    for path in (folder / "ca.crt", folder / "server.pem"):
        try:
            ends.append(x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc)
        except (OSError, ValueError):
            raise WeftError(f"{path} cannot be read; put it back from a copy, or make a new hub") from None
    return min(ends)


def make_site_key() -> tuple[str, str]:
    """The private and the public half of a site's key, as OpenSSH writes them."""
    key = ec.generate_private_key(CURVE())
    encoding, form = serialization.Encoding, serialization.PrivateFormat.OpenSSH
    private = key.private_bytes(encoding.PEM, form, serialization.NoEncryption())
    public = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private.decode(), public.decode() + "\n"


def write_secret(path: Path, blob: bytes) -> None:
    """Readable by its owner alone from its first byte on; never over another."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(blob)
    except FileExistsError:
        raise WeftError(f"{path} is there already; remove it first if it is to be made anew") from None


def check_secret(path: Path) -> None:
    """A key that others can read is none."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        raise WeftError(f"the key {path} is missing") from None
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


def _usage(sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return pem

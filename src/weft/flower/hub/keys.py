"""Certificates and keys, made with `cryptography` (a dependency of Flower)."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from weft.errors import WeftError
from weft.flower.hub.programs import write_secret

YEARS = 5
CURVE = ec.SECP384R1  # required by Flower
USES = "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign"


def make_certificates(folder: Path, host: str) -> None:
    """A certificate authority for the hub, and a server certificate for `host` and loopback."""
    ca_key, server_key = ec.generate_private_key(CURVE()), ec.generate_private_key(CURVE())
    ca = (
        _builder("weft hub authority", ca_key, "key_cert_sign", "crl_sign")
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    names = [_general_name(name) for name in dict.fromkeys(["localhost", "127.0.0.1", host])]
    server = (
        _builder(host, server_key, "digital_signature", "key_agreement")
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    for name, key in (("ca.key", ca_key), ("server.key", server_key)):
        write_secret(folder / name, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for name, certificate in (("ca.crt", ca), ("server.pem", server)):
        (folder / name).write_bytes(certificate.public_bytes(Encoding.PEM))


def _builder(subject: str, key: ec.EllipticCurvePrivateKey, *uses: str) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    usage = dict.fromkeys([*USES.split(), "encipher_only", "decipher_only"], False) | dict.fromkeys(uses, True)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name("weft hub authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.KeyUsage(**usage), critical=True)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


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

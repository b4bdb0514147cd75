"""Who is not let in: a site that nobody registered, one without a key, plaintext, Control from outside, a replay."""

from __future__ import annotations

import http.client
import json
import ssl
import subprocess
import warnings
from pathlib import Path

import pytest
from federation import Federation, free_port, wait_until

from weft.hub.keys import make_site_key, write_secret
from weft.hub.programs import program, surroundings

REFUSED = 150  # seconds within which a SuperNode gives up


def address(federation: Federation) -> str:
    return f"127.0.0.1:{federation.public if federation.nginx else federation.port}"


def supernode(federation: Federation, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A SuperNode that ends by itself, since it is refused."""
    command = [program("flower-supernode"), "--superlink", address(federation), "--port", str(free_port()), *words]
    return subprocess.run(
        [*command, "--max-retries", "2"],
        cwd=folder,
        env=surroundings(folder),
        capture_output=True,
        text=True,
        timeout=REFUSED,
        check=False,
    )


def there(federation: Federation) -> list[str]:
    sites = json.loads(federation.weft("hub", "status", "--json"))["sites"]
    return [site["site"] for site in sites if site["there"]]


@pytest.fixture
def trusted(federation: Federation) -> list[str]:
    return ["--root-certificates", str(federation.folder / "hub" / "ca.crt")]


def test_a_site_that_nobody_registered(federation: Federation, trusted: list[str], tmp_path: Path) -> None:
    write_secret(tmp_path / "key", make_site_key()[0].encode())
    done = supernode(federation, tmp_path, *trusted, "--auth-supernode-private-key", "key")
    assert done.returncode != 0
    assert "SuperNode ID" not in done.stderr + done.stdout


def test_a_site_without_a_key(federation: Federation, trusted: list[str], tmp_path: Path) -> None:
    done = supernode(federation, tmp_path, *trusted)
    assert done.returncode != 0
    assert "SuperNode ID" not in done.stderr + done.stdout


def test_plaintext(federation: Federation, tmp_path: Path) -> None:
    done = supernode(federation, tmp_path, "--insecure")
    assert done.returncode != 0
    assert "SuperNode ID" not in done.stderr + done.stdout


def test_a_hub_with_another_authority(federation: Federation, tmp_path: Path) -> None:
    from weft.hub.keys import make_certificates

    make_certificates(tmp_path, "127.0.0.1")
    key = str(federation.folder / "ada" / "key")
    done = supernode(federation, tmp_path, "--root-certificates", "ca.crt", "--auth-supernode-private-key", key)
    assert done.returncode != 0
    assert "SuperNode ID" not in done.stderr + done.stdout


def ask(federation: Federation, port: int, path: str) -> int:
    trust = ssl.create_default_context(cafile=str(federation.folder / "hub" / "ca.crt"))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=20)
    connection.request("POST", path, body=b"", headers={"Content-Type": "application/x-protobuf"})
    return connection.getresponse().status


def test_control_from_outside(federation: Federation) -> None:
    """Behind nginx only the fleet's path is there; on loopback, which is the hub's own, Control answers."""
    if not federation.nginx:
        warnings.warn("there is no nginx here: that it hides Control was NOT tested", stacklevel=1)
        pytest.skip("there is no nginx here (Debian: apt-get install nginx-light)")
    assert ask(federation, federation.port, "/v1/control/list-runs") != 403
    for path in ("/v1/control/list-runs", "/v1/runtime/get-nodes", "/", "/v1/", "/v1/fleet/../control/list-runs"):
        assert ask(federation, federation.public, path) == 403, path
    assert ask(federation, federation.public, "/v1/fleet/pull-messages") != 403


def test_the_others_are_still_there(federation: Federation) -> None:
    wait_until(lambda: there(federation) == ["ada", "ben", "cleo"], 90)

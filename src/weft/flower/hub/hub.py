"""The hub's folder: certificates, who was invited, Flower's database, nginx's configuration; and what it can do.

hub.json    the address that sites are given, the port of the SuperLink on this machine's loopback
ca.crt      the authority that sites trust; ca.key, server.pem, server.key
sites.json  the sites by name, in the order in which they were invited: the plan's clients 0, 1, ...
nginx.conf  passes Flower's fleet path and nothing else
flower/     Flower's home and database; app/ what is submitted as a run; logs/
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from weft.errors import WeftError, nearest
from weft.files import write_text
from weft.flower.hub import supervisor
from weft.flower.hub.names import SITE_NAME, is_address
from weft.flower.hub.programs import NAME, UP, ask, check_flower, program, surroundings
from weft.lazy import lazy

if TYPE_CHECKING:
    from weft.flower.hub import keys
else:
    keys = lazy("weft.flower.hub.keys")  # to look at a hub needs no cryptography

APP = """[project]
name = "weft-run"
version = "1.0.0"
description = "A run of weft; its code is the weft that is installed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "weft"

[tool.flwr.app.components]
serverapp = "weft.flower.server_app:app"
clientapp = "weft.flower.client_app:app"

[tool.flwr.app.config]
folder = ""
"""
NGINX = """# Passes the path on which sites talk and nothing else: whoever reaches the others can start runs.
# nginx -p {folder} -c nginx.conf
pid nginx.pid;
error_log logs/nginx.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path flower/nginx-body;
    proxy_temp_path flower/nginx-proxy;
    fastcgi_temp_path flower/nginx-fastcgi;
    uwsgi_temp_path flower/nginx-uwsgi;
    scgi_temp_path flower/nginx-scgi;
    server {{
        listen {listen} ssl;
        ssl_certificate server.pem;
        ssl_certificate_key server.key;
        ssl_protocols TLSv1.2 TLSv1.3;
        client_max_body_size 64m;
        location /v1/fleet/ {{
            proxy_pass https://127.0.0.1:{port};
            proxy_ssl_trusted_certificate ca.crt;
            proxy_ssl_verify on;
            proxy_ssl_name localhost;
            proxy_read_timeout 300s;
            proxy_request_buffering off;  # bytes go through: nginx may not write into this folder
            proxy_buffering off;
            proxy_http_version 1.1;
        }}
        location / {{
            return 403;
        }}
    }}
}}
"""


class Hub:
    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        try:
            words = json.loads((self.folder / "hub.json").read_text(encoding="utf-8"))
            self.address, self.port = str(words["address"]), int(words["port"])
        except (OSError, ValueError, KeyError, TypeError):
            raise WeftError(f"{folder} is not a hub's folder; weft hub init makes one") from None

    @classmethod
    def create(cls, folder: Path, address: str | None, port: int) -> Hub:
        """`address` is where sites reach nginx; without it they are on this machine and reach the SuperLink itself."""
        check_flower()
        host, _, public = (address or f"127.0.0.1:{port}").rpartition(":")
        if not is_address(f"{host}:{public}"):
            raise WeftError(f"the address is {address!r}; it should be HOST:PORT, such as hub.example.org:9443")
        if folder.exists() and any(folder.iterdir()):
            raise WeftError(f"{folder} is not empty; choose another --folder")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        keys.make_certificates(folder, host)
        keys.write_secret(folder / "exec.secret", secrets.token_bytes(32))
        for name in ("logs", "app", "flower"):
            (folder / name).mkdir()
        write_text(folder / "app" / "pyproject.toml", APP)
        write_text(folder / "app" / "README.md", "The code of this app is the weft that is installed.\n")
        connection = f'address = "127.0.0.1:{port}"\nroot-certificates = "{folder.resolve() / "ca.crt"}"\n'
        write_text(
            folder / "flower" / "config.toml", f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n{connection}'
        )
        write_text(
            folder / "nginx.conf", NGINX.format(folder=folder.resolve(), port=port, listen=_listen(host, public, port))
        )
        write_text(folder / "sites.json", "[]\n")
        write_text(folder / "hub.json", json.dumps({"address": f"{host}:{public}", "port": port}) + "\n")
        return cls(folder)

    @property
    def home(self) -> Path:
        return self.folder / "flower"

    def sites(self) -> list[str]:
        names: list[str] = json.loads((self.folder / "sites.json").read_text(encoding="utf-8"))
        return names

    def invite(self, name: str, path: Path) -> None:
        """Write what a site needs to join, with its private key: the hub keeps the public half alone."""
        if not SITE_NAME.fullmatch(name):
            raise WeftError(f"a site's name is small letters, digits and dashes, not {name!r}")
        with self._alone():
            if name in (names := self.sites()):
                raise WeftError(f"{name} is invited already; choose another name, or weft hub remove {name} first")
            private, public = keys.make_site_key()
            authority = (self.folder / "ca.crt").read_text(encoding="utf-8")
            words = {"weft": 1, "name": name, "hub": self.address, "authority": authority, "key": private}
            # first: whoever cannot be given it is not invited
            keys.write_secret(path, (json.dumps(words, indent=2) + "\n").encode())
            write_text(self._public_key(name), public)
            write_text(self.folder / "sites.json", json.dumps([*names, name]) + "\n")

    def remove(self, name: str) -> None:
        """A site is no member any more: its key opens nothing, and no later run counts on it."""
        with self._alone():
            if name not in (names := self.sites()):
                raise WeftError(f"there is no site {name}; {nearest(name, names)}")
            if (number := self._numbers().get(name)) is not None and self.is_up():
                ask(["supernode", "unregister", number, NAME], self.home)
            elif number is not None:
                raise WeftError("the hub is not up, and Flower has to be told; weft hub start starts it")
            others = {site: node for site, node in self._numbers().items() if site != name}
            write_text(self.folder / "nodes.json", json.dumps(others) + "\n")
            write_text(self.folder / "sites.json", json.dumps([each for each in names if each != name]) + "\n")
            self._public_key(name).unlink(missing_ok=True)

    def _alone(self) -> filelock.BaseFileLock:
        """For whoever changes the lists of sites and runs: of two at once, one would undo what the other wrote."""
        return filelock.FileLock(self.folder / ".changing")

    def register(self) -> None:
        """Tell Flower of every site that it does not know: a new one, or all of them if its database was lost."""
        wait_for_port(self.port)
        with self._alone():
            known = self._nodes()
            for name in self.sites():
                if self._numbers().get(name) not in known:
                    said = ask(["supernode", "register", str(self._public_key(name)), NAME, "--name", name], self.home)
                    numbers = self._numbers() | {name: str(said["node-id"])}
                    write_text(self.folder / "nodes.json", json.dumps(numbers) + "\n")

    def online(self) -> list[str]:
        """The sites that are there now."""
        nodes, numbers = self._nodes(), self._numbers()
        return [name for name in self.sites() if nodes.get(numbers.get(name, "")) == "online"]

    def _nodes(self) -> dict[str, str]:
        """By Flower's number of a node, how it is; its list has no names."""
        said = ask(["supernode", "list", NAME], self.home)
        return {str(node["node-id"]): str(node["status"]) for node in said["nodes"]}

    def _numbers(self) -> dict[str, str]:
        """By site, Flower's number for it, which it said when the site was registered."""
        path = self.folder / "nodes.json"
        numbers: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return numbers

    def invited(self) -> dict[str, float]:
        """When each site was invited, in seconds since 1970: its public key is as old."""
        found = {name: self._public_key(name) for name in self.sites()}
        return {name: path.stat().st_mtime for name, path in found.items() if path.exists()}

    def begun(self) -> list[str]:
        """The folders of the runs that this hub began."""
        path = self.folder / "runs.json"
        folders: list[str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        return folders

    def note(self, run: Path) -> None:
        with self._alone():
            write_text(self.folder / "runs.json", json.dumps([*self.begun(), str(run)]) + "\n")

    def is_up(self) -> bool:
        return supervisor.running(self.folder) is not None

    def superlink(self) -> list[str]:
        link = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port)]
        link += ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        link += ["--enable-supernode-auth", "--database", "flower/state.db"]
        link += ["--disable-runtime-dependency-installation", "--isolation", "process"]
        return [*link, "--superexec-auth-secret-file", "exec.secret"]

    def superexec(self) -> list[str]:
        command = [program("flower-superexec"), "--root-certificates", "ca.crt"]
        command += ["--runtime-api-address", f"127.0.0.1:{self.port}"]
        return [*command, "--superexec-auth-secret-file", "exec.secret"]

    def start(self, say: supervisor.Say) -> None:
        """Serve until stopped."""
        check_flower()
        for name in ("ca.key", "server.key", "exec.secret"):
            keys.check_secret(self.folder / name)
        if not self.is_up() and not supervisor.left_behind(self.folder) and _is_port_taken(self.port):
            raise WeftError(
                f"port {self.port} of this machine is taken by another program; end that one, "
                "or make a hub with another: weft hub init --port"
            )
        commands = {"superlink": self.superlink, "superexec": self.superexec}

        def ready() -> None:
            self.register()
            say(f"{UP}; sites reach it at {self.address}; weft hub stop ends it")

        supervisor.Supervisor(self.folder, commands, surroundings(self.home), say).run(ready)

    def _public_key(self, name: str) -> Path:
        return self.folder / f"{name}.pub"


def _listen(host: str, public: str, port: int) -> str:
    """nginx listens everywhere if it is for other machines; on loopback, and beside the SuperLink, if it is not."""
    if host in ("127.0.0.1", "localhost"):
        return f"127.0.0.1:{public if int(public) != port else port + 1}"
    return public


def _is_port_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the SuperLink does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False


def wait_for_port(port: int, patience: float = 60.0) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            if time.monotonic() > end:
                raise WeftError(f"nothing answers on port {port} of this machine; see logs/superlink.log") from None
            time.sleep(0.2)

"""The hub's folder: certificates, invited sites, Flower's database, nginx's configuration; and its operations.

hub.json    the address in invitations, the port of the SuperLink on loopback
ca.crt      the authority that sites trust; ca.key, server.pem, server.key
sites.json  the sites by name in the order of their invitations: the plan's clients 0, 1, ...
nodes.json  Flower's number of each site; NAME.pub its public key
runs.json   the folders of all runs of this hub
nginx.conf  passes Flower's fleet path and nothing else
flower/     Flower's home and database; app/ what is submitted as a run; logs/
"""

from __future__ import annotations

import json
import secrets
import socket
import string
import time
from pathlib import Path

import filelock

from weft.errors import WeftError, nearest
from weft.files import read_json, write_json, write_text
from weft.flower.hub import programs, supervisor
from weft.flower.hub.programs import CONNECTION, flwr, program

ASSETS = Path(__file__).parent / "assets"
UP = "the hub is running"
CONFIG = (
    '[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{ca}"\n'
)


class Hub:
    def __init__(self, folder: Path):
        programs.check_flower()
        self.folder = folder.resolve()
        self.home = self.folder / "flower"
        try:
            settings = json.loads((self.folder / "hub.json").read_text(encoding="utf-8"))
            self.address, self.port = str(settings["address"]), int(settings["port"])
            self.ready = f"{UP}; sites reach it at {self.address}; weft hub stop ends it"
        except (OSError, ValueError, KeyError, TypeError):
            raise WeftError(f"{folder} is not a hub's folder; create one with weft hub init") from None

    @classmethod
    def create(cls, folder: Path, address: str | None, port: int) -> Hub:
        """`address` is where sites reach nginx; without it they are on this machine and reach the SuperLink."""
        from weft.flower.hub.keys import make_certificates  # loads cryptography

        programs.check_flower()
        host, _, public = (address or f"127.0.0.1:{port}").rpartition(":")
        if not programs.is_address(f"{host}:{public}"):
            raise WeftError(f"--address {address!r} is not HOST:PORT, such as hub.example.org:9443")
        make_folder(folder, "logs", "app", "flower")
        make_certificates(folder, host)
        programs.write_secret(folder / "exec.secret", secrets.token_bytes(32))
        write_text(folder / "app" / "pyproject.toml", (ASSETS / "app.toml").read_text(encoding="utf-8"))
        write_text(folder / "app" / "README.md", "The code of this app is in the installed weft.\n")
        config = CONFIG.format(name=CONNECTION, port=port, ca=folder.resolve() / "ca.crt")
        write_text(folder / "flower" / "config.toml", config)
        listen = public  # on all interfaces; for sites of this machine on loopback, next to the SuperLink
        if host in programs.LOOPBACK:
            listen = f"127.0.0.1:{public if int(public) != port else port + 1}"
        nginx = string.Template((ASSETS / "nginx.conf").read_text(encoding="utf-8"))
        write_text(folder / "nginx.conf", nginx.substitute(folder=folder.resolve(), port=port, listen=listen))
        write_json(folder / "sites.json", [])
        write_json(folder / "hub.json", {"address": f"{host}:{public}", "port": port})
        return cls(folder)

    # ---- sites and runs ----------------------------------------------------------------------------------------------

    def sites(self) -> list[str]:
        return read_json(self.folder / "sites.json", list[str]())

    def invite(self, name: str, path: Path) -> None:
        """Write what a site needs to join, with its private key; the hub keeps only the public key."""
        from weft.flower.hub.keys import make_site_key  # loads cryptography

        if not programs.SITE_NAME.fullmatch(name):
            raise WeftError(f"{name!r} is not a site name; use lowercase letters, digits and dashes")
        with self._lock():
            if name in (names := self.sites()):
                raise WeftError(f"{name} is already invited; choose another name, or weft hub remove {name} first")
            private, public = make_site_key()
            authority = (self.folder / "ca.crt").read_text(encoding="utf-8")
            invitation = {"weft": 1, "name": name, "hub": self.address, "authority": authority, "key": private}
            # first: without the file the site is not invited
            programs.write_secret(path, (json.dumps(invitation, indent=2) + "\n").encode())
            write_text(self._public_key(name), public)
            write_json(self.folder / "sites.json", [*names, name])

    def remove(self, name: str) -> None:
        """Revoke a site's key; later runs do not include it."""
        with self._lock():
            if name not in (names := self.sites()):
                raise WeftError(f"no site {name}; {nearest(name, names)}")
            numbers = self._numbers()
            if (number := numbers.pop(name, None)) is not None:
                if not self.is_up():
                    raise WeftError("the hub is not running, but Flower has to revoke the key; weft hub start runs it")
                flwr(["supernode", "unregister", number, CONNECTION], self.home)
                write_json(self.folder / "nodes.json", numbers)
            write_json(self.folder / "sites.json", [site for site in names if site != name])
            self._public_key(name).unlink(missing_ok=True)

    def register(self) -> None:
        """Register every site that Flower does not know: new ones, or all of them if its database was lost."""
        wait_for_port(self.port)
        with self._lock():
            known = self._nodes()
            for name in self.sites():
                if self._numbers().get(name) not in known:
                    arguments = ["supernode", "register", str(self._public_key(name)), CONNECTION, "--name", name]
                    number = str(flwr(arguments, self.home)["node-id"])
                    write_json(self.folder / "nodes.json", self._numbers() | {name: number})

    def online(self) -> list[str]:
        """The sites that are connected now."""
        nodes, numbers = self._nodes(), self._numbers()
        return [name for name in self.sites() if nodes.get(numbers.get(name, "")) == "online"]

    def invited(self) -> dict[str, float]:
        """When each site was invited, in seconds since 1970: the age of its public key."""
        found = {name: self._public_key(name) for name in self.sites()}
        return {name: path.stat().st_mtime for name, path in found.items() if path.exists()}

    def runs(self) -> list[Path]:
        """The folders of all runs of this hub."""
        return list(map(Path, read_json(self.folder / "runs.json", list[str]())))

    def add_run(self, folder: Path) -> None:
        with self._lock():
            write_json(self.folder / "runs.json", [*map(str, self.runs()), str(folder)])

    def _nodes(self) -> dict[str, str]:
        """The status of each node by Flower's number; its list has no names."""
        nodes = flwr(["supernode", "list", CONNECTION], self.home)["nodes"]
        return {str(node["node-id"]): str(node["status"]) for node in nodes}

    def _numbers(self) -> dict[str, str]:
        """Flower's number of each site, received when it was registered."""
        return read_json(self.folder / "nodes.json", dict[str, str]())

    def _public_key(self, name: str) -> Path:
        return self.folder / f"{name}.pub"

    def _lock(self) -> filelock.BaseFileLock:
        """Held while a list is read, changed and written."""
        return filelock.FileLock(self.folder / ".changing")

    # ---- processes ---------------------------------------------------------------------------------------------------

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
        for name in ("ca.key", "server.key", "exec.secret"):
            programs.check_secret(self.folder / name)
        if not self.is_up() and not supervisor.orphans(self.folder):
            try:
                socket.create_server(("127.0.0.1", self.port)).close()
            except OSError:
                raise WeftError(
                    f"port {self.port} is used by another program; stop it, or create a hub with weft hub init --port"
                ) from None

        def ready() -> None:
            self.register()
            say(self.ready)

        commands = {"superlink": self.superlink, "superexec": self.superexec}
        supervisor.Supervisor(self.folder, commands, programs.environment(self.home), say).run(ready)


def make_folder(folder: Path, *subfolders: str) -> None:
    """A new folder for its owner only."""
    if folder.exists() and any(folder.iterdir()):
        raise WeftError(f"{folder} is not empty; choose another --folder")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    for name in subfolders:
        (folder / name).mkdir()


def wait_for_port(port: int, patience: float = 60.0) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            if time.monotonic() > end:
                raise WeftError(f"nothing listens on port {port} of this machine; see logs/superlink.log") from None
            time.sleep(0.2)

"""A site's folder: who it is, which hub it trusts, its tasks, its memory of runs, and all that ever left it.

site.json   its name and the hub's address      key, ca.crt   who it is, whom it trusts
tasks.json  its tasks in order, their images    state/        what it remembers of each run
tasks/      resized and packed
left.csv    each tensor that left               bin/          the programs that Flower may start here
warm.sock   where its warm process listens
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError, nearest
from weft.files import write_text
from weft.flower import remembered
from weft.flower.hub import supervisor
from weft.flower.hub.names import SITE_NAME, is_address
from weft.flower.hub.programs import check_flower, program, surroundings
from weft.flower.warm import knock
from weft.lazy import lazy
from weft.scenarios import sites

if TYPE_CHECKING:
    from weft.flower.hub import keys
else:
    keys = lazy("weft.flower.hub.keys")  # to look at a site needs no cryptography


class Site:
    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        try:
            words = json.loads((self.folder / "site.json").read_text(encoding="utf-8"))
            self.name, self.hub = str(words["name"]), str(words["hub"])
        except (OSError, ValueError, KeyError, TypeError):
            raise WeftError(f"{folder} is not a site's folder; weft site join makes one") from None

    @classmethod
    def join(cls, invitation: Path, folder: Path) -> Site:
        check_flower()
        words = _read_invitation(invitation)
        if folder.exists() and any(folder.iterdir()):
            raise WeftError(f"{folder} is not empty; choose another --folder")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        keys.write_secret(folder / "key", words["key"].encode())
        write_text(folder / "ca.crt", words["authority"])
        for name in ("logs", "bin", "flower", "state"):
            (folder / name).mkdir()
        write_text(folder / "tasks.json", "[]\n")
        write_text(folder / "site.json", json.dumps({"name": words["name"], "hub": words["hub"]}) + "\n")
        return cls(folder)

    def supernode(self) -> list[str]:
        command = [program("flower-supernode"), "--superlink", self.hub, "--root-certificates", "ca.crt"]
        command += ["--auth-supernode-private-key", "key", "--host", "127.0.0.1", "--port", str(_free_port())]
        config = {"site": str(self.folder), "hub": self.hub}
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        return [*command, "--node-config", words]

    def start(self, say: supervisor.Say) -> None:
        """Serve until stopped."""
        check_flower()
        keys.check_secret(self.folder / "key")
        self.make_programs()
        # Flower finds programs by name: here it finds the runner of weft, and none that would run what the hub sends
        path = os.pathsep.join([str(self.folder / "bin"), os.defpath])
        env = surroundings(self.folder / "flower", path) | {"WEFT_SITE": str(self.folder)}  # whose tasks are learned

        def ready() -> None:
            say(f"{self.name} serves {self.hub}; Ctrl-C or weft site stop ends it")

        programs = {"warm": lambda: [sys.executable, "-m", "weft.flower.warm"], "supernode": self.supernode}
        supervisor.Supervisor(self.folder, programs, env, say).run(ready)

    def make_programs(self) -> None:
        """At each start, and not when it joins: folder and environment may have been moved since."""
        runner, executor = self.folder / "bin" / "flwr-clientapp", self.folder / "bin" / "flower-superexec"
        write_text(runner, knock(self.folder))
        runner.chmod(0o700)
        executor.unlink(missing_ok=True)
        executor.symlink_to(program("flower-superexec"))

    def add_task(self, name: str, images: Path, bits: int) -> sites.FolderReport:
        """Announce a folder of images as the next task; they are packed, so that it stays as it is now."""
        tasks, found = sites.listed(self.folder), sites.look(images, bits)
        if found.errors:
            raise WeftError(f"{found.errors[0]} (weft site check {images} says all)")
        if name in [task["name"] for task in tasks]:
            raise WeftError(f"{self.name} has a task {name} already; choose another name")
        pack = max(sites.packs(self.folder), default=-1) + 1
        sites.save(self.folder, pack, found)
        tasks.append({"name": name, "folder": str(images.resolve()), "bits": bits, "pack": pack})
        self._write_tasks(tasks)
        return found

    def remove_task(self, name: str) -> None:
        """Only one that no run has begun: what was learned is known by the place of its task."""
        tasks = sites.listed(self.folder)
        names = [task["name"] for task in tasks]
        if name not in names:
            raise WeftError(f"{self.name} has no task {name}; {nearest(name, names)}")
        place, numbers = names.index(name), sites.packs(self.folder)
        with remembered.still(self.folder):
            if (run := remembered.who_began(self.folder, place)) is not None:
                raise WeftError(
                    f"task {place} ({name}) was begun in the run {run}, and stays; later ones can be removed"
                )
            numbered = [{**task, "pack": pack} for task, pack in zip(tasks, numbers, strict=True)]
            self._write_tasks([task for task in numbered if task["name"] != name])
        (self.folder / "tasks" / f"{numbers[place]}.npz").unlink(missing_ok=True)

    def _write_tasks(self, tasks: list[dict[str, Any]]) -> None:
        write_text(self.folder / "tasks.json", json.dumps(tasks, indent=2) + "\n")


def _read_invitation(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise WeftError(f"there is no file {path}; the hub makes an invitation with weft hub invite NAME")
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        wanted = {key: words[key] for key in ("name", "hub", "authority", "key")}
        if words["weft"] != 1 or not all(isinstance(value, str) for value in wanted.values()):
            raise ValueError
        if not SITE_NAME.fullmatch(wanted["name"]) or not is_address(wanted["hub"]):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise WeftError(f"{path} is not an invitation; the hub makes one with weft hub invite NAME") from None
    return wanted


def _free_port() -> int:
    """A port of this machine's loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

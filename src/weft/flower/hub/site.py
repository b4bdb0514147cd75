"""A site's folder: its identity, the hub that it trusts, its tasks, its state of runs, and its audit log.

site.json   its name and the hub's address      key, ca.crt   its private key, the hub's authority
tasks.json  its tasks in order, their images    state/        its state of each run
tasks/      resized and packed images           bin/          the programs that Flower may start here
audit.csv   each tensor that has left           warm.sock     the socket of its fork server
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from weft.errors import WeftError, nearest
from weft.files import write_json, write_text
from weft.flower import site_state
from weft.flower.hub import programs, supervisor
from weft.flower.hub.hub import make_folder
from weft.flower.hub.programs import program
from weft.flower.warm import launcher
from weft.scenarios import sites


class Site:
    def __init__(self, folder: Path):
        programs.check_flower()
        self.folder = folder.resolve()
        try:
            settings = json.loads((self.folder / "site.json").read_text(encoding="utf-8"))
            self.name, self.hub = str(settings["name"]), str(settings["hub"])
            self.ready = f"{self.name} serves {self.hub}; weft site stop ends it"
        except (OSError, ValueError, KeyError, TypeError):
            raise WeftError(f"{folder} is not a site's folder; create one with weft site join") from None

    @classmethod
    def join(cls, path: Path, folder: Path) -> Site:
        programs.check_flower()
        invitation = _read_invitation(path)
        make_folder(folder, "logs", "bin", "flower", "state")
        programs.write_secret(folder / "key", invitation["key"].encode())
        write_text(folder / "ca.crt", invitation["authority"])
        write_json(folder / "tasks.json", [])
        write_json(folder / "site.json", {key: invitation[key] for key in ("name", "hub")})
        return cls(folder)

    def supernode(self) -> list[str]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]  # a free one
        command = [program("flower-supernode"), "--superlink", self.hub, "--root-certificates", "ca.crt"]
        command += ["--auth-supernode-private-key", "key", "--host", "127.0.0.1", "--port", str(port)]
        return [*command, "--node-config", f"site={json.dumps(str(self.folder))} hub={json.dumps(self.hub)}"]

    def start(self, say: supervisor.Say) -> None:
        """Serve until stopped."""
        programs.check_secret(self.folder / "key")
        # the folder or the environment may have moved since the last start
        client_app, executor = self.folder / "bin" / "flwr-clientapp", self.folder / "bin" / "flower-superexec"
        write_text(client_app, launcher(self.folder))
        client_app.chmod(0o700)
        executor.unlink(missing_ok=True)
        executor.symlink_to(program("flower-superexec"))
        # Flower finds programs by name: here only weft's launcher, and none that would run code of the hub
        path = os.pathsep.join([str(self.folder / "bin"), os.defpath])
        env = programs.environment(self.folder / "flower", path)
        commands = {"warm": lambda: [sys.executable, "-m", "weft.flower.warm"], "supernode": self.supernode}
        supervisor.Supervisor(self.folder, commands, env, say).run(lambda: say(self.ready))

    def add_task(self, name: str, images: Path, bits: int) -> sites.FolderReport:
        """Announce a folder of images as the next task, and pack it, so that later changes do not affect it."""
        tasks, found = sites.listed(self.folder), sites.look(images, bits)
        if found.errors:
            raise WeftError(f"{found.errors[0]}; weft site check {images} lists all errors")
        if name in [task["name"] for task in tasks]:
            raise WeftError(f"{self.name} already has a task {name}; choose another name")
        pack = max(sites.packs(self.folder), default=-1) + 1
        sites.save(self.folder, pack, found)
        task = {"name": name, "folder": str(images.resolve()), "bits": bits, "pack": pack}
        write_json(self.folder / "tasks.json", [*tasks, task], indent=2)
        return found

    def remove_task(self, name: str) -> None:
        """Remove a task that no run has started: runs know their tasks by index."""
        tasks = sites.listed(self.folder)
        names = [task["name"] for task in tasks]
        if name not in names:
            raise WeftError(f"{self.name} has no task {name}; {nearest(name, names)}")
        index, packs = names.index(name), sites.packs(self.folder)
        with site_state.no_active_run(self.folder):
            if (run := site_state.run_that_started(self.folder, index)) is not None:
                raise WeftError(f"the run {run} has started task {index} ({name}); only later tasks can be removed")
            numbered = [{**task, "pack": pack} for task, pack in zip(tasks, packs, strict=True)]
            write_json(self.folder / "tasks.json", [task for task in numbered if task["name"] != name], indent=2)
        (self.folder / "tasks" / f"{packs[index]}.npz").unlink(missing_ok=True)


def _read_invitation(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise WeftError(f"no file {path}; the hub makes an invitation with weft hub invite NAME")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {key: content[key] for key in ("name", "hub", "authority", "key")}
        is_text = content["weft"] == 1 and all(isinstance(value, str) for value in found.values())
        if not is_text or not programs.SITE_NAME.fullmatch(found["name"]) or not programs.is_address(found["hub"]):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise WeftError(f"{path} is not an invitation; the hub makes one with weft hub invite NAME") from None
    return found

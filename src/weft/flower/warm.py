"""A fork server at a site: Python, Flower and torch are loaded once, and a fork handles each message.

Flower starts a program for each message, which would load all of them again: five seconds of a core for a reply that
may take one. The program that Flower finds at a site (`LAUNCHER`) loads nothing. It passes its arguments, environment
and terminal to the fork server through a socket in the site's folder, which only its owner can open, and exits with the
code of the fork. Without a fork server it handles the message itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

SOCKET = "warm.sock"  # used from within the folder: a path to a socket has 107 characters at most
MAX_ARGUMENTS = 1 << 20  # bytes

LAUNCHER = '''#!{python}
"""What Flower starts as flwr-clientapp: see weft.flower.warm."""

import json
import os
import socket
import sys

here = os.getcwd()
connection = socket.socket(socket.AF_UNIX)
try:
    os.chdir({folder!r})
    connection.connect({socket!r})
except OSError:
    os.chdir(here)
    from weft.flower.client_app import main

    main()
    sys.exit()
arguments = json.dumps([sys.argv, here, dict(os.environ)]).encode()
socket.send_fds(connection, [len(arguments).to_bytes(4, "little")], [0, 1, 2])
connection.sendall(arguments)
code = connection.recv(1)
sys.exit(code[0] if code else 1)
'''


def launcher(folder: Path) -> str:
    """The program that connects to the fork server of a site."""
    return LAUNCHER.format(python=sys.executable, folder=str(folder), socket=SOCKET)


def serve() -> None:
    """Serve in the current folder until killed."""
    import torch

    import weft.engines.host  # loaded here, so that no fork has to
    import weft.flower.client_app  # noqa: F401

    torch.set_num_threads(1)
    if threading.active_count() > 1:
        raise RuntimeError("an imported module started threads, which a fork does not have")
    Path(SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)
        Path(SOCKET).chmod(0o600)
        listener.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork becomes a zombie; its exit code goes through the socket
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _work(connection)
            connection.close()


def _work(connection: socket.socket) -> None:
    """Handle one message in a fork, then exit."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        length, terminal, *_ = socket.recv_fds(connection, 4, 3)
        with connection.makefile("rb") as file:
            sys.argv, folder, env = json.loads(file.read(min(MAX_ARGUMENTS, int.from_bytes(length, "little"))))
        for number, descriptor in enumerate(terminal):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        threading.Thread(target=_exit_with, args=(connection,), daemon=True).start()
        from weft.flower import client_app

        client_app.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            connection.sendall(bytes([code & 255]))
        os._exit(code & 255)


def _exit_with(connection: socket.socket) -> None:
    """Exit when the launcher has closed the connection, most likely killed: nobody needs the reply."""
    with contextlib.suppress(OSError):  # a reset counts as closed
        connection.recv(1)
    os._exit(1)


if __name__ == "__main__":
    serve()

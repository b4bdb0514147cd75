"""A site's warm process: Python, Flower and torch loaded once, and a fork of it for each message.

Flower starts a program for each message, which would load all of them anew: five seconds of a core for an answer that
may take one. The program that it finds at a site (`KNOCK`) needs none of them. It hands its words, its surroundings and
its terminal to the warm process through a socket in the site's folder, which only its owner may enter, and ends as the
fork does; if the warm process is not there, it does the work itself.
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

SOCKET = "warm.sock"  # by its name alone, from within the folder: a path to a socket has 107 characters at most
LONGEST = 1 << 20  # bytes of words

KNOCK = '''#!{python}
"""What Flower finds as flwr-clientapp: see weft.flower.warm."""

import json
import os
import socket
import sys

here = os.getcwd()
door = socket.socket(socket.AF_UNIX)
try:
    os.chdir({folder!r})
    door.connect({socket!r})
except OSError:
    os.chdir(here)
    from weft.flower.runner import main

    main()
    sys.exit()
words = json.dumps([sys.argv, here, dict(os.environ)]).encode()
socket.send_fds(door, [len(words).to_bytes(4, "little")], [0, 1, 2])
door.sendall(words)
code = door.recv(1)
sys.exit(code[0] if code else 1)
'''


def knock(folder: Path) -> str:
    """The program that knocks at the warm process of a site."""
    return KNOCK.format(python=sys.executable, folder=str(folder), socket=SOCKET)


def serve() -> None:
    """In the current folder, until it is ended."""
    import torch

    import weft.flower.client_app
    import weft.flower.runner  # noqa: F401 - loaded now, so that no fork has to

    torch.set_num_threads(1)
    if threading.active_count() > 1:
        raise RuntimeError("what was loaded has started threads; a fork would not have them, nor what they hold")
    Path(SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)
        Path(SOCKET).chmod(0o600)
        listener.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork: who asked hears of it by the socket
        while True:
            door, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _work(door)
            door.close()


def _work(door: socket.socket) -> None:
    """One message, in a fork that ends with it."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        length, terminal, *_ = socket.recv_fds(door, 4, 3)
        with door.makefile("rb") as words:
            sys.argv, folder, environment = json.loads(words.read(min(LONGEST, int.from_bytes(length, "little"))))
        for number, descriptor in enumerate(terminal):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        threading.Thread(target=_end_with, args=(door,), daemon=True).start()
        from weft.flower.runner import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            door.sendall(bytes([code & 255]))
        os._exit(code & 255)


def _end_with(door: socket.socket) -> None:
    """Whoever knocked has gone, most likely killed: what it asked for is of no use to anybody."""
    with contextlib.suppress(OSError):  # a reset is an end too
        door.recv(1)
    os._exit(1)


if __name__ == "__main__":
    serve()

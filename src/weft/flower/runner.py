"""What a site runs in place of Flower's `flwr-clientapp`: the same program, with the client app that is installed here.

Flower ships an app, which is Python code, from the hub to every site and runs it there. A site of weft does not: it
takes the message, lets the shipped code lie, and answers with its own. So whoever takes over a hub can send bad
parameters, but cannot run a program at a site.
"""

from __future__ import annotations

from typing import Any

from flwr.clientapp import ClientApp
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from weft.flower import size_guard


def main() -> None:
    # by name, so that a Flower that does it in another way fails here and does not silently run what it was sent
    for name in ("install_from_fab", "get_load_client_app_fn", "install_app_dependencies"):
        if not hasattr(run_clientapp, name):
            raise ImportError(f"this flwr has no {name} where weft looks for it; install flwr==1.41.0")
    replaced: Any = run_clientapp
    replaced.install_from_fab = _install_nothing
    replaced.install_app_dependencies = _install_nothing
    replaced.get_load_client_app_fn = _load_own
    size_guard.guard()
    flwr_clientapp()


def _install_nothing(*_: object, **__: object) -> None:
    return None


def _load_own(*_: object, **__: object) -> Any:
    def load(*_: object) -> ClientApp:
        from weft.flower.client_app import app

        return app

    return load

"""Each assumption about Flower 1.41.0, one by one: a failure names what to adapt for another version."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from pathlib import Path

import flwr
import pytest
from flwr.app import Array

from weft.flower import engine, size_guard
from weft.flower.envelope import SiteRequest, pack, unpack
from weft.flower.hub import hub, programs, site, status

FLWR = Path(flwr.__file__).parent
SOURCE = {path.relative_to(FLWR).as_posix(): path.read_text(encoding="utf-8") for path in FLWR.rglob("*.py")}

# module, name, and who in weft relies on it; private to Flower, or not documented
NAMES = [
    ("flwr.supercore.inflatable.inflatable_utils", "pull_objects", "size_guard replaces it"),
    ("flwr.superlink.grid.http_grid", "pull_objects", "size_guard replaces it at the hub"),
    ("flwr.supercore.constant", "HEAD_BODY_DIVIDER", "size_guard reads heads of objects"),
    ("flwr.supercore.inflatable.inflatable_object", "get_object_body", "size_guard reads arrays"),
    ("flwr.supercore.inflatable.inflatable_object", "get_object_head_values_from_object_content", "size_guard"),
    ("flwr.supernode.cli.flwr_clientapp", "flwr_clientapp", "client_app.main calls it"),
    ("flwr.supernode.runtime.run_clientapp", "install_from_fab", "client_app replaces it: no shipped code"),
    ("flwr.supernode.runtime.run_clientapp", "install_app_dependencies", "client_app replaces it: no packages"),
    ("flwr.supernode.runtime.run_clientapp", "get_load_client_app_fn", "client_app replaces it: no shipped code"),
    ("flwr.supercore.task_identity", "TaskIdentity", "the tests set it"),
    *(("flwr.serverapp", f"Grid.{name}", "engine") for name in ("get_nodes", "push_messages", "pull_messages")),
]

OPTIONS = sorted(set(re.findall(r'"(--[a-z-]+)"', inspect.getsource(hub) + inspect.getsource(site))))
VARIABLES = sorted(set(re.findall(r'"(FLWR_\w+)"', inspect.getsource(programs))))


@pytest.mark.parametrize(("module", "name", "use"), NAMES)
def test_flower_has(module: str, name: str, use: str) -> None:
    """And calls what weft replaces: a replacement that nobody calls protects nothing."""
    found = importlib.import_module(module)
    assert functools.reduce(getattr, name.split("."), found), f"flwr has no {module}.{name}: {use}"
    if "replaces" in use:
        calls = inspect.getsource(found).replace(f"def {name}(", "")
        assert f"{name}(" in calls, f"{module} does not call {name} any more: {use}"


def test_a_site_pulls_objects_through_the_guarded_module() -> None:
    users = [name for name, text in SOURCE.items() if "pull_objects" in text and "supernode" in name]
    for name in users:
        assert "import pull_objects" not in SOURCE[name], f"{name} imports pull_objects by name: guard it there too"


def test_a_missing_name_is_an_import_error() -> None:
    with pytest.raises(ImportError, match=r"weft\.flower\.engine has no nothing.*flwr==1\.41\.0"):
        size_guard.patch(engine, nothing=None)


def test_pull_objects_has_the_arguments_that_the_guard_passes() -> None:
    arguments = inspect.signature(size_guard._PULL).parameters  # Flower's: other tests install the guard
    assert {"object_ids", "pull_object_fn", "max_time"} <= arguments.keys(), f"pull_objects has {list(arguments)}"


@pytest.mark.usefixtures("quick")
def test_an_array_lists_its_chunks_by_index() -> None:
    """The guard computes the size of an array from this list."""
    array = Array(dtype="uint8", shape=(4,), stype="weft", data=b"wire")
    objects = {key: each.deflate() for key, each in (array.children or {}).items()}
    assert [size_guard._is_chunk(content) for content in objects.values()] == [True], "heads of chunks have changed"
    assert b'"arraychunk_ids"' in array.deflate(), "arrays do not list their chunks as arraychunk_ids"


@pytest.mark.usefixtures("quick")
def test_a_message_takes_a_node_a_type_and_a_lifetime() -> None:
    request = SiteRequest(b"wire", "run", "", 0)
    message = pack(request, 7, 60.0)
    assert (message.metadata.dst_node_id, message.metadata.message_type) == (7, "train.weft")
    assert unpack(message) == request


def test_the_code_of_an_unavailable_node() -> None:
    from flwr.common.constant import ErrorCode

    assert ErrorCode.NODE_UNAVAILABLE == engine.NODE_UNAVAILABLE, "the engine counts sites that are away as failures"


@pytest.mark.parametrize("sign", [*status.SIGNS, status.START, status.END])
def test_flower_logs_what_status_looks_for(sign: bytes) -> None:
    text = sign.decode()
    if text.startswith("[code: "):  # the number is formatted into the message
        text = text.removeprefix("[code: ").removesuffix("]")
    assert any(text.rstrip(":") in source for source in SOURCE.values()), f"flwr does not log {sign!r}"


@pytest.mark.parametrize("name", [*OPTIONS, *VARIABLES])
def test_flower_has_the_option_or_reads_the_variable(name: str) -> None:
    assert any(name in source for source in SOURCE.values()), f"flwr does not know {name}"

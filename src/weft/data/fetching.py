"""Downloads, by pooch: each file from its mirrors in turn, whole and with the right checksum or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.data import cache, packing
from weft.data.packing import Packed
from weft.data.readers import Damaged, check_mat
from weft.data.sources import File, Source, source_of
from weft.errors import WeftError

RETRIES = 1  # of each mirror
TIMEOUT = 30  # seconds without a byte

Progress = Callable[[str], Any]  # for a file's name: what pooch tells how far it is, or False


def get(
    name: str, given: Path | None = None, *, folder: Path | None = None, progress: Progress = lambda _: False
) -> Packed:
    """Bring a dataset into the cache: download what is missing, read it, pack it, and let the originals go.

    `folder` is a user's own copy: pictures by person for FaceScrub, the original files by name for the others.
    """
    source = source_of(name)
    if any(file.name.endswith(".mat") for file in source.files):
        check_mat()
    if not source.files:
        if folder is None:
            raise WeftError(
                f"{name} has no public home; weft data get {name} --from FOLDER reads it from your own copy"
            )
        packed = packing.pack_people(folder)
    else:
        files = _own(source, folder) if folder is not None else _download(source, given, progress)
        packed = _pack(source, files, given)
        if folder is None:
            _record(source, files, given)
    cache.write(given, name, packed.arrays)
    if folder is None:
        shutil.rmtree(downloads(name, given), ignore_errors=True)
    return packed


def downloads(name: str, given: Path | None = None) -> Path:
    """Where original files wait until they are packed; a file that a user puts there is not downloaded."""
    return cache.folder(given) / "downloads" / name


def _command(source: Source, given: Path | None) -> str:
    """The command that brings it into the same cache; what WEFT_DATA names needs no word."""
    return shlex.join(["weft", "data", "get", source.name, *(["--data-dir", str(given)] if given is not None else [])])


def _pack(source: Source, files: dict[str, Path], given: Path | None) -> Packed:
    try:
        return packing.pack(source.name, files)
    except Damaged as damage:
        where = sorted({str(path.parent) for path in files.values()})[0]
        raise WeftError(
            f"the files of {source.name} in {where} cannot be read: {damage}; "
            f"remove them and {_command(source, given)} brings them again"
        ) from None


def _own(source: Source, folder: Path) -> dict[str, Path]:
    """The original files from a user's folder; a known checksum holds for them too."""
    found = {}
    for file in source.files:
        path = folder / file.name
        if not path.is_file():
            raise WeftError(f"{path} is not there; --from names a folder with {_names(source)}")
        if file.md5 is not None and digest(path, "md5") != file.md5:
            raise WeftError(f"{path} has a wrong checksum (md5 is not {file.md5}); it is half a file or another one")
        found[file.name] = path
    return found


def _download(source: Source, given: Path | None, progress: Progress) -> dict[str, Path]:
    recorded = read_checksums(given)
    folder = downloads(source.name, given)
    found = {}
    for file in source.files:
        known = f"md5:{file.md5}" if file.md5 else recorded.get(_key(source, file))
        found[file.name] = fetch(source, file, folder, known, given, progress(file.name))
    return found


def _record(source: Source, files: Mapping[str, Path], given: Path | None) -> None:
    """Checksums that nobody has published hold from now on: these files were read, so they are no error page."""
    recorded = read_checksums(given)
    unknown = [file for file in source.files if file.md5 is None and _key(source, file) not in recorded]
    if unknown:
        new = {_key(source, file): f"sha256:{digest(files[file.name], 'sha256')}" for file in unknown}
        _write_checksums(given, {**read_checksums(given), **new})


def _key(source: Source, file: File) -> str:
    return f"{source.name}/{file.name}"


def fetch(source: Source, file: File, folder: Path, known: str | None, given: Path | None, progress: Any) -> Path:
    import pooch

    pooch.get_logger().setLevel("ERROR")
    said: list[tuple[str, str]] = []
    for url in file.urls:
        keeper = pooch.create(folder, "", registry={file.name: known}, urls={file.name: url}, retry_if_failed=RETRIES)
        downloader = pooch.HTTPDownloader(progressbar=progress, timeout=TIMEOUT)
        try:
            return Path(keeper.fetch(file.name, downloader=downloader))
        except (ValueError, OSError) as error:  # a wrong checksum; what requests raises is an OSError
            reason = explain(error)
            if reason is None:
                raise WeftError(f"{folder / file.name} cannot be written ({error}); try another --data-dir") from None
            said.append((urllib.parse.urlsplit(url).netloc, reason))
    raise WeftError(_failed(source, file, folder, said, file.md5 is None and known is not None, given))


def explain(error: Exception) -> str | None:
    """What went wrong with a download; None if it was the disk."""
    import requests

    if isinstance(error, requests.exceptions.HTTPError) and error.response is not None:
        return f"answered {error.response.status_code}"
    if isinstance(error, requests.exceptions.Timeout):
        return "timed out"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "stopped halfway"
    if isinstance(error, requests.exceptions.ConnectionError):
        return "no connection" if "IncompleteRead" not in str(error) else "stopped halfway"
    if isinstance(error, requests.exceptions.RequestException):
        return f"failed: {error}"
    return "wrong checksum" if isinstance(error, ValueError) else None


def _failed(
    source: Source, file: File, folder: Path, said: list[tuple[str, str]], was_recorded: bool, given: Path | None
) -> str:
    reasons = ", ".join(f"{host}: {reason}" for host, reason in said)
    command = _command(source, given)
    text = f"{file.name} of {source.name} was not brought ({reasons}); "
    if (folder / file.name).exists():  # pooch puts there only what is whole
        text += f"the one in {folder} has a wrong checksum, it is half a file or another one; "
    if all(reason == "no connection" for _, reason in said):
        return text + (
            f"with a network, {command} tries again; without one, put what {file.urls[0]} has into {folder}, "
            "or name your copy with --from FOLDER"
        )
    if was_recorded and any(reason == "wrong checksum" for _, reason in said):
        own = checksums_file(given)
        return (
            text + f"the checksum is that of the first download, in {own}: if the source has changed, remove its line"
        )
    return text + f"{command} tries again"


def _names(source: Source) -> str:
    return ", ".join(file.name for file in source.files)


def checksums_file(given: Path | None = None) -> Path:
    return cache.folder(given) / "checksums.json"


def read_checksums(given: Path | None = None) -> dict[str, str]:
    """The checksums that were recorded at a first download, because no published one is known."""
    path = checksums_file(given)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise ValueError
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise WeftError(f"{path} cannot be read; remove it, and checksums are recorded anew") from None
    return found


def _write_checksums(given: Path | None, checksums: dict[str, str]) -> None:
    path = checksums_file(given)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(json.dumps(checksums, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise WeftError(f"{path} cannot be written ({error.strerror}); choose another place with --data-dir") from None


def digest(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()

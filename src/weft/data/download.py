"""`weft data get`: download a dataset with pooch, read its original files and write it to the cache.

Each file is tried at its mirrors in order, and kept only if it is complete and its checksum is right.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.data import cache, formats
from weft.data.formats import FormatError, Packed
from weft.data.sources import File, Source, source_of
from weft.errors import WeftError

RETRIES = 1  # per mirror
TIMEOUT = 30  # seconds without a byte

Progress = Callable[[str], Any]  # maps a file name to pooch's progress bar, or to False


def get(
    name: str, data_dir: Path | None = None, *, folder: Path | None = None, progress: Progress = lambda _: False
) -> Packed:
    """Add a dataset to the cache: download missing files, read and pack them, then delete the downloads.

    `folder` has a copy of the user instead: images by person for FaceScrub, the original files for other datasets.
    """
    source = source_of(name)
    if any(file.name.endswith(".mat") for file in source.files):
        formats.check_scipy()  # before hundreds of megabytes are downloaded
    if not source.files:
        if folder is None:
            raise WeftError(f"{name} has no public source; run weft data get {name} --from FOLDER with your copy")
        packed = formats.pack_people(folder)
    elif folder is not None:
        packed = _pack(source, _user_files(source, folder), data_dir)
    else:
        files = _download(source, data_dir, progress)
        packed = _pack(source, files, data_dir)
        _record_checksums(source, files, data_dir)
    cache.write(data_dir, name, packed.arrays)
    if folder is None:
        shutil.rmtree(downloads(name, data_dir), ignore_errors=True)
    return packed


def downloads(name: str, data_dir: Path | None = None) -> Path:
    """Folder of the original files until they are packed; a file that the user puts there is not downloaded."""
    return cache.folder(data_dir) / "downloads" / name


def _command(source: Source, data_dir: Path | None) -> str:
    """The command that adds the dataset to the same cache."""
    option = ["--data-dir", str(data_dir)] if data_dir is not None else []
    return shlex.join(["weft", "data", "get", source.name, *option])


def _pack(source: Source, files: Mapping[str, Path], data_dir: Path | None) -> Packed:
    try:
        return formats.pack(source.name, files)
    except FormatError as error:
        where = f"the files of {source.name} in {min(str(path.parent) for path in files.values())}"
        remedy = f"delete them and run {_command(source, data_dir)}"
        raise WeftError(f"{where} cannot be read: {error}; {remedy}") from None


def _user_files(source: Source, folder: Path) -> dict[str, Path]:
    """The original files in a folder of the user; published checksums are checked."""
    found = {file.name: folder / file.name for file in source.files}
    for file in source.files:
        path = found[file.name]
        if not path.is_file():
            raise WeftError(f"{path} does not exist; --from needs a folder with {', '.join(found)}")
        if file.md5 is not None and _digest(path, "md5") != file.md5:
            raise WeftError(f"{path} has a wrong checksum (expected md5 {file.md5}); download it again")
    return found


def _download(source: Source, data_dir: Path | None, progress: Progress) -> dict[str, Path]:
    recorded = read_checksums(data_dir) | {_key(source, file): f"md5:{file.md5}" for file in source.files if file.md5}
    known = {file: recorded.get(_key(source, file)) for file in source.files}
    return {file.name: _fetch(source, file, known[file], data_dir, progress(file.name)) for file in source.files}


def _fetch(source: Source, file: File, checksum: str | None, data_dir: Path | None, progress: Any) -> Path:
    import pooch

    pooch.get_logger().setLevel("ERROR")
    folder = downloads(source.name, data_dir)
    failures: dict[str, str] = {}  # by host
    for url in file.urls:
        registry, urls = {file.name: checksum}, {file.name: url}
        keeper = pooch.create(folder, "", registry=registry, urls=urls, retry_if_failed=RETRIES)
        try:
            return Path(keeper.fetch(file.name, downloader=pooch.HTTPDownloader(progressbar=progress, timeout=TIMEOUT)))
        except (ValueError, OSError) as error:  # a wrong checksum; errors of requests are OSErrors
            reason = _reason(error)
            if reason is None:
                cause = f"{folder / file.name} cannot be written ({error})"
                raise WeftError(f"{cause}; choose another --data-dir") from None
            failures[urllib.parse.urlsplit(url).netloc] = reason
    causes = ", ".join(f"{host}: {reason}" for host, reason in failures.items())
    remedy = _remedy(source, file, list(failures.values()), file.md5 is None and checksum is not None, data_dir)
    raise WeftError(f"{file.name} of {source.name} was not downloaded ({causes}); {remedy}")


def _reason(error: Exception) -> str | None:
    """Why a download failed; None if the disk is the cause."""
    import requests

    if isinstance(error, requests.exceptions.HTTPError) and error.response is not None:
        return f"HTTP status {error.response.status_code}"
    if isinstance(error, requests.exceptions.Timeout):
        return "timeout"
    if isinstance(error, requests.exceptions.ChunkedEncodingError) or "IncompleteRead" in str(error):
        return "incomplete download"
    if isinstance(error, requests.exceptions.ConnectionError):
        return "no connection"
    if isinstance(error, requests.exceptions.RequestException):
        return f"failed: {error}"
    return "wrong checksum" if isinstance(error, ValueError) else None


def _remedy(source: Source, file: File, reasons: list[str], is_recorded: bool, data_dir: Path | None) -> str:
    folder, command = downloads(source.name, data_dir), _command(source, data_dir)
    text = ""
    if (folder / file.name).exists():  # pooch stores complete files only, so this one is from the user
        text = f"the file in {folder} has a wrong checksum; "
    if all(reason == "no connection" for reason in reasons):
        return text + (
            f"connect to a network and run {command}, or put the file from {file.urls[0]} into {folder}, "
            "or use your copy with --from FOLDER"
        )
    if is_recorded and "wrong checksum" in reasons:
        text += f"the checksum is of your first download, in {checksums_file(data_dir)}: "
        return text + "if the source has changed, delete its line"
    return text + f"run {command} again"


def _key(source: Source, file: File) -> str:
    return f"{source.name}/{file.name}"


def checksums_file(data_dir: Path | None = None) -> Path:
    return cache.folder(data_dir) / "checksums.json"


def read_checksums(data_dir: Path | None = None) -> dict[str, str]:
    """Checksums recorded at the first download of files without a published checksum."""
    path = checksums_file(data_dir)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise ValueError
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise WeftError(f"{path} cannot be read; delete it, and checksums are recorded again") from None
    return found


def _record_checksums(source: Source, files: Mapping[str, Path], data_dir: Path | None) -> None:
    """Record missing checksums. Only after the files were read: an HTML error page must not be recorded."""
    recorded = read_checksums(data_dir)
    unknown = [file for file in source.files if file.md5 is None and _key(source, file) not in recorded]
    if not unknown:
        return
    new = {_key(source, file): f"sha256:{_digest(files[file.name], 'sha256')}" for file in unknown}
    with cache.atomic_file(checksums_file(data_dir)) as partial:
        partial.write_text(json.dumps(recorded | new, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()

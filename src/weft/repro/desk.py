"""Where results are kept: NAME.csv and what is made of it, written whole and under a lock, so that nothing is lost when
two processes work on one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Generic

import filelock

from weft.errors import WeftError
from weft.files import write_bytes, write_text
from weft.repro import Experiment, Row
from weft.repro.store import F, Key, Results

PATIENCE = 60.0  # seconds that another process may take to write


class Desk(Generic[F]):
    """One experiment's results in a folder; tables and figures say what is kept of a run and what is written."""

    def __init__(self, experiment: Experiment, folder: Path):
        self.experiment, self.folder = experiment, folder

    # ---- what tables and figures have of their own

    def read(self, row: Row, seed: int, folder: Path) -> F:
        """What is kept of a run that is over."""
        raise NotImplementedError

    def read_csv(self, path: Path) -> dict[Key, F]:
        raise NotImplementedError

    def csv_text(self, results: Results[F]) -> str:
        raise NotImplementedError

    def others(self, results: Results[F], more_to_come: bool) -> Mapping[str, str | bytes]:
        """The other files by what stands behind NAME; what takes long to make may wait if there is more to come."""
        raise NotImplementedError

    # ---- what they share

    @property
    def csv(self) -> Path:
        return self.path(".csv")

    def path(self, ending: str) -> Path:
        return self.folder / f"{self.experiment.stem}{ending}"

    def known(self) -> dict[Key, F]:
        return self.read_csv(self.csv)

    def check(self) -> None:
        """Can it be written? A folder where it cannot is not to be found out after hours."""
        with self._locked():
            pass

    def write(self, results: Results[F], more_to_come: bool = False) -> list[Path]:
        """All files, each whole; lines that another process has written meanwhile are kept. Says which they are."""
        with self._locked():
            results.merge(self.known())
            write_text(self.csv, self.csv_text(results))
            written = [self.csv]
            for ending, content in self.others(results, more_to_come).items():
                write_bytes(self.path(ending), content if isinstance(content, bytes) else content.encode("utf-8"))
                written.append(self.path(ending))
        return written

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.folder / f".{self.experiment.stem}.lock", timeout=PATIENCE)
            with lock:
                yield
        except filelock.Timeout:
            raise WeftError(f"another process is writing {self.csv}; wait for it or stop it") from None
        except OSError as error:
            raise WeftError(f"{self.folder} cannot be written ({error.strerror}); choose another --out") from None

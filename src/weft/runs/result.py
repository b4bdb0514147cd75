"""Result: a finished run, read from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError
from weft.lazy import np
from weft.plan import Plan
from weft.runs.folder import accuracy_matrices, read_plan, read_rows, read_summary, resume_command, tables_of

if TYPE_CHECKING:
    import pandas

WORDS = ("direction", "tensor", "metric", "class")  # columns that are no numbers


class Result:
    """What came out of a run. Every field of summary.json is an attribute: `result.accuracy`, `result.forgetting`."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        summary = read_summary(self.folder)
        if summary is None:
            raise WeftError(f"the run in {folder} is not over; {resume_command(Path(folder))} goes on with it")
        self.summary: dict[str, Any] = summary

    def __getattr__(self, name: str) -> Any:
        if name != "summary" and name in self.summary:
            return self.summary[name]
        raise AttributeError(f"a result has no {name!r}; its fields are {', '.join(self.summary)}")

    def __repr__(self) -> str:
        return f"Result({self.summary['method']}, accuracy={self.summary['accuracy']:.3f}, {str(self.folder)!r})"

    @property
    def plan(self) -> Plan:
        return read_plan(self.folder)

    @property
    def accuracy_matrix(self) -> np.ndarray:
        """(clients, tasks, tasks): entry [c, t, i] is client c's accuracy on task i after task t; NaN where i > t."""
        matrices = accuracy_matrices(self.folder)
        steps = max(len(matrix) for matrix in matrices.values())
        table = np.full((len(matrices), steps, steps), np.nan)
        for place, matrix in enumerate(matrices.values()):
            for after, row in enumerate(matrix):
                table[place, after, : len(row)] = row
        return table

    def frame(self, table: str = "accuracy") -> pandas.DataFrame:
        """A table of the run folder, `accuracy`, `ledger` or, if asked for, `metrics`, as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise WeftError("result.frame() needs pandas: pip install pandas") from None
        name = f"{table}.csv"
        tables = tables_of(self.plan)
        if name not in tables:
            raise WeftError(f"there is no table {table!r}; choose one of: {', '.join(key[:-4] for key in tables)}")
        frame = pandas.DataFrame(read_rows(self.folder, name), columns=list(tables[name]))
        return frame.apply(lambda column: column if column.name in WORDS else pandas.to_numeric(column))

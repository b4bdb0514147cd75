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

TEXT = ("direction", "tensor", "metric", "class")  # columns that are not numeric


class Result:
    """The result of a run. Every field of summary.json is an attribute: `result.accuracy`, `result.forgetting`."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        summary = read_summary(self.folder)
        if summary is None:
            raise WeftError(f"the run in {folder} is not finished; {resume_command(self.folder)} continues it")
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
        tasks = max(len(matrix) for matrix in matrices.values())
        table = np.full((len(matrices), tasks, tasks), np.nan)
        for index, matrix in enumerate(matrices.values()):
            for after, row in enumerate(matrix):
                table[index, after, : len(row)] = row
        return table

    def frame(self, table: str = "accuracy") -> pandas.DataFrame:
        """A table of the run folder as a pandas DataFrame: `accuracy`, `ledger`, or `metrics` if the plan has them."""
        try:
            import pandas
        except ImportError:
            raise WeftError("result.frame() needs pandas: pip install pandas") from None
        name, tables = f"{table}.csv", tables_of(self.plan)
        if name not in tables:
            raise WeftError(f"there is no table {table!r}; choose one of: {', '.join(key[:-4] for key in tables)}")
        frame = pandas.DataFrame(read_rows(self.folder, name), columns=list(tables[name]))
        return frame.apply(lambda column: column if column.name in TEXT else pandas.to_numeric(column))

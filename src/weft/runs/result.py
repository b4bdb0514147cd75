"""Result: a finished run, read from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError
from weft.lazy import np
from weft.plan import Plan
from weft.runs.folder import METRICS, TABLES, accuracy_matrices, read_plan, read_rows, read_summary, resume_command
from weft.runs.journal import Journal, read_rounds

if TYPE_CHECKING:
    import pandas

    from weft.methods.state import ClientState
    from weft.runs.model import ImageModel

ALL_TABLES = {**TABLES, **METRICS}
TEXT = ("direction", "tensor", "metric", "class")  # columns that are not numeric


class Result:
    """The result of a finished run, read from its folder. Every field of summary.json is an attribute."""

    accuracy: float
    accuracy_by_client: list[float]
    validation: dict[str, float | None]  # accuracy and forgetting on validation images, after the last task
    validation_accuracy: float | None  # at each task's end
    forgetting: float | None
    backward_transfer: float | None
    metrics: dict[str, float | None]  # of a plan with `metrics`
    traffic: dict[str, dict[str, int]]
    model_size_bytes: int
    model_size_paper_bytes: int
    adaptive_density: float | None
    incidents: int
    rounds_without_update: int
    seconds: float
    images_per_second: float | None

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

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.summary})

    def __repr__(self) -> str:
        return f"Result({self.summary['method']}, accuracy={self.summary['accuracy']:.3f}, {str(self.folder)!r})"

    @property
    def plan(self) -> Plan:
        return read_plan(self.folder)

    @property
    def accuracy_matrix(self) -> np.ndarray:
        """(clients, tasks, tasks): entry [c, t, i] is client c's accuracy on task i after task t; NaN where i > t."""
        return self._matrix("accuracy.csv")

    @property
    def validation_matrix(self) -> np.ndarray:
        """The same on validation images: choose by these, and report the test images."""
        return self._matrix("validation.csv")

    def _matrix(self, name: str) -> np.ndarray:
        matrices = accuracy_matrices(self.folder, name)
        tasks = max(len(matrix) for matrix in matrices.values())
        table = np.full((len(matrices), tasks, tasks), np.nan)
        for index, matrix in enumerate(matrices.values()):
            for after, row in enumerate(matrix):
                table[index, after, : len(row)] = row
        return table

    def frame(self, table: str = "accuracy") -> pandas.DataFrame:
        """A table of the run folder as a pandas DataFrame: `accuracy`, `validation`, `ledger`, or `metrics`."""
        name = f"{table}.csv"
        tables = {key: columns for key, columns in ALL_TABLES.items() if (self.folder / key).exists()}
        if name not in tables:
            raise WeftError(f"there is no table {table!r}; choose one of: {', '.join(key[:-4] for key in tables)}")
        frame = _frame(read_rows(self.folder, name), tables[name])
        return frame.apply(lambda column: column if column.name in TEXT else _pandas().to_numeric(column))

    def curves(self) -> pandas.DataFrame:
        """Each local training as a row of a pandas DataFrame: client, task, round, and what was measured after it:
        `valid_accuracy` and `valid_loss` on the validation images of the task, `train_loss`."""
        journal = Journal(self.folder)
        rounds = [one._asdict() for one in read_rounds(journal.new_events(), journal)]
        columns = ("client", "task", "round", "valid_accuracy", "valid_loss", "train_loss")
        return _frame([[one[column] for column in columns] for one in rounds], columns)

    def model(self, client: int, task: int) -> ImageModel:
        """The model of one task of one client as a torch module that takes images and returns logits."""
        from weft.runs.model import ImageModel, task_from_run

        return ImageModel(task_from_run(self.folder, client, task))

    def state(self, client: int) -> ClientState:
        """What a client remembers at the end of the run: its weights, and what its finished tasks have left."""
        from weft.runs.model import state_from_run

        return state_from_run(self.folder, client)


def load(folder: str | Path) -> Result:
    """Load the result of a finished run from its folder."""
    return Result(folder)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise WeftError("a DataFrame needs pandas: pip install pandas") from None
    return pandas


def _frame(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> pandas.DataFrame:
    return _pandas().DataFrame(rows, columns=list(columns))

"""sites: every client is a site with its own images, which no other machine can see or list.

At a site a task is a folder of images with a subfolder per class, as in the scenario `folders`. When the task is added,
its images are resized and packed into the site's folder. From then on the task is that pack: it does not change during
a run, whatever happens to the files. tasks.json lists the tasks in order. The hub knows only how many tasks the plan
has.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from weft.errors import WeftError
from weft.lazy import lazy
from weft.scenarios import Scenario, ScenarioOptions, Split, SplitName, Task

if TYPE_CHECKING:
    from weft.data import cache, images
    from weft.data.images import UserImages
    from weft.scenarios import folders
else:
    cache, images, folders = lazy("weft.data.cache"), lazy("weft.data.images"), lazy("weft.scenarios.folders")

SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")  # in the order of output
DEFAULT_BITS = 16  # of images with more than 8 bits


class Options(ScenarioOptions):
    """Images of each site, added with `weft site task add`; for `weft hub run`."""

    folder: str = ""  # of a site, which sets it in the plan that it receives; empty at the hub


@dataclass(frozen=True)
class FolderReport:
    """What a folder would be as a task."""

    images: UserImages | None
    task: Task | None
    errors: tuple[str, ...]  # it cannot be a task while there are any
    notes: tuple[str, ...] = ()
    other_files: tuple[str, ...] = ()  # not images

    @property
    def groups(self) -> int:
        """Number of groups, such as patients: folders below a class."""
        return 0 if self.images is None else len(set(self.images.group.tolist()) - {""})

    def counts(self) -> dict[str, dict[SplitName, int]]:
        """Number of images by class and split."""
        if self.task is None:
            return {}
        labels = {split: self.task.load(split).labels.tolist() for split in SPLITS}
        names = enumerate(self.task.classes)
        return {name: {split: labels[split].count(label) for split in SPLITS} for label, name in names}


PlanType = TypeVar("PlanType", bound=BaseModel)


def at_site(plan: PlanType, site: Path) -> PlanType:
    """The plan of a run with the tasks of a site, if its scenario is `sites`."""
    if getattr(plan, "scenario", "") != "sites":
        return plan
    return plan.model_copy(update={"scenario_options": {"folder": str(site)}})


def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
    assert isinstance(options, Options)
    if options.folder:
        site = Path(options.folder)
        known = tuple(_load_task(site, index) for index in range(len(listed(site))))
        return Scenario("sites", (known,) * clients)
    return Scenario("sites", (tuple(_unknown(task) for task in range(tasks)),) * clients)


def listed(site: Path) -> list[dict[str, Any]]:
    """The entries of the site's tasks, in order."""
    try:
        entries: list[dict[str, Any]] = json.loads((site / "tasks.json").read_text(encoding="utf-8"))
        return entries
    except (OSError, ValueError):
        raise WeftError(f"{site / 'tasks.json'} cannot be read; weft site join creates a site's folder") from None


def look(folder: Path, bits: int = DEFAULT_BITS) -> FolderReport:
    """Check a folder: its classes and images, and what is wrong with it. Every image is read."""
    others = tuple(images.other_files(folder)[0])
    try:
        found = images.UserImages(**images.pack(folder, bits, images.find_task(folder)))
        task = _as_task(found, bits)
    except WeftError as error:
        return FolderReport(None, None, (str(error),), other_files=others)
    errors = tuple(f"{file} cannot be read as an image" for file in found.broken.tolist())
    empty = [f"{name} has no images, so it is not a class" for name in images.empty_classes(folder)]
    report = FolderReport(found, task, errors, other_files=others)
    cells = [(name, split, count) for name, counts in report.counts().items() for split, count in counts.items()]
    absent = [f"class {name} has no {split} images; add images or groups" for name, split, count in cells if not count]
    notes = (*task.warnings, *folders.depth_notes(found, bits, "--bits"), *empty, *absent)
    return dataclasses.replace(report, notes=notes)


def save(site: Path, pack: int, report: FolderReport) -> None:
    """Pack the images of a new task into the site's folder."""
    assert report.images is not None
    cache.write(site, f"tasks/{pack}", vars(report.images), private=True)


def packs(site: Path) -> list[int]:
    """The number of each task's pack; it stays the same when tasks before it are removed."""
    return [int(entry["pack"]) for entry in listed(site)]


def _load_task(site: Path, index: int) -> Task:
    entry = listed(site)[index]
    path = site / "tasks" / f"{packs(site)[index]}.npz"
    try:
        found = images.UserImages(**cache.read_arrays(path, images.KEYS))
    except ValueError:
        images_of = f"the images of task {entry['name']} in {path}"
        raise WeftError(f"{images_of} are missing or damaged; restore the file") from None
    return dataclasses.replace(_as_task(found, entry["bits"]), name=entry["name"], group="own")


def _as_task(found: UserImages, bits: int) -> Task:
    (task,) = folders.sequence(folders.Options.model_validate({"bits": bits}), found, "", 1)
    return task


def _unknown(task: int) -> Task:
    """All that a hub knows of a site's task."""
    return Task(f"own-{task}", "own", ("?", "?"), dict.fromkeys(SPLITS, 0), (0.5,) * 3, (0.5,) * 3, _no_images)


def _no_images(split: SplitName) -> Split:
    raise WeftError("scenario=sites has no images on this machine; start it with weft hub run, and add tasks at sites")

"""sites: every client is a site with images of its own, which nobody else can see or list.

At a site (`WEFT_SITE` names its folder) a task is a folder of images with a subfolder for each class, as in the
scenario `folders`. When it is announced its images are resized and packed into the site's folder, and from then on the
task is that pack: it stays the same during a run, whatever becomes of the files. tasks.json lists the tasks in their
order. At the hub nothing is known of them but how many the plan wants.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from weft.errors import WeftError
from weft.lazy import lazy
from weft.scenarios import Part, Scenario, Split, Task

if TYPE_CHECKING:
    from weft.data import cache, own
    from weft.data.own import Pictures
    from weft.scenarios import folders
else:
    cache, own, folders = lazy("weft.data.cache"), lazy("weft.data.own"), lazy("weft.scenarios.folders")

PARTS: tuple[Part, ...] = ("train", "valid", "test")  # as they are shown
DEPTH = 16  # bits of pictures that are deeper than 8, unless it is said otherwise


class Options(BaseModel):
    """Each site's own images, announced with `weft site task add`; for `weft hub run`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True)
class Found:
    """What a folder would be as a task."""

    pictures: Pictures | None
    task: Task | None
    faults: tuple[str, ...]  # it is no task while there are any
    notes: tuple[str, ...] = ()  # what a person should know of
    others: tuple[str, ...] = ()  # files that are no images

    @property
    def groups(self) -> int:
        """Patients, or whatever else has a folder below a class."""
        return 0 if self.pictures is None else len(set(self.pictures.group.tolist()) - {""})


def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
    if site := os.environ.get("WEFT_SITE"):
        own_tasks = tuple(_task_of(Path(site), place) for place in range(len(listed(Path(site)))))
        return Scenario("sites", (own_tasks,) * clients)
    return Scenario("sites", (tuple(_unseen(step) for step in range(tasks)),) * clients)


def listed(site: Path) -> list[dict[str, Any]]:
    """The tasks that a site has announced, in order."""
    try:
        words: list[dict[str, Any]] = json.loads((site / "tasks.json").read_text(encoding="utf-8"))
        return words
    except (OSError, ValueError):
        raise WeftError(f"{site / 'tasks.json'} cannot be read; weft site join makes a site's folder") from None


def look(folder: Path, bits: int = DEPTH) -> Found:
    """Which classes and images a folder has, and what is wrong with it; every image is opened once."""
    others = tuple(own.others(folder)[0])
    try:
        pictures = own.Pictures(**own.pack(folder, bits, own.find_task(folder)))
        faults = tuple(f"{file} is no image that can be read" for file in pictures.broken.tolist())
        task = _as_task(pictures, bits)
    except WeftError as problem:
        return Found(None, None, (str(problem),), others=others)
    empty = [f"{name} is no class: there is no image in it" for name in own.empty_classes(folder)]
    notes = (*task.warnings, *folders.depth_notes(pictures, bits, "--bits"), *empty)
    return Found(pictures, task, faults, (*notes, *_thin(task)), others)


def _thin(task: Task) -> list[str]:
    labels = {part: set(task.load(part).labels.tolist()) for part in PARTS}
    return [
        f"class {name} has no image to {part} with; more images, or more groups, would give it some"
        for place, name in enumerate(task.classes)
        for part in PARTS
        if place not in labels[part]
    ]


def counted(found: Found) -> dict[str, dict[Part, int]]:
    """How many images of each class go to each part."""
    if found.task is None:
        return {}
    labels = {part: found.task.load(part).labels.tolist() for part in PARTS}
    return {name: {part: labels[part].count(place) for part in PARTS} for place, name in enumerate(found.task.classes)}


def keep(site: Path, pack: int, found: Found) -> None:
    """Pack the images of what is going to be a task into the site's folder."""
    assert found.pictures is not None
    cache.write(site, f"tasks/{pack}", vars(found.pictures))


def packs(site: Path) -> list[int]:
    """The number of each task's pack: its place when it was announced, unless tasks before it were removed since."""
    return [int(words.get("pack", place)) for place, words in enumerate(listed(site))]


def _task_of(site: Path, place: int) -> Task:
    words = listed(site)[place]
    path = site / "tasks" / f"{packs(site)[place]}.npz"
    try:
        pictures = own.Pictures(**cache.read_arrays(path, own.KEYS))
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        raise WeftError(f"the images of task {words['name']} are not in {path} any more; put them back") from None
    return dataclasses.replace(_as_task(pictures, words["bits"]), name=words["name"], group="own")


def _as_task(pictures: Pictures, bits: int) -> Task:
    (task,) = folders.sequence(folders.Options.model_validate({"bits": bits}), pictures, "", 1)
    return task


def _unseen(step: int) -> Task:
    """All that a hub knows of a site's task."""
    return Task(f"own-{step}", "own", ("?", "?"), dict.fromkeys(PARTS, 0), (0.5,) * 3, (0.5,) * 3, _nobody)


def _nobody(part: Part) -> Split:
    raise WeftError("scenario=sites has no images here; run it with weft hub run, at sites that have some")

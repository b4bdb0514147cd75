"""Compare two versions of weft bit by bit: `make bits BASE=COMMIT`.

Each tree runs the same small plans on this machine, in a separate process. For every plan the accuracies and the
values of all tensors in the last checkpoint must be equal. Tensors are compared by value, not by name: a state may be
renamed or moved to another file without notice here.

    python tests/bits.py run TREE OUT        run all plans with the package in TREE/src
    python tests/bits.py compare OLD NEW     compare two results
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

TINY = (
    "network=mlp network.hidden=8 network.features=16 scenario=glyphs scenario.train=20 scenario.valid=10 "
    "scenario.test=20 scenario.classes_per_task=2 clients=3 tasks=3 rounds_per_task=3 batch_size=10 learning_rate=3e-3 "
    "device=cpu seed=7"
)
METHODS = [
    "fedweit",
    "fedweit@paper",
    "fedweit@released",
    "apd",
    "ewc",
    "stable-sgd",
    "local",
    "fedavg",
    "fedprox",
    "scaffold",
    "fedcurv",
    "stl",
    "joint",
    "fedprox+ewc",
    "fedprox+stable-sgd",
    "fedprox+apd",
    "fedavg+ewc",
    "fedavg+apd",
]
PLANS = {
    **{f"method-{name}": f"method={name}" for name in METHODS},
    "many-clients": "clients=12 clients_per_round=3 rounds_per_task=4 method.kb_size=3",
    "async-tasks": "async=task_clocks rounds_per_task=4",
    "async-updates": "async=updates rounds_per_task=4 clock.spread=3",
    "async-updates-fedavg": "method=fedavg async=updates rounds_per_task=4 clock.spread=3 clock.jitter=0.3",
    "faults": "faults.crash=0.05 faults.drop=0.1 faults.corrupt=0.1 faults.delay=0.1 deadline=4 rounds_per_task=4",
    "faults-no-deadline": "method=fedprox faults.crash=0.1 faults.drop=0.1 faults.corrupt=0.1 clients=5",
    "quorum": "clients=6 quorum=3 deadline=2 clock.spread=4 clock.jitter=0.5 late=next",
    "quorum-drop": "method=fedavg clients=6 quorum=3 deadline=2 clock.spread=4 clock.jitter=0.5 late=drop",
    "absent": "clients=5 clock.late=3 clock.stay=4 clock.away=3 deadline=3",
    "global-model": "measured_model=global method=fedavg",
    "global-model-fedweit": "measured_model=global",
    "train-unchosen": "train_unchosen=true clients=5 clients_per_round=2",
    "median": "method=fedavg aggregation=median clients=5",
    "clip": "method=fedprox aggregation=clip clients=5",
    "some-values": "method=fedavg method.keep=0.3",
    "some-values-scaffold": "method=scaffold method.keep=0.5",
    "past-joint": "method.past=joint",
    "past-closed": "method.past=closed",
    "shared-biases": "method.biases=shared method.rows=strongest method.send=product",
    "anchored": "method.divide=anchored precision=half",
    "private-biases": "method=fedavg+ewc method.biases=private precision=int8",
    "lenet": "network=lenet scenario.train=30 tasks=2 rounds_per_task=2",
    "resnet18": "network=resnet18 clients=2 tasks=2 rounds_per_task=1 scenario.train=10 scenario.test=6",
    "metrics": "method=stl metrics=balanced,recall",
    "dropout-round-memory": "method=stable-sgd optimizer_memory=round epochs_per_round=2",
}
# how the commits before the redesign spell the same plan
OLD_WORDS = {"async=task_clocks": "async=tasks", "async=updates": "async=arrival"}


def words(plan: str, old: bool) -> list[str]:
    given: dict[str, str] = {}
    for word in f"{TINY} {PLANS[plan]}".split():
        key, _, value = word.partition("=")
        if key == "network":
            given = {name: kept for name, kept in given.items() if not name.startswith("network.")}
        given[key] = value
    if {"stable-sgd", "scaffold"} & set(given.get("method", "").split("+")):
        del given["learning_rate"]  # Adam's
    found = [f"{key}={value}" for key, value in given.items()]
    return [OLD_WORDS.get(word, word) for word in found] if old else found


def tensor_hashes(folder: Path) -> list[str]:
    """One hash for each tensor of the last checkpoint; the encoded replies kept for repetition are left out."""
    import safetensors

    found = []
    for file in sorted((folder / "checkpoints").glob("*.safetensors")):
        with safetensors.safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if name != "reply":
                    array = tensors.get_tensor(name)
                    found.append(hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest())
    return sorted(found)


def accuracies(folder: Path) -> list[list[str]]:
    with (folder / "accuracy.csv").open(encoding="utf-8", newline="") as file:
        return sorted(list(csv.reader(file))[1:])


def run_all(tree: Path, out: Path) -> None:
    """Run every plan in this process, with the package of `tree`."""
    import weft

    assert Path(weft.__file__).is_relative_to(tree), weft.__file__
    old = not (tree / "src/weft/core").exists()
    found = {}
    for plan in PLANS:
        folder = out / re.sub(r"\W", "-", plan)
        weft.run(weft.Plan.load("demo", words(plan, old)), folder)
        found[plan] = {"accuracy": accuracies(folder), "tensors": tensor_hashes(folder)}
    (out / "bits.json").write_text(json.dumps(found), encoding="utf-8")


def compare(old: Path, new: Path) -> int:
    before, after = (json.loads((folder / "bits.json").read_text(encoding="utf-8")) for folder in (old, new))
    differ = 0
    for plan in PLANS:
        missing, added = (
            Counter(one[plan]["tensors"]) - Counter(other[plan]["tensors"])
            for one, other in ((before, after), (after, before))
        )
        same = before[plan]["accuracy"] == after[plan]["accuracy"] and not missing
        differ += not same
        note = "" if before[plan]["accuracy"] == after[plan]["accuracy"] else ", accuracies differ"
        count = len(before[plan]["tensors"])
        print(
            f"{'equal ' if same else 'DIFFER'} {plan}: {count} tensors, {missing.total()} missing, "
            f"{added.total()} added{note}"
        )
    print(f"{len(PLANS) - differ} of {len(PLANS)} plans equal")
    return int(differ > 0)


if __name__ == "__main__":
    command, first, second = sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]).resolve()
    if command == "compare":
        sys.exit(compare(first, second))
    if os.environ.get("PYTHONPATH") != str(first / "src"):  # start again with the package of that tree
        environment = {**os.environ, "PYTHONPATH": str(first / "src")}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)
    second.mkdir(parents=True)
    run_all(first, second)

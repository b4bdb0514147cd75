"""What a site decides for itself: which plans and requests it accepts, what it shares, and whether it has left.

Validating a plan loads the code that it names, so `rejection` looks at the text of a plan first. The hub calls it too,
before a run starts. The bounds of a `Policy` concern what the plan was parsed to, whatever its spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import filelock
from pydantic import Field, ValidationError

from weft import methods
from weft.errors import WeftError
from weft.files import append, read_json, write_json, write_text
from weft.methods.averaging import LARGEST_JUMP
from weft.methods.method import Traits
from weft.plan import Plan, explain, flat_keys, parse
from weft.registry import StrictModel
from weft.report.text import utc
from weft.scenarios import Task

BUILT_IN = re.compile(r"[0-9a-z][0-9a-z@+-]*")  # a method or network of weft: neither a file nor a module
# none of these reads a folder that the plan names
SCENARIOS = ("sites", "glyphs", "overlapped-cifar100", "noniid-50", "noniid-35", "interference")
METRICS = ("balanced", "auroc", "recall")
# a site allocates memory by these numbers
LIMITS = {"clients": 10**5, "tasks": 10**4, "rounds_per_task": 10**6, "epochs_per_round": 10**6}
MOST_TASKS = 10**5  # of all clients together
NETWORK_LIMIT = 4096  # units of a layer, and every other number of a network
SCENARIO_LIMIT = 10**4  # images or classes of a task that is drawn
POLICY_FILE, LEAVE_FILE, LEAVE_LOCK = "policy.json", "leaving", ".leaving.lock"  # in the site's folder


def rejection(plan: Mapping[str, Any]) -> str:
    """Why a site rejects a plan, given as `weft.plan.flat_keys` of its text; empty if it accepts it."""
    if "for" in plan:
        return "it has sections for several methods; send the plan of one method"
    for key in ("method", "network"):
        if not isinstance(plan.get(key), str) or not BUILT_IN.fullmatch(plan[key]):
            return f"{key}={plan.get(key)!r}; a site runs only the methods and networks of weft"
    if plan.get("scenario", "glyphs") not in SCENARIOS:
        return f"scenario={plan['scenario']!r}; a site accepts {', '.join(SCENARIOS)}"
    if plan.get("scenario.folder"):
        return f"scenario.folder={plan['scenario.folder']!r}; a site uses its own folder"
    if plan.get("loss") is not None:
        return f"loss={plan['loss']!r}; a site runs only the losses of weft"
    metrics = plan.get("metrics") or ""
    if not isinstance(metrics, str) or not set(filter(None, metrics.split(","))) <= set(METRICS):
        return f"metrics={metrics!r}; a site accepts {', '.join(METRICS)}"
    return ""


def size_fault(plan: Plan) -> str:
    """Why a plan, as parsed, is too large for a site; empty if it is not."""
    limits = {key: (getattr(plan, key), limit) for key, limit in LIMITS.items()}
    limits["clients * tasks"] = plan.clients * plan.tasks, MOST_TASKS
    for section, options, limit in (
        ("network", plan.network_options, NETWORK_LIMIT),
        ("scenario", plan.scenario_options, SCENARIO_LIMIT),
    ):
        limits |= {f"{section}.{key}": (value, limit) for key, value in options.items() if type(value) in (int, float)}
    over = (f"{key}={value}; a site accepts {limit:,} at most" for key, (value, limit) in limits.items())
    return next((text for text, (value, limit) in zip(over, limits.values(), strict=True) if value > limit), "")


def read_plan(text: str) -> Plan:
    """A plan of the hub; checked as text first, because validating it loads the code that it names."""
    try:
        keys = flat_keys(text)
    except (ValueError, RecursionError):
        raise WeftError("the site rejects the hub's plan: it is not valid TOML") from None
    if reason := rejection(keys):
        raise WeftError(f"the site rejects the hub's plan: {reason}")
    plan = Plan.merge(keys)
    if reason := size_fault(plan):
        raise WeftError(f"the site rejects the hub's plan: {reason}")
    return plan


# ---- the site's own limits -------------------------------------------------------------------------------------------


Count = Annotated[int, Field(ge=1)]


class Policy(StrictModel):
    """What a site allows; no plan and no request can get more. docs/trust.md says what each limit prevents."""

    share: Literal["all", "nothing"] | Count = "all"  # of each A; a number of rows
    heads: Literal["never", "task-end"] = "never"  # whether rows of heads leave, with the names of classes hashed
    methods: str = "all"  # or names, separated by commas
    networks: str = "all"
    largest_batch: Count = 1000
    least_steps: Count = 4  # of the optimizer, in a round that sends anything
    least_images: Count = 5  # for training, of each class whose row leaves
    largest_jump: Annotated[float, Field(gt=0)] = LARGEST_JUMP  # of a received layer, from the site's own

    def plan_fault(self, plan: Plan) -> str:
        """Why the site does not take part in a plan; empty if it does."""
        for key, allowed, names in (
            ("method", self.methods, plan.method.partition("@")[0].split("+")),
            ("network", self.networks, [plan.network]),
        ):
            if allowed != "all" and not set(names) <= {name.strip() for name in allowed.split(",")}:
                return f"it allows {key} {allowed}, not {getattr(plan, key)}"
        if plan.batch_size > self.largest_batch:
            return f"it allows batch_size={self.largest_batch} at most, not {plan.batch_size}"
        if _shares_heads(plan) and not (_traits(plan).by_class and _traits(plan).shares_tasks == "all"):
            return f"no head leaves it in every round, as {plan.method} needs here; class-experts share at a task's end"
        if self.heads == "never" and _shares_heads(plan):
            return f"no head leaves it, which {plan.method} needs (weft site policy heads=task-end allows it)"
        return ""

    def request_fault(self, plan: Plan, ops: Iterable[str], task: Task) -> str:
        """Why the site does not do what a request asks for; empty if it does.

        A single step on all images reveals sums of them, and from a known head the number of images of each class.
        """
        steps = plan.epochs_per_round * -(-task.sizes["train"] // plan.batch_size)
        if {"upload", "share"} & set(ops) and steps < self.least_steps:
            return f"a round has {steps} steps here, at least {self.least_steps} are required (least_steps)"
        if "upload" in ops and "train" not in ops:
            return "an upload without training"
        if "share" in ops and _shares_heads(plan):
            labels = task.load("train").labels.tolist()
            if min(map(labels.count, range(len(task.classes)))) < self.least_images:
                return f"a class has fewer than {self.least_images} training images here (least_images)"
        return ""

    def limited(self, plan: Plan) -> Plan:
        """The plan, with no more of A shared than the site allows."""
        requested = plan.method_options.get("share")
        if requested is None or self.share == "all" or requested == "nothing":
            return plan
        less = self.share if self.share == "nothing" or requested == "all" else min(int(self.share), int(requested))
        return plan.model_copy(update={"method_options": {**plan.method_options, "share": less}})


def _traits(plan: Plan) -> Traits:
    return methods.class_of(plan.method).traits


def _shares_heads(plan: Plan) -> bool:
    return _traits(plan).by_class or bool(plan.method_options["heads"] == "class")


def read_policy(site: Path) -> Policy:
    path = site / POLICY_FILE
    try:
        return Policy.model_validate(read_json(path, {}))
    except (OSError, ValueError):
        raise WeftError(f"{path} is damaged; set it again with weft site policy, after removing the file") from None


def change_policy(site: Path, words: Iterable[str]) -> Policy:
    """Set some `key=value`, and store them."""
    try:
        changed = Policy.model_validate({**read_policy(site).model_dump(), **parse(words)})
    except ValidationError as error:
        raise WeftError(explain(error, Policy)) from None
    write_json(site / POLICY_FILE, changed.model_dump(exclude_defaults=True))
    return changed


# ---- leaving: the file is empty until the hub is notified, then has a line for each run ------------------------------


def leave(site: Path) -> None:
    if not has_left(site):
        write_text(site / LEAVE_FILE, "")


def has_left(site: Path) -> bool:
    return (site / LEAVE_FILE).exists()


def record_leave_notice(site: Path, run: str) -> None:
    """Record once per run that the hub is notified."""
    with filelock.FileLock(site / LEAVE_LOCK):  # requests of two runs may come at the same time
        if run not in [notice["run"] for notice in leave_notices(site)]:
            append(site / LEAVE_FILE, f"{utc()}\t{run}\n")


def leave_notices(site: Path) -> list[dict[str, str]]:
    """When (UTC) and in which runs."""
    lines = (site / LEAVE_FILE).read_text(encoding="utf-8").splitlines() if has_left(site) else []
    return [dict(zip(("when", "run"), line.split("\t"), strict=False)) for line in lines]

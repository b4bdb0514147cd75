"""The end of a task: what clients give once, tests, and what those still owe who were silent or away by then.

A client's last round of a task brings all of it (`Schedule.lesson`). What follows is for those whose last round never
came: they are asked again, at once (`close_tasks`), when they are next asked for anything (`make_up`) and when the run
is over (`settle`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.schedule import CLOSING_ATTEMPTS, Place, Visit

if TYPE_CHECKING:
    from weft.loop import Federation


def close_tasks(federation: Federation, ending: list[tuple[int, Place]]) -> None:
    """The rest of line 11 and tests, for those whose task is over and who have been asked for anything yet."""
    progress, schedule = federation.progress, federation.schedule
    ending = [(client, place) for client, place in ending if str(client) in progress.begun]
    for attempt in range(CLOSING_ATTEMPTS + 1):
        visits = [federation.closing(client, place, attempt) for client, place in ending]
        asked = _not_asked_yet(federation, federation.expected([visit for visit in visits if visit is not None]))
        if asked:  # the last ones of the run take in all that is left
            federation.exchange(asked, only=progress.round + 1 < schedule.rounds)
    for client, place in ending:
        if not federation.engine.apart:
            federation.forget(client, place.step - 1)
        for key in [key for key, visit in progress.out.items() if visit.client == client]:
            # it may still come, and nobody leaves its client alone for it
            progress.out[key] = progress.out[key]._replace(at=-1)


def make_up(federation: Federation, asked: list[Visit]) -> None:
    """What clients owe of earlier tasks than those of these visits.

    Of tasks that were over while a client was away: its A, and tests. Of those that were over before it was first
    asked, tests alone: until then it costs nothing.
    """
    for step in range(max((visit.step for visit in asked), default=0)):
        _collect(federation, [visit.client for visit in asked if step < visit.step], step)


def settle(federation: Federation) -> None:
    """All rounds are over: what is still owed by clients elsewhere, who are waited for as long as a restart takes.

    What clients of this machine owe has been made up for, wire or no wire.
    """
    engine, progress, lengths = federation.engine, federation.progress, federation.schedule.lengths
    end = engine.now() + engine.patience
    for step in range(max(map(len, lengths)) if engine.apart else 0):
        lost = engine.lost()
        begun = sorted(map(int, progress.begun))  # who was never asked for anything costs nothing
        owing = [client for client in begun if client not in lost and step < len(lengths[client])]
        if _collect(federation, owing, step, end):
            federation.listener.round_done(progress)
    progress.out.clear()


def _collect(federation: Federation, clients: list[int], step: int, end: float | None = None) -> bool:
    """Ask for what these clients owe of a task; `end`: until then, whatever the deadline. Was anybody asked?"""
    schedule = federation.schedule
    places = [(client, Place(step, 0, schedule.lengths[client][step])) for client in clients]
    gifts = [schedule.gift(client, place) for client, place in places if _owes_gift(federation, client, step)]
    asked = _ask(federation, gifts, end)
    closings = [federation.closing(client, place, CLOSING_ATTEMPTS) for client, place in places]
    return _ask(federation, [visit for visit in closings if visit is not None], end) or asked


def _owes_gift(federation: Federation, client: int, step: int) -> bool:
    """Only who is elsewhere can owe one: on one machine answers are lost for good, on purpose."""
    progress, name = federation.progress, str(client)
    gives = federation.engine.apart and federation.method.wants_gift(chosen_last=False)
    return gives and progress.met.get(name, -1) >= step and step not in progress.given.get(name, [])


def _ask(federation: Federation, debts: list[Visit], end: float | None) -> bool:
    if end is None:
        debts = _not_asked_yet(federation, debts)
    if debts:
        deadline: float | None = None  # the plan's; without one the engine's own patience ends it
        if end is not None and federation.plan.deadline != "none":
            deadline = max(0.0, end - federation.engine.now())
        federation.exchange(debts, only=True, deadline=deadline)
    return bool(debts)


def _not_asked_yet(federation: Federation, closings: list[Visit]) -> list[Visit]:
    """Without those who have not answered such a question about this task: each costs a deadline.

    A client elsewhere may still answer it. On one machine answers are lost for good, on purpose.
    """
    if not federation.engine.apart:
        return closings
    out = federation.progress.out.values()
    silent = {(visit.client, visit.step) for visit in out if federation.schedule.is_over(visit)}
    return [visit for visit in closings if (visit.client, visit.step) not in silent]

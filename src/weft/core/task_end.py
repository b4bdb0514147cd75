"""The end of a task: what clients give once, tests, and what those still owe who were silent or away by then.

A client's last round of a task brings all of it (`Schedule.lesson`). What follows is for those whose last round never
came: they are asked again, at once (`close_tasks`), when they are next asked for anything (`make_up`) and when the run
is over (`settle`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.schedule import CLOSING_ATTEMPTS, Place, Visit

if TYPE_CHECKING:
    from weft.core.loop import Federation

TURN = 10.0  # seconds after which, in the end, clients that have answered are asked for what else they owe


def close_tasks(federation: Federation, ending: list[tuple[int, Place]]) -> None:
    """The rest of line 11 and tests, for those whose task is over and who have been asked to learn anything yet."""
    progress, schedule = federation.progress, federation.schedule
    ending = [(client, place) for client, place in ending if str(client) in progress.asked]
    make_up(federation, [(client, place.step) for client, place in ending])
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


def make_up(federation: Federation, places: list[tuple[int, int]]) -> None:
    """What these clients owe of tasks before those at which they are now.

    Of tasks that were over while a client was away: its A, and tests. Of those that were over before it was first
    asked, tests alone: until then it costs nothing.
    """
    for step in range(max((step for _, step in places), default=0)):
        clients = [client for client, now in places if step < now]
        for debts in (_gifts(federation, clients, step), _closings(federation, clients, step)):
            if asked := _not_asked_yet(federation, federation.expected(debts)):
                federation.exchange(asked, only=True)


def settle(federation: Federation) -> None:
    """All rounds are over: what is still owed by clients elsewhere, who are waited for as long as a restart takes.

    One thing after another of each client, so that nobody waits for what another owes, and nothing new while an answer
    may still come. What clients of this machine owe has been made up for, wire or no wire.
    """
    engine, progress = federation.engine, federation.progress
    end, refused, asked_any = engine.now() + engine.patience, set[str](), False
    while engine.apart and (owed := _first_debts(federation, refused)):
        if (left := end - engine.now()) <= 0:
            for visit in owed:
                federation.incident(visit, "no answer about the end of its task")
            break
        asked = [visit for visit in owed if visit.client not in engine.busy()]
        for reply, visit in federation.replies(asked, min(TURN, left)):
            federation.take(reply, visit)
        asked_any = True
        refused |= {visit.request_id for visit in asked} - progress.out.keys()  # answered; if still owed, not well
    progress.out.clear()
    if asked_any:
        federation.listener.round_done(progress)


def _first_debts(federation: Federation, refused: set[str]) -> list[Visit]:
    """Of each client that may be back, what it owes of its earliest task: its A, and then tests.

    Without what it was asked and did not answer well: that would not change.
    """
    lengths, lost = federation.schedule.lengths, federation.engine.lost()
    found: dict[int, Visit] = {}
    for client in sorted(set(map(int, federation.progress.asked)) - lost):
        for step in range(len(lengths[client])):
            debts = [*_gifts(federation, [client], step), *_closings(federation, [client], step)]
            for debt in [debt for debt in debts if debt.request_id not in refused][:1]:
                found.setdefault(client, debt)
    return list(found.values())


def _gifts(federation: Federation, clients: list[int], step: int) -> list[Visit]:
    """Only who is elsewhere can owe one: on one machine answers are lost for good, on purpose."""
    progress, schedule = federation.progress, federation.schedule
    if not federation.engine.apart or not federation.method.wants_gift(chosen_last=False):
        return []
    return [
        schedule.gift(client, Place(step, 0, schedule.lengths[client][step]))
        for client in clients
        if progress.asked.get(str(client), -1) >= step and step not in progress.given.get(str(client), [])
    ]


def _closings(federation: Federation, clients: list[int], step: int) -> list[Visit]:
    lengths = federation.schedule.lengths
    places = [(client, Place(step, 0, lengths[client][step])) for client in clients]
    found = [federation.closing(client, place, CLOSING_ATTEMPTS) for client, place in places]
    return [visit for visit in found if visit is not None]


def _not_asked_yet(federation: Federation, closings: list[Visit]) -> list[Visit]:
    """Without those who have not answered such a question about this task: each costs a deadline.

    A client elsewhere may still answer it. On one machine answers are lost for good, on purpose.
    """
    if not federation.engine.apart:
        return closings
    out = federation.progress.out.values()
    silent = {(visit.client, visit.step) for visit in out if federation.schedule.is_over(visit)}
    return [visit for visit in closings if (visit.client, visit.step) not in silent]

"""The end of a task: what clients upload once, tests, and what a client still owes that was silent or away by then.

A client's last round of a task brings all of it (`Schedule.training_round`). What follows is for clients whose last
reply never arrived. It is requested again at once (`after_round`), before the next request to them (`before_round`),
and when the run is over (`after_run`).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.exchange import Exchange
from weft.core.schedule import TASK_END_ATTEMPTS, Assignment, Schedule, TaskPosition

TURN = 10.0  # seconds after which, at the end of a run, clients that have replied get requests for what else they owe


@dataclass
class TaskEnd:
    schedule: Schedule
    exchange: Exchange

    def after_round(self, ending: list[tuple[int, TaskPosition]]) -> None:
        """Tests and the rest of line 11, for clients whose task is over and that have been requested to train."""
        exchange, progress = self.exchange, self.exchange.progress
        ending = [(client, place) for client, place in ending if progress.clients[client].assigned >= 0]
        self.announce([(client, place.task) for client, place in ending])
        self._catch_up([(client, place.task) for client, place in ending])
        for attempt in range(TASK_END_ATTEMPTS + 1):
            owed = [each for client, place in ending for each in self._tests([client], place.task, attempt)]
            if requested := self._not_silent(exchange.expected(owed)):
                # the last ones of the run take in all that is left
                self._collect(requested, only=progress.round + 1 < self.schedule.rounds)
        for client, place in ending:
            if not exchange.engine.remote:
                exchange.forget(client, place.task - 1)
            for pending in progress.pending.values():
                pending.released |= pending.assignment.client == client

    def before_round(self, assignments: list[Assignment]) -> None:
        self._catch_up([(assignment.client, assignment.task) for assignment in assignments])
        self.announce([(each.client, each.task) for each in assignments if each.exchanges or "share" in each.ops])

    def announce(self, positions: list[tuple[int, int]]) -> None:
        """Request the classes of tasks that are not known yet, for methods that share by class."""
        if self.schedule.traits.by_class:
            known = self.exchange.progress.clients
            new = [
                self.schedule.announcement(*each) for each in positions if str(each[1]) not in known[each[0]].classes
            ]
            if requested := self._not_silent(self.exchange.expected(new)):
                self._collect(requested, only=True)

    def _catch_up(self, positions: list[tuple[int, int]]) -> None:
        """What these clients owe of tasks before their current ones.

        Of tasks that ended while a client was away: its knowledge, and tests. Of those that ended before it was first
        requested to train, tests alone: until then it costs nothing.
        """
        for task in range(max((task for _, task in positions), default=0)):
            clients = [client for client, now in positions if task < now]
            for owed in (self._knowledge(clients, task), self._tests(clients, task)):
                if requested := self._not_silent(self.exchange.expected(owed)):
                    self._collect(requested, only=True)

    def after_run(self) -> None:
        """All rounds are over: remote clients get as long as a restart takes for what they still owe.

        One thing after another of each client, so that no client waits for what another owes, and nothing new while a
        reply may still arrive. Clients on this machine owe nothing.
        """
        exchange, engine, progress = self.exchange, self.exchange.engine, self.exchange.progress
        end, rejected, any_requested = engine.now() + engine.patience, set[str](), False
        while engine.remote and (owed := self._first_owed(rejected)):
            if (left := end - engine.now()) <= 0:
                for assignment in owed:
                    exchange.incident(assignment, "no reply about the end of its task")
                break
            requested = [assignment for assignment in owed if assignment.client not in engine.clients().busy]
            for accepted in exchange.replies(requested, min(TURN, left)):
                exchange.note(accepted)
                exchange.aggregate([accepted], merged=False)
            any_requested = True
            # answered; if it is still owed, not well
            rejected |= {assignment.request_id for assignment in requested} - progress.pending.keys()
        progress.pending.clear()
        if any_requested:
            exchange.events.round_done(progress)

    def _collect(self, assignments: list[Assignment], only: bool) -> None:
        self.exchange.aggregate(self.exchange.collect(assignments, only=only), merged=False)

    def _first_owed(self, rejected: set[str]) -> list[Assignment]:
        """Of each client that may be back what it owes of its earliest task, without what it answered badly before."""
        gone, found = self.exchange.engine.clients().gone, []
        for client, known in enumerate(self.exchange.progress.clients):
            if known.assigned < 0 or client in gone:
                continue
            tasks = range(len(self.schedule.lengths[client]))
            owed = [each for task in tasks for each in (*self._knowledge([client], task), *self._tests([client], task))]
            found += [each for each in owed if each.request_id not in rejected][:1]
        return found

    def _knowledge(self, clients: list[int], task: int) -> list[Assignment]:
        """Only remote clients can owe it: on one machine a lost reply is lost for good, by fault injection."""
        if not self.exchange.engine.remote or self.schedule.traits.shares_tasks != "all":
            return []
        known = self.exchange.progress.clients
        return [
            self.schedule.task_knowledge(client, task)
            for client in clients
            if known[client].assigned >= task and task not in known[client].uploaded
        ]

    def _tests(self, clients: list[int], task: int, attempt: int = TASK_END_ATTEMPTS) -> list[Assignment]:
        known = self.exchange.progress.clients
        found = (self.schedule.task_end(client, task, attempt, known[client]) for client in clients)
        return [each for each in found if each is not None]

    def _not_silent(self, assignments: list[Assignment]) -> list[Assignment]:
        """Without remote clients that have not answered such a request about this task: each costs a deadline."""
        if not self.exchange.engine.remote:
            return assignments
        pending = [each.assignment for each in self.exchange.progress.pending.values()]
        silent = {(each.client, each.task) for each in pending if each.kind != "train"}
        return [each for each in assignments if (each.client, each.task) not in silent]

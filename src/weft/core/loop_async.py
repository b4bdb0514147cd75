"""Algorithm 1 without rounds (async=updates): an update is merged when it arrives, and its client trains on at once."""

from __future__ import annotations

from weft.core.exchange import staleness_weight
from weft.core.loop import Federation
from weft.core.schedule import TASK_END_ATTEMPTS, Assignment, TaskPosition
from weft.methods.averaging import Updates


class AsynchronousFederation(Federation):
    def run(self) -> None:
        exchange, progress = self.exchange, self.exchange.progress
        while not self._all_trained():
            assignments = [each for client in exchange.idle() if (each := self._next(client)) is not None]
            accepted = exchange.arrival(assignments)
            exchange.check_round([accepted] if accepted else [])
            if accepted is not None:
                pending, plan = accepted.pending, exchange.plan
                staleness = progress.version - pending.issued_version  # merges since it was requested
                usable = staleness <= int(plan.staleness_bound)
                if not usable:
                    exchange.incident(pending.assignment, f"the update is {staleness} merges old (staleness_bound)")
                merged = usable and "upload" in pending.assignment.ops
                update = exchange.update(accepted, merged)
                # in one process a fresh update replaces theta_G; at a hub it would be the word of a single site
                mix = staleness_weight(staleness, plan.staleness_exponent)
                mix /= plan.clients if exchange.engine.remote else 1
                updates = Updates([update], mix=mix, most=exchange.largest_jump)
                exchange.method.aggregate(exchange.server, updates, exchange.ctx)
                progress.version += merged
            progress.task = min(client.position[0] for client in progress.clients)
            progress.turns += 1
            exchange.events.round_done(progress)
        self.task_end.after_run()

    def _all_trained(self) -> bool:
        gone = self.exchange.engine.clients().gone
        ends = enumerate(map(len, self.schedule.lengths))
        clients = self.exchange.progress.clients
        return all(clients[client].position[0] == end or client in gone for client, end in ends)

    def _next(self, client: int) -> Assignment | None:
        """A client's next round, the end of its task, or the first round of its next one; None: all is trained."""
        known, lengths = self.exchange.progress.clients[client], self.schedule.lengths[client]
        task, round_index = known.position
        while task < len(lengths):
            rounds, found = lengths[task], None
            if self.schedule.traits.by_class and known.announced < task:  # once: without it the task goes on alone
                known.announced = task
                return self.schedule.announcement(client, task)
            if round_index < rounds:
                place, last = TaskPosition(task, round_index, rounds), round_index == rounds - 1
                found = self.schedule.training_round(client, place, self.schedule.traits.federated, last, known)
            elif (attempt := round_index - rounds) <= TASK_END_ATTEMPTS:
                found = self.schedule.task_end(client, task, attempt, known)
            known.position = [task, round_index + 1]
            if found is not None:
                return found
            self.exchange.forget(client, task)
            task, round_index = task + 1, 0
        known.position = [task, 0]
        return None

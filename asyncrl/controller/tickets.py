"""Tickets: the next problem, and its sampling seeds."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.cluster.processes import RolloutEnded
from asyncrl.config import Config
from asyncrl.controller.prompts import PromptSource
from asyncrl.records import EVALUATION_GROUP, GREEDY_GROUP, Completion, Group, Ticket
from data.problem import Problem

IDS_PER_NODE = 10**9
"""Ids of groups and tickets of node n begin at n times this."""


@dataclass
class TicketState:
    """State of a source of tickets. Issued problems are consumed, resident, put back, or dropped for good."""

    next_problem: int
    next_group: int
    last_ticket: int
    """Id of the newest ticket."""
    put_back: list[int]
    """Problems to issue again, in this order."""


class TicketSource:
    """Makes tickets. Ids and seeds depend on the run's seed and the order of calls, never on time.

    Each of `num_nodes` nodes has a source. It takes every num_nodes-th problem, and its ids are unique in the run.
    """

    def __init__(self, config: Config, prompts: PromptSource, node: int = 0, num_nodes: int = 1):
        self.config, self.prompts, self._num_nodes = config, prompts, num_nodes
        first_id = node * IDS_PER_NODE
        self.state = TicketState(node, first_id, first_id, put_back=[])
        """State that a resumed run needs."""

    def answer(self, group: Group) -> str:
        """Return the right answer to a group's problem, to show it; empty if an environment asks, or the task fails."""
        try:
            return self.prompts.train_problem(group.problem).answer
        except ValueError:
            return ""

    def next_group(self) -> tuple[int, int]:
        """Return a new group's id, and the index of its problem: one that was put back, or the next one."""
        if not self.state.put_back:
            self.state.put_back.append(self.state.next_problem)
            self.state.next_problem += self._num_nodes
        self.state.next_group += 1
        return self.state.next_group - 1, self.state.put_back.pop(0)

    def for_group(self, group_id: int, problem_index: int, min_version: int) -> list[Ticket]:
        """Make the tickets of a new group, one for each member. Raises RolloutEnded if its prompt cannot be made."""
        with _value_error_ends_rollout():
            problem = self.prompts.train_problem(problem_index)
            tokens = self.prompts.tokens_of(problem, self.config)
        return [
            self._ticket(group_id, member, problem, tokens, min_version)
            for member in range(self.config.group_size + self.config.extra_members)
        ]

    def put_back(self, problem_index: int) -> None:
        """Issue a problem again. It is not the reason why its group was dropped."""
        self.state.put_back.append(problem_index)

    def for_evaluation(self, version: int) -> list[Ticket]:
        """Make one ticket for each held-out problem, or two with --eval-greedy, to be sampled at `version`.

        Raises RolloutEnded if a prompt cannot be made.
        """
        with _value_error_ends_rollout():
            return [
                self._ticket(
                    group_id, member, problem, self.prompts.tokens_of(problem, self.config), version
                )
                for group_id in (EVALUATION_GROUP, GREEDY_GROUP)[: 1 + self.config.eval_greedy]
                for member, problem in enumerate(self.prompts.eval_problems)
            ]

    def issue_again(self, ticket: Ticket, counts_as_attempt: bool) -> Ticket:
        """Make the same ticket with a new id.

        The seed stays the same. Long responses are lost most often; a new seed would replace them by shorter ones and
        bias training. After a second death the seed is new, because the response may kill its engine.
        MAX_DEATHS of workers.py limits the deaths.
        """
        self.state.last_ticket += 1
        attempt = ticket.attempt + counts_as_attempt
        seed = ticket.seed
        if counts_as_attempt and attempt > 1:
            seed = self._seed(ticket.group_id, ticket.member, ticket.min_version, attempt)
        return replace(ticket, ticket_id=self.state.last_ticket, attempt=attempt, seed=seed)

    def continued(self, ticket: Ticket, partial: Completion) -> Ticket:
        """Make the ticket of a response that continues from its first part.

        The seed is new, because the old one sampled that part. The weights must be at least as new.
        """
        seed = self._seed_of(2, ticket.seed, len(partial.tokens))
        min_version = max(ticket.min_version, int(partial.policy_versions[-1]))
        return replace(ticket, prefix=partial, seed=seed, min_version=min_version)

    def _ticket(
        self,
        group_id: int,
        member: int,
        problem: Problem,
        tokens: tuple[int, ...],
        min_version: int,
    ) -> Ticket:
        self.state.last_ticket += 1
        return Ticket(
            ticket_id=self.state.last_ticket,
            group_id=group_id,
            member=member,
            num_members=1,
            attempt=0,
            prompt_tokens=tokens,
            answer=problem.answer,
            environment_seed=problem.environment_seed,
            seed=self._seed(group_id, member, min_version, 0),
            min_version=min_version,
        )

    def _seed(self, group_id: int, member: int, min_version: int, attempt: int) -> int:
        # evaluation problems share a group id, so the version replaces it
        stream = (
            [1, min_version, member, attempt] if group_id < 0 else [0, group_id, member, attempt]
        )
        return self._seed_of(*stream)

    def _seed_of(self, *stream: int) -> int:
        return int(np.random.SeedSequence([self.config.seed, *stream]).generate_state(1)[0]) >> 1


@contextlib.contextmanager
def _value_error_ends_rollout() -> Iterator[None]:
    """Raise RolloutEnded for a ValueError. A ValueError would blame the host whose message is handled."""
    try:
        yield
    except ValueError as error:
        raise RolloutEnded(str(error)) from error

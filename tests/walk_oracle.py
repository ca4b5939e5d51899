"""The rules of freshness, whole groups and the ledger once more: slow, obvious, and from what can be seen from outside.

Written from the rules and not from the code: it sees tickets, announcements, trajectories as they are delivered and
batches, and never asks the controller or its buffer.
"""

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field

import pytest

from asyncrl.config import MAX_SUSPENSIONS
from asyncrl.records import EVALUATION_GROUP, GREEDY_GROUP
from asyncrl.runlog.plain import encode

RESIDENT = ("running", "finished", "held")
"""States of a group that holds a place; all others say how it ended."""


@dataclass
class Known:
    """A group, as far as it can be seen."""

    problem: int
    oldest: int
    """Version that its tokens must have at least."""
    issued_at: int
    """Event in which it was issued."""
    started_at: int | None = None
    """Event in which its first ticket was given to a worker."""
    state: str = "running"
    members: dict = field(default_factory=dict)
    num_failed: int = 0

    @property
    def num_tokens(self):
        return sum(t.num_generated for t in self.members.values())


class Oracle:
    """Is told everything that happens, and raises AssertionError for what must not."""

    def __init__(self, config, num_eval_problems):
        self.config, self.num_eval_problems = config, num_eval_problems
        per_group = 1 + config.async_ratio if config.over_sampling == 1 else config.over_sampling
        self.capacity = math.floor(per_group * config.groups_per_step) + config.extra_groups
        self.num_spare = self.capacity - math.floor(
            (1 + config.async_ratio) * config.groups_per_step
        )
        """Groups that run in addition to a batch, also in the last step."""
        if config.drop_zero_variance or config.stale_policy == "drop":
            self.num_spare = self.capacity
        self.num_steps = config.steps
        """The run can get more when it is resumed."""
        self.bound = math.ceil(config.async_ratio) + config.publish_delay
        self.bound += (
            MAX_SUSPENSIONS if config.over_sampling > 1 else 0
        ) + config.swarm.refresh_lag
        self.continues_responses = config.async_ratio > 0 or config.over_sampling > 1
        """Whether a resumed run goes on from what there is of a response."""
        self.num_consumed_batches = 0
        self.announced, self.announced_trainer_version, self.num_announced = -1, -1, 0
        self.groups, self.problems, self.problem_of = {}, {}, {}
        """Groups in the order in which they were issued."""
        self.seeds = {}
        """Group, member and version of an evaluation -> sampling seed."""
        self.uses = {}
        """Sampling seed -> the only response that may have it."""
        self.closed, self.made_by = {}, {}
        self.count, self.tokens = Counter(), Counter()
        self.sums = Counter()
        """Over the groups of each fate that had a member: their number, and their means of length and of reward. Over
        single responses, trained or lost: those with a token, their tokens, and those with a reward, their rewards."""
        self.num_events = 0
        self.expected_batch, self.num_too_many = None, 0
        """The groups that the trainer is to get, and how many others have to be given up for it, and have not been."""
        self.disbelieved = None
        """Worker that is being shut out."""
        self.evaluating, self.evaluated_version, self.num_evaluations = set(), -1, 0
        self.evaluations = []
        """Those that have ended and were reported."""
        self.asked, self.asked_again = [], []
        """Versions that were published to be evaluated; those of a cut that a resumed run publishes again."""
        self.is_evaluation_due = False
        """Whether the next weights that are announced are to be evaluated."""
        self.prefixes = {}
        """Ticket -> what there was of its response when the run was resumed."""
        self.is_resuming = False
        self.is_last = self.is_longer = False
        """Whether it had made its last step at the cut, and whether it has been given some more since then."""

    def resident(self):
        return {i: group for i, group in self.groups.items() if group.state in RESIDENT}

    @property
    def oldest_to_start(self):
        """Version that the tokens of a new group must have at least."""
        lag = self.config.publish_delay
        lag += self.config.swarm.refresh_lag if self.config.listen else 0
        return max(0, self.announced_trainer_version - lag)

    # What a resumed run begins with

    def resume(self, state):
        """All that was there at the cut is in its state, and is what counts from here on."""
        assert state.published_version == self.announced
        self.is_resuming, self.problem_of, self.prefixes = True, {}, {}
        self.num_evaluations -= bool(self.evaluating)
        assert state.evaluates == bool(self.evaluating)
        self.is_evaluation_due = state.evaluates
        self.evaluating = set()
        for version in self.asked_again:
            self.asked.remove(version)
        residents = self.resident()
        assert residents.keys() == state.buffer.residents.keys()
        for group_id, group in residents.items():
            group.state = "finished" if group.state == "held" else group.state
            members = state.buffer.residents[group_id].members
            assert encode(members) == encode(group.members)
            group.members = dict(members)
            waiting = [ticket for ticket in state.queue if ticket.group_id == group_id]
            to_come = [t.member + i for t in waiting for i in range(t.num_members)]
            assert len(set(to_come)) == len(to_come) and not set(to_come) & members.keys()
            assert (group.state == "finished") == (len(members) == self.config.group_size)
            assert group.state == "running" or not waiting
            assert (
                group.state == "finished" or len(members) + len(to_come) >= self.config.group_size
            )
        for ticket in state.queue:
            assert ticket.group_id in residents

    # What is issued

    def announce(self, version, trainer_version, evaluate):
        assert not self.evaluating, "weights were announced in the middle of an evaluation"
        assert evaluate == self.is_evaluation_due, "an evaluation is left out, or made twice"
        assert (
            version >= self.announced
            and trainer_version > self.announced_trainer_version - self.is_resuming
        )
        self.is_resuming = self.is_evaluation_due = False
        self.announced, self.announced_trainer_version = version, trainer_version
        self.num_announced += 1
        if evaluate and self.num_eval_problems:
            groups = (EVALUATION_GROUP, GREEDY_GROUP)[: 1 + self.config.eval_greedy]
            self.evaluating = {
                (group_id, member)
                for group_id in groups
                for member in range(self.num_eval_problems)
            }
            self.evaluated_version = version
            self.num_evaluations += 1

    def issue(self, group_id, tickets):
        problems = {int(ticket.answer) for ticket in tickets}
        assert len(problems) == 1 and self.announced >= 0 and group_id not in self.groups
        num_left = self.config.groups_per_step * (self.num_steps - self.num_consumed_batches)
        assert num_left and len(self.resident()) < num_left + self.num_spare, "no step can use it"
        assert {ticket.min_version for ticket in tickets} == {self.oldest_to_start}
        (problem,) = problems
        assert (
            self.problems.get(problem, "put back" if problem == len(self.problems) else "unknown")
            == "put back"
        )
        self.problems[problem] = "resident"
        self.groups[group_id] = Known(problem, self.oldest_to_start, self.num_events)
        self.count["issued"] += 1

    def given(self, tickets, version):
        """A worker that has been sent `version` is given tickets."""
        for ticket in tickets:
            assert ticket.ticket_id not in self.problem_of
            self.problem_of[ticket.ticket_id] = int(ticket.answer)
            self._check_seed(ticket)
            if ticket.is_evaluation:
                assert version == ticket.min_version == self.evaluated_version
                continue
            group = self.groups[ticket.group_id]
            # Of those that start in one event, the order in which they are sent is not that in which they were chosen.
            is_first = group.started_at in (None, self.num_events)
            assert group.state == "running" and version >= (
                ticket.min_version if is_first else group.oldest
            )
            if is_first:
                group.oldest = version if group.started_at is None else min(version, group.oldest)
                group.started_at = self.num_events

    def _check_seed(self, ticket):
        """A response that was lost is sampled by the same seed: by another one a long response would become shorter.
        What it goes on from was sampled by another seed, and what is lost twice may be what kills its engine."""
        key = (ticket.group_id, ticket.member, ticket.is_evaluation and ticket.min_version)
        seed = self.seeds.setdefault(key, ticket.seed)
        num_old = 0 if ticket.prefix is None else len(ticket.prefix.tokens)
        # a greedy response draws nothing, so it may have the seed of the sampled one
        group_id = max(ticket.group_id, EVALUATION_GROUP)
        use = (group_id, *key[1:], max(ticket.attempt, 1), num_old)
        assert self.uses.setdefault(ticket.seed, use) == use, "two responses have one seed"
        if ticket.prefix is None:
            assert (ticket.seed == seed) == (ticket.attempt < 2)
        else:
            assert self.continues_responses
            self.prefixes[ticket.ticket_id] = ticket.prefix.policy_versions.tolist()

    def put_back(self, problem):
        (group_id,) = [i for i, group in self.resident().items() if group.problem == problem]
        group = self.groups[group_id]
        reason = "stale" if self.config.stale_policy == "drop" else "surplus"
        if self.disbelieved is not None:
            assert self._is_of(group, self.disbelieved), "a group of believed workers is dropped"
            reason = "shut_out"
        elif reason == "surplus":
            assert self.num_too_many > 0, "a group is given up for nothing"
            self.num_too_many -= 1
        self.problems[problem] = "put back"
        self._close(group_id, reason)

    def _is_of(self, group, worker):
        return any(member.worker == worker for member in group.members.values())

    def shut_out(self, worker):
        """A worker has been shut out: nothing of it may be trained on any more."""
        self.disbelieved = None
        waiting = [group for group in self.resident().values() if group.state != "held"]
        assert not any(self._is_of(group, worker) for group in waiting)

    def late(self, trajectory):
        """A trajectory comes back whose ticket was issued again."""
        if not trajectory.is_evaluation:
            self.tokens["generated"] += trajectory.num_generated
            self.tokens["late"] += trajectory.num_generated

    # What comes back

    def deliver(self, trajectory):
        if trajectory.num_generated:
            versions = trajectory.policy_versions[trajectory.loss_mask]
            assert versions.min() >= 0 and versions.max() <= self.announced, (
                "a token from weights not yet published"
            )
        if trajectory.is_evaluation:
            self.evaluating.remove((trajectory.group_id, trajectory.member))
            if trajectory.finish_reason != "failed":
                assert set(versions.tolist()) == {self.evaluated_version}
            return
        self.tokens["generated"] += trajectory.num_generated
        self._check_prefix(trajectory)
        self.count["responses"] += trajectory.finish_reason != "aborted"
        self.count["failed responses"] += trajectory.finish_reason == "failed"
        group = self.groups[trajectory.group_id]
        if trajectory.group_id in self.closed or trajectory.finish_reason == "failed":
            self._count_response("lost", trajectory)
        if trajectory.group_id in self.closed:
            self.tokens[self.closed[trajectory.group_id]] += trajectory.num_generated
        elif trajectory.finish_reason == "failed":
            self.tokens["failed"] += trajectory.num_generated
            group.num_failed += 1
            if group.num_failed > self.config.extra_members:
                self._close(trajectory.group_id, "failed")
        else:
            self._add(trajectory, group)

    def _check_prefix(self, trajectory):
        """A response goes on from what there was of it; under `restart`, as long as that is of the same weights."""
        prefix = self.prefixes.get(trajectory.ticket_id, [])
        versions = trajectory.policy_versions[trajectory.loss_mask].tolist()
        assert versions == sorted(versions)
        if self.config.on_update != "restart" and trajectory.finish_reason != "aborted":
            assert versions[: len(prefix)] == prefix
        assert (
            self.config.on_update != "restart"
            or len(set(versions)) < 2
            or self.config.is_multi_turn
        )

    def _add(self, trajectory, group):
        assert (
            trajectory.finish_reason in ("stop", "length")
            and trajectory.member not in group.members
        )
        assert self.problem_of[trajectory.ticket_id] == group.problem
        group.members[trajectory.member] = trajectory
        if len(group.members) < self.config.group_size:
            return
        self.count["finished"] += 1
        group.state, group.oldest = (
            "finished",
            min(t.oldest_version for t in group.members.values()),
        )
        if self.config.extra_members:
            self.closed[trajectory.group_id] = "surplus"  # what the others still bring
        if self.config.drop_zero_variance and len({t.reward for t in group.members.values()}) == 1:
            self._close(trajectory.group_id, "filtered")

    def _close(self, group_id, reason):
        group = self.groups[group_id]
        assert group.state in ("running", "finished")
        group.state = self.closed[group_id] = reason
        self.count[reason] += 1
        self.tokens[reason] += group.num_tokens
        self._measure(f"dropped_{reason}", group)
        for trajectory in group.members.values():
            self._count_response("lost", trajectory)
        if reason in ("failed", "filtered"):
            self.problems[group.problem] = reason

    def _measure(self, fate, group):
        if group.members:
            self.sums[f"measured_{fate}"] += 1
            self.sums[f"length_{fate}"] += group.num_tokens / len(group.members)
            self.sums[f"reward_{fate}"] += statistics.fmean(
                t.reward for t in group.members.values()
            )

    def _count_response(self, fate, trajectory):
        num_tokens = int(trajectory.loss_mask.sum())
        self.sums[f"responses_{fate}"] += num_tokens > 0
        self.sums[f"response_tokens_{fate}"] += num_tokens
        if trajectory.finish_reason in ("stop", "length"):
            self.sums[f"rewards_{fate}"] += 1
            self.sums[f"reward_sum_{fate}"] += trajectory.reward

    def discard(self, num_tokens):
        self.tokens["generated"] += num_tokens
        self.tokens["discarded"] += num_tokens

    # What is trained on

    def expect_batch(self):
        """The trainer is about to ask for a batch."""
        config, resident = self.config, self.resident()
        finished = [group_id for group_id, group in resident.items() if group.state == "finished"]
        finished.sort(key=lambda group_id: (resident[group_id].oldest, group_id))
        batch = finished[: config.groups_per_step]
        deadlines = [group.oldest + self.bound for i, group in resident.items() if i not in batch]
        num_too_many = 0
        if config.stale_policy == "wait":
            # Hall's theorem: up to any deadline no more groups can be consumed than the steps after this one take.
            num_too_many = max(
                sum(deadline <= last for deadline in deadlines)
                - config.groups_per_step * (last - self.num_consumed_batches)
                for last in (self.num_consumed_batches, *deadlines)
            )
        can_be = len(batch) == config.groups_per_step and num_too_many <= config.extra_groups
        self.expected_batch, self.num_too_many = (batch, num_too_many) if can_be else ([], 0)

    def check_batch(self, batch):
        """It is the expected one, or none; and no more groups were given up for it than had to be."""
        assert [group.group_id for group in batch] == self.expected_batch
        assert self.num_too_many == 0

    def hold(self, batch):
        """A batch is ready, and may still be refused."""
        self.check_batch(batch)
        self.expected_batch = None
        for group in batch:
            known = self.groups[group.group_id]
            assert {id(t) for t in group.trajectories} == {id(t) for t in known.members.values()}
            members = [t.member for t in group.trajectories]
            assert members == sorted(set(members)) and len(members) == self.config.group_size
            self._check_fresh(group)
            known.state = "held"

    def consume(self, batch):
        """The batch that is held is trained on."""
        held = {group_id for group_id, group in self.groups.items() if group.state == "held"}
        assert {group.group_id for group in batch} == held
        for group in batch:
            known = self.groups[group.group_id]
            assert group.problem == known.problem
            known.state, self.problems[known.problem] = "consumed", "consumed"
            self.made_by[group.group_id] = self.num_consumed_batches + 1
            self.count["consumed"] += 1
            self.tokens["consumed"] += known.num_tokens
            self._measure("consumed", known)
            for trajectory in group.trajectories:
                self._count_response("trained", trajectory)
        self.num_consumed_batches += 1

    def refuse(self, worker):
        """A worker is not believed, from here to `shut_out`: its groups are dropped, and a batch with one is put back.
        Returns whether the one that is held has one."""
        self.disbelieved = worker
        held = [group for group in self.groups.values() if group.state == "held"]
        is_refused = any(self._is_of(group, worker) for group in held)
        for group in held if is_refused else ():
            group.state = "finished"
        return is_refused

    def _check_fresh(self, group):
        config = self.config
        versions = {v for t in group.trajectories for v in t.policy_versions[t.loss_mask].tolist()}
        lags = {self.num_consumed_batches - version for version in versions}
        assert min(lags) >= 0
        assert config.stale_policy == "gate" or max(lags) <= self.bound, (
            f"lags {lags} at version {self.num_consumed_batches}"
        )
        if config.async_ratio == 0 and config.over_sampling == 1:
            expected = min(self.num_consumed_batches, config.publish_delay)
            assert lags == {expected} or (self.is_longer and max(lags) <= expected), (
                f"lags {lags} at α = 0"
            )

    # After every event

    def check(self):
        self.num_events += 1
        unpublished = [v for v in self.made_by.values() if v > self.announced_trainer_version]
        resident = self.resident().values()
        num_free = self.capacity - len(resident) - len(unpublished)
        assert num_free >= 0, "more groups outstanding than the capacity"
        num_left = self.config.groups_per_step * (self.num_steps - self.num_consumed_batches)
        has_enough = num_left == 0 or len(resident) >= num_left + self.num_spare
        # What the trainer is to get is consumed before engines fall asleep, which may take many events.
        is_held = any(group.state == "held" for group in resident)
        oldest_allowed = self.num_consumed_batches + is_held - self.bound
        is_too_old = self.oldest_to_start + self.bound < self.num_consumed_batches + is_held
        is_full = num_free == 0 or (is_too_old and self.config.stale_policy != "gate")
        has_no_weights = self.announced < 0 or self.is_resuming
        # With extra groups a batch that is held frees places, and groups start at the next message.
        may_wait = is_full or has_enough or self.expected_batch or is_held or has_no_weights
        assert may_wait or self.config.scheduling == "batch", "a place is free, no group is issued"
        for group in self.groups.values():
            assert group.state != "stale" or group.oldest < oldest_allowed

    def check_ledger(self, ledger):
        resident = self.resident().values()
        expected = {
            "groups_resident": len(resident),
            "tokens_resident": sum(group.num_tokens for group in resident),
            "groups_issued": self.count["issued"],
            "tokens_generated": self.tokens["generated"],
        }
        fates = ("stale", "filtered", "failed", "surplus", "discarded", "late", "shut_out")
        names = {"consumed": "consumed"} | {f"dropped_{reason}": reason for reason in fates}
        for name, fate in names.items():
            expected |= {f"groups_{name}": self.count[fate], f"tokens_{name}": self.tokens[fate]}
        expected = Counter(expected | self.sums)
        for name in ledger.keys() | expected.keys():
            assert ledger[name] == pytest.approx(expected[name], abs=1e-9), name

    def check_failures(self, failures):
        """Groups and responses that ended, those before a resume included, and those that failed."""
        count = self.count
        assert failures.num_groups == count["finished"] + count["failed"]
        assert failures.num_failed_groups == count["failed"]
        assert failures.num_responses == count["responses"]
        assert failures.num_failed == count["failed responses"]

    def check_end(self, ledger, put_back):
        """`put_back`: problems that wait to be issued again."""
        self.check_ledger(ledger)
        num_asked = self.num_eval_problems * (1 + self.config.eval_greedy)
        answered = [len(evaluation.trajectories) for evaluation in self.evaluations]
        assert not self.evaluating and answered == [num_asked] * self.num_evaluations
        evaluated = [evaluation.version for evaluation in self.evaluations]
        assert evaluated == (self.asked if num_asked else []), "an evaluation is lost at a cut"
        assert sorted(self.problems) == list(range(len(self.problems)))
        missing = [problem for problem, state in self.problems.items() if state == "put back"]
        assert sorted(put_back) == sorted(missing)


def watch_tickets(tickets, oracle):
    """Return a source of tickets, whose calls the oracle sees from here on."""
    for_group, put_back = tickets.for_group, tickets.put_back

    def issue(group_id, problem_index, min_version):
        made = for_group(group_id, problem_index, min_version)
        oracle.issue(group_id, made)
        return made

    def put_back_problem(problem_index):
        put_back(problem_index)
        oracle.put_back(problem_index)

    tickets.for_group, tickets.put_back = issue, put_back_problem
    return tickets

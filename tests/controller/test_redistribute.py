"""The state of rollout: taken, written, read, and gone on with, by as many nodes or by others."""

import copy
import random
from collections import Counter

import numpy as np
import pytest

from asyncrl.config import Config
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.cut import ControllerState
from asyncrl.controller.evaluation import Evaluation
from asyncrl.controller.ledger import DROP_REASONS
from asyncrl.controller.tickets import IDS_PER_NODE, PromptSource, TicketSource, TicketState
from asyncrl.records import Completion, Trajectory
from asyncrl.runlog.plain import decode, encode
from data.problem import Problem
from extras.redistribute import redistribute

PROMPTS = PromptSource(lambda index: Problem("", str(index)), [], lambda problem: [2])


def trajectory(ticket, version, num_tokens=2, finish_reason="stop"):
    versions = np.array([-1] + [version] * num_tokens, np.int32)
    mask = versions >= 0
    zeros = np.zeros(num_tokens + 1, np.float32)
    return Trajectory(
        ticket.ticket_id, ticket.group_id, ticket.member, np.arange(num_tokens + 1), mask, zeros, versions, -1.0,
        finish_reason, "", 1, 0.0, 1.0, 0,
    )  # fmt: skip


class Rollout:
    """One node's buffer and source of tickets, and tickets that run; a step at a time, without workers."""

    def __init__(self, config, node=0, num_nodes=1, state=None):
        self.config, self.node = config, node
        self.buffer = SampleBuffer(config.of_node(num_nodes))
        self.tickets = TicketSource(config, PROMPTS, node, num_nodes)
        self.running, self.consumed, self.dropped = [], [], []
        if state is not None:
            self.buffer.restore(state.buffer)
            self.tickets.state = state.tickets
            self.running = list(state.queue)
        self.fill()

    def fill(self):
        while self.buffer.num_free_places() > 0:
            group_id, problem = self.tickets.next_group()
            min_version = self.buffer.admit(group_id, problem)
            self.running += self.tickets.for_group(group_id, problem, min_version)

    def finish(self, ticket):
        self.running.remove(ticket)
        self.buffer.start(ticket.group_id, self.buffer.oldest_to_start)
        version = self.buffer.min_version(ticket.group_id)
        self.buffer.add(trajectory(ticket, version))

    def finish_all(self):
        for ticket in list(self.running):
            self.finish(ticket)

    def drop(self, group_id, reason):
        problem = self.buffer.drop(group_id, reason)
        self.running = [ticket for ticket in self.running if ticket.group_id != group_id]
        if reason in ("stale", "aborted"):
            self.tickets.put_back(problem)
        else:
            self.dropped.append(problem)
        self.fill()

    def take(self):
        batch = self.buffer.find_batch()
        if batch is None:
            return None
        groups = self.buffer.consume(batch)
        self.consumed += [group.problem for group in groups]
        return groups

    def publish(self):
        self.buffer.publish(self.buffer.trainer_version)
        self.fill()

    def state(self, evaluates=False):
        evaluations = [Evaluation(3, 1, [])] if evaluates else []
        state = ControllerState(
            self.buffer.state(),
            self.tickets.state,
            list(self.running),
            0,
            evaluates,
            evaluations,
            self.node + 1,
            {},
        )
        return decode(ControllerState, encode(state))

    @property
    def resident(self):
        return [resident.problem for resident in self.buffer.state().residents.values()]


def config_of(**options):
    return Config(
        **{
            "groups_per_step": 12,
            "group_size": 2,
            "async_ratio": 1.5,
            "num_rollout_workers": 1,
            **options,
        }
    )


def random_nodes(rng, config, num_nodes, states=None, max_steps=3):
    """Nodes of a run after some steps, which all take together; of each as much has come as chance has it."""
    states = states or [None] * num_nodes
    nodes = [Rollout(config, node, num_nodes, state) for node, state in enumerate(states)]
    for _ in range(rng.randint(0, max_steps)):
        for node in nodes:
            for _ in range(rng.randint(0, 3)):
                running = [ticket.group_id for ticket in node.running]
                if running:
                    node.drop(
                        rng.choice(running), rng.choice(["aborted", "stale", "failed", "filtered"])
                    )
            for ticket in rng.sample(node.running, rng.randint(0, len(node.running))):
                node.finish(ticket)
            if node.take() is None:
                node.finish_all()
                assert node.take() is not None
        for node in nodes:
            node.publish()
    for node in nodes:
        for ticket in rng.sample(node.running, rng.randint(0, len(node.running))):
            node.finish(ticket)
    return nodes


def totals(states):
    """The run's ledger, from those of its nodes, each of which balances."""
    total = Counter()
    for state in states:
        buffer = SampleBuffer(config_of())
        buffer.restore(copy.deepcopy(state.buffer))
        total.update(buffer.balance())
    return {name: count for name, count in total.items() if count}


def check_no_problem_lost(states, nodes_before, history):
    """Of those up to the frontier each is in one place: done, resident or put back; all others are to come."""
    done = [
        problem for node in nodes_before for problem in (*node.consumed, *node.dropped)
    ] + history
    resident = [r.problem for state in states for r in state.buffer.residents.values()]
    put_back = [problem for state in states for problem in state.tickets.put_back]
    frontier = min(state.tickets.next_problem for state in states)
    found = Counter(done + resident + put_back)
    to_come = {
        p for node, s in enumerate(states) for p in range(s.tickets.next_problem, 500, len(states))
    }
    assert set(found.values()) <= {1}, "a problem is there twice"
    assert not found.keys() & to_come and found.keys() | to_come == set(range(500)), (
        "a problem is lost"
    )
    assert frontier <= 500
    return done


@pytest.mark.parametrize("seed", range(60))
def test_dealt_out_to_other_nodes_no_problem_is_lost_and_none_is_there_twice(seed):
    """Three times in a row, from 1 to 4 nodes to 1 to 4, with some steps between."""
    rng, config, history = random.Random(seed), config_of(), []
    states, num_nodes, seen = None, rng.randint(1, 4), set()
    for _ in range(3):
        nodes = random_nodes(rng, config, num_nodes, states)
        before = [node.state(evaluates=node.node == 0) for node in nodes]
        num_nodes = rng.randint(1, 4)
        states = redistribute(copy.deepcopy(before), num_nodes)
        assert len(states) == num_nodes
        history = check_no_problem_lost(states, nodes, history)
        assert totals(states) == totals(before)
        check_the_rest(before, states)
        seen |= {("group", ticket.group_id) for node in nodes for ticket in node.running}
        seen |= {("ticket", ticket.ticket_id) for node in nodes for ticket in node.running}
        fresh = [
            Rollout(config, node, num_nodes, copy.deepcopy(state)).tickets
            for node, state in enumerate(states)
        ]
        ids = {("group", tickets.next_group()[0]) for tickets in fresh}
        ids |= {("ticket", tickets.state.next_ticket + 1) for tickets in fresh}
        assert not seen & ids and len(ids) == 2 * num_nodes


def check_the_rest(before, states):
    residents = [
        {i: repr(r) for s in side for i, r in s.buffer.residents.items()}
        for side in (before, states)
    ]
    assert residents[0] == residents[1], "a resident group is lost, or changed"
    sizes = [len(state.buffer.residents) for state in states]
    assert max(sizes) - min(sizes) <= 1 or len(before) == len(states)
    for state in states:
        assert all(ticket.group_id in state.buffer.residents for ticket in state.queue)
    tickets = [sorted(t.ticket_id for s in side for t in s.queue) for side in (before, states)]
    assert tickets[0] == tickets[1]
    assert [state.evaluates for state in states] == [True] + [False] * (len(states) - 1)
    assert sum(len(state.evaluations) for state in states) == 1
    assert sum(s.num_restarts for s in states) == sum(s.num_restarts for s in before)


@pytest.mark.parametrize("seed", range(30))
def test_what_could_be_consumed_in_time_can_be_after_it_was_dealt_out(seed):
    """No group is trained on beyond the bound, and no batch waits for ever, whichever nodes there are then."""
    rng, config = random.Random(seed), config_of()
    before = [node.state() for node in random_nodes(rng, config, rng.randint(1, 4))]
    num_nodes = rng.choice([1, 2, 3, 4])
    nodes = [
        Rollout(config, i, num_nodes, state)
        for i, state in enumerate(redistribute(before, num_nodes))
    ]
    old = {group_id for state in before for group_id in state.buffer.residents}
    for _ in range(4):
        for node in nodes:
            node.finish_all()
            batch = node.take()  # raises for a token beyond the bound
            assert batch is not None and len(batch) == 12 // num_nodes
            old -= {group.group_id for group in batch}
        for node in nodes:
            node.publish()
    assert not old, "what was resident is consumed first"


def test_states_of_different_steps_are_refused():
    one, other = (Rollout(config_of(), node, 2).state() for node in range(2))
    other.buffer.trainer_version = 1
    with pytest.raises(RuntimeError, match=r"different trainer versions: \[0, 1\]"):
        redistribute([one, other], 1)


def test_numbers_of_nodes_that_were_gone_and_come_back_are_not_used_again():
    """Four nodes, then two, then four: node 3 had groups of which some are still there."""
    config = config_of()
    states = [Rollout(config, node, 4).state() for node in range(4)]
    first = {group_id for state in states for group_id in state.buffer.residents}
    again = redistribute(redistribute(states, 2), 4)
    new = Rollout(config, 3, 4, again[3])
    assert (
        new.tickets.next_group()[0] > 3 * IDS_PER_NODE
        and new.tickets.state.next_group - 1 not in first
    )


# Bugs that others had


def after_a_step(**options):
    """A node that has consumed a batch, with its weights published, and has finished and running groups."""
    node = Rollout(config_of(**options))
    node.finish_all()
    node.take()
    node.publish()
    for ticket in node.running[:8]:
        node.finish(ticket)
    return node


def test_the_frontier_is_what_was_consumed_and_not_what_was_handed_out():
    """NeMo-RL 3599, TRL 7274: the cursor was saved at what had been handed out, so 30 % of the data was reached."""
    before = after_a_step()
    handed_out = before.tickets.state.next_problem
    node = Rollout(before.config, state=before.state())
    while len(node.consumed) + len(before.consumed) < handed_out:
        node.finish_all()
        node.take()
        node.publish()
    assert sorted(before.consumed + node.consumed)[:handed_out] == list(range(handed_out))


def test_what_was_restored_takes_its_places_and_the_first_filling_adds_nothing_to_it():
    """verl 7759, AReaL 1345: the warm-up after a resume filled a buffer that was full."""
    state = after_a_step().state()
    node = Rollout(config_of(), state=state)
    assert (
        len(node.resident)
        == node.buffer.config.max_outstanding_groups
        == len(state.buffer.residents)
    )
    assert node.tickets.state.next_problem == state.tickets.next_problem


def test_a_step_is_not_counted_twice_where_its_version_is_published_again():
    """verl 7933."""
    before = after_a_step()
    node = Rollout(before.config, state=before.state())
    ledger = node.buffer.balance()
    node.publish()
    assert node.buffer.balance() == ledger == before.buffer.balance()
    assert (node.buffer.trainer_version, node.buffer.oldest_to_start) == (1, 1)


@pytest.mark.parametrize("policy", ["wait", "drop", "gate"])
def test_a_finished_batch_that_was_restored_is_trained_on_although_versions_moved(policy):
    """NeMo-RL 3480: a ready batch was thrown away at a resume, as its versions were not those that began."""
    before = after_a_step(stale_policy=policy)
    before.finish_all()
    finished = set(before.buffer._residents)
    node = Rollout(before.config, state=before.state())
    assert node.buffer.expired() == []
    first = node.take()
    assert {group.group_id for group in first} <= finished and len(first) == 12
    assert min(group.min_version for group in first) == 0 < node.buffer.trainer_version - 1
    node.publish()
    assert not any(node.buffer.balance()[f"groups_dropped_{reason}"] for reason in DROP_REASONS)


def test_with_every_place_taken_by_finished_groups_the_trainer_gets_them_and_the_collector_goes_on():
    """NeMo-RL 3066: after a resume the collector was ahead of what the trainer waited for, and both waited."""
    before = after_a_step()
    before.finish_all()
    node = Rollout(before.config, state=before.state())
    assert node.buffer.num_free_places() == 0 and not node.running
    for _ in range(3):
        assert node.take() is not None
        node.publish()
        node.finish_all()


# Tickets


def test_a_source_goes_on_with_the_ids_the_problems_and_the_seeds_that_it_would_have_given():
    one = TicketSource(config_of(), PROMPTS, 1, 3)
    for _ in range(3):
        one.for_group(*one.next_group(), 0)
    one.put_back(4)
    other = TicketSource(config_of(), PROMPTS, 1, 3)
    other.state = decode(TicketState, encode(one.state))
    for _ in range(3):
        group = one.next_group()
        assert other.next_group() == group
        assert one.for_group(*group, 2) == other.for_group(*group, 2)
    assert one.state == other.state


def test_a_response_that_goes_on_has_a_seed_of_its_own_each_time_and_weights_as_new_as_it_had():
    source = TicketSource(config_of(), PROMPTS)
    (ticket, _) = source.for_group(0, 0, 0)
    seeds, goes_on = {ticket.seed}, ticket
    for size in (3, 5, 9):
        versions = np.arange(size, dtype=np.int32)
        logprobs = np.zeros(size, np.float32)
        partial = Completion(list(range(size)), logprobs, versions, "aborted")
        goes_on = source.continued(goes_on, partial)
        assert (goes_on.ticket_id, goes_on.prefix, goes_on.min_version) == (
            ticket.ticket_id,
            partial,
            size - 1,
        )
        seeds.add(goes_on.seed)
    assert len(seeds) == 4

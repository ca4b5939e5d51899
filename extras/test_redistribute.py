"""The states of a run's nodes, written, read, and their problems dealt out to another number of nodes."""

import random
from collections import Counter

import pytest
from trajectories import make_trajectory

from asyncrl.config import Config
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.evaluation import Evaluation
from asyncrl.controller.prompts import PromptSource
from asyncrl.controller.snapshot import ControllerState
from asyncrl.controller.tickets import TicketSource
from asyncrl.runlog.plain import decode, encode
from data.problem import Problem
from extras.redistribute import redistribute

PROMPTS = PromptSource(lambda index: Problem("", str(index)), [], lambda problem: [2])
CONFIG = Config(groups_per_step=12, group_size=2, async_ratio=1.5, num_rollout_workers=1)


class Node:
    """One node's buffer and source of tickets, and tickets that run; a step at a time, without workers."""

    def __init__(self, node, num_nodes, issued, state=None):
        """`issued` gets the ids of all groups and tickets."""
        self.node, self.issued = node, issued
        self.buffer = SampleBuffer(CONFIG.for_node(num_nodes))
        self.tickets = TicketSource(CONFIG, PROMPTS, node, num_nodes)
        self.running, self.done = [], []
        if state is not None:
            self.buffer.restore(state.buffer)
            self.tickets.state = state.tickets
            self.running = list(state.queue)
        self.fill()

    def fill(self):
        while self.buffer.num_free_places() > 0:
            group_id, problem = self.tickets.next_group()
            min_version = self.buffer.admit(group_id, problem)
            tickets = self.tickets.for_group(group_id, problem, min_version)
            self.issued += [("group", group_id), *(("ticket", t.ticket_id) for t in tickets)]
            self.running += tickets

    def finish(self, tickets):
        for ticket in list(tickets):
            self.running.remove(ticket)
            self.buffer.note_assignment(ticket.group_id, self.buffer.admission_version)
            versions = [self.buffer.needed_version_of_group(ticket.group_id)] * 2
            self.buffer.add(make_trajectory(ticket.group_id, ticket.member, versions))

    def drop(self, group_id, reason):
        problem = self.buffer.drop(group_id, reason)
        self.running = [ticket for ticket in self.running if ticket.group_id != group_id]
        if reason in ("stale", "surplus"):
            self.tickets.put_back(problem)
        else:
            self.done.append(problem)
        self.fill()

    def step(self):
        """Make a step, for which all has to finish if nothing else does. Returns its groups."""
        if self.buffer.find_batch() is None:
            self.finish(self.running)
        # raises for a token beyond the bound
        groups = self.buffer.consume(self.buffer.find_batch())
        self.done += [group.problem for group in groups]
        self.buffer.free_consumed_places(self.buffer.num_consumed_batches)
        self.fill()
        return groups

    def state(self):
        state = ControllerState(
            self.buffer.state(),
            self.tickets.state,
            list(self.running),
            published_version=0,
            evaluates=self.node == 0,
            evaluations=[Evaluation(3, 1, [])] * (self.node == 0),
            num_restarts=self.node + 1,
        )
        return decode(ControllerState, encode(state))


def make_nodes(states, issued):
    return [Node(node, len(states), issued, state) for node, state in enumerate(states)]


def act_at_random(rng, nodes):
    """Nodes make some steps, which all take together; of each as much has come as chance has it."""
    reasons = ["surplus", "stale", "failed", "filtered"]
    num_steps = rng.randint(0, 3)
    for step in range(num_steps + 1):
        for node in nodes:
            for _ in range(rng.randint(0, 3)):
                if node.running:
                    node.drop(rng.choice(node.running).group_id, rng.choice(reasons))
            node.finish(rng.sample(node.running, rng.randint(0, len(node.running))))
            if step < num_steps:
                node.step()


def totals(states, drops):
    """The run's ledger, from those of its nodes, each of which balances; with or without all residents dropped."""
    total = Counter()
    for state in states:
        buffer = SampleBuffer(CONFIG)
        buffer.restore(state.buffer)
        for group_id in list(buffer.residents) if drops else ():
            buffer.drop(group_id, "discarded")
        total.update(buffer.balance())
    return {name: count for name, count in total.items() if count}


def check_dealt_out(before, states, done):
    """Each problem is in one place: done, put back or to come, shared evenly. What was resident is dropped."""
    numbers = [len(state.tickets.put_back) for state in states]
    assert max(numbers) - min(numbers) <= 1
    places = [done, *(state.tickets.put_back for state in states)]
    places += [range(s.tickets.next_problem, 500, len(states)) for s in states]
    assert sorted(problem for place in places for problem in place) == [*range(500)]
    assert totals(states, drops=False) == pytest.approx(totals(before, drops=True))
    assert not any(state.buffer.residents or state.queue for state in states)
    assert [state.evaluates for state in states] == [True] + [False] * (len(states) - 1)
    assert sum(len(state.evaluations) for state in states) == 1
    assert sum(s.num_restarts for s in states) == sum(s.num_restarts for s in before)


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(i, marks=pytest.mark.slow) for i in range(8, 30))]
)
def test_dealt_out_to_other_nodes_no_problem_is_lost_and_none_is_trained_on_twice(seed):
    """Three times in a row, from 1 to 4 nodes to 1 to 4, with some steps between."""
    rng = random.Random(seed)
    done, issued = [], []
    nodes = make_nodes([None] * rng.randint(1, 4), issued)
    for _ in range(3):
        act_at_random(rng, nodes)
        before = [node.state() for node in nodes]
        states = redistribute(before, rng.randint(1, 4))
        done += [problem for node in nodes for problem in node.done]
        check_dealt_out(before, states, done)
        nodes = make_nodes(states, issued)
    for node in nodes * 4:
        node.finish(node.running)
        node.step()
    done += [problem for node in nodes for problem in node.done]
    assert len(done) == len(set(done)), "a problem is trained on once"
    assert len(issued) == len(set(issued)), "no id is given twice"


def test_states_of_different_steps_are_refused():
    states = [Node(node, 2, []).state() for node in range(2)]
    states[1].buffer.num_consumed_batches = 1
    with pytest.raises(RuntimeError, match=r"different numbers of batches: \[0, 1\]"):
        redistribute(states, 1)

"""A run that is resumed on another number of nodes: how the cuts of its nodes are dealt out to them."""

from collections import Counter
from dataclasses import replace

from asyncrl.controller.failures import Failures
from asyncrl.controller.snapshot import ControllerState
from asyncrl.controller.tickets import IDS_PER_NODE, TicketState


def redistribute(states: list[ControllerState], num_nodes: int) -> list[ControllerState]:
    """Deal out the states of a run's nodes to another number of nodes. Pure.

    Resident groups go to each node in turn, oldest first. So each node has its share of every batch, and what could be
    consumed in time still can. Problems that one node had passed, and another had not reached, are put back. The first
    node keeps the totals, so each ledger balances and their sum is the run's.

    Raises RuntimeError if the states are not of one step.
    """
    versions = [state.buffer.trainer_version for state in states]
    if len(set(versions)) != 1:
        raise RuntimeError(f"states of nodes at different trainer versions: {versions}")
    whole = _merge(states)
    residents = whole.buffer.residents
    order = sorted(residents, key=lambda group_id: (residents[group_id].oldest_version, group_id))
    return [_share(whole, order, node, num_nodes) for node in range(num_nodes)]


def _merge(states: list[ControllerState]) -> ControllerState:
    """Return the state of a run of one node, which has what all nodes have."""
    frontier = max(state.tickets.next_problem for state in states)
    put_back = []
    residents = {}
    ledger = Counter()
    for state in states:
        put_back += [
            *state.tickets.put_back,
            *range(state.tickets.next_problem, frontier, len(states)),
        ]
        residents |= state.buffer.residents
        ledger.update(state.buffer.ledger)  # and not `+`, which leaves out sums below 0
    next_ids = [
        max(getattr(state.tickets, name) - node * IDS_PER_NODE for node, state in enumerate(states))
        for name in ("next_group", "next_ticket")
    ]
    return replace(
        states[0],
        buffer=replace(states[0].buffer, residents=residents, ledger=dict(ledger)),
        tickets=TicketState(frontier, *next_ids, sorted(put_back)),
        queue=[ticket for state in states for ticket in state.queue],
        evaluates=any(state.evaluates for state in states),
        evaluations=[evaluation for state in states for evaluation in state.evaluations],
        num_restarts=sum(state.num_restarts for state in states),
        failures=_sum_of([state.failures for state in states]),
        records={},
    )


def _sum_of(parts: list[Failures]) -> Failures:
    """Return the sum of what nodes counted."""
    reasons = Counter()
    for failures in parts:
        reasons.update(failures.reasons)
    return Failures(
        sum(failures.num_responses for failures in parts),
        sum(failures.num_groups for failures in parts),
        sum(failures.num_failed_groups for failures in parts),
        dict(reasons),
    )


def _share(whole: ControllerState, order: list[int], node: int, num_nodes: int) -> ControllerState:
    """Return what one of several nodes has of the state of all: every num_nodes-th group, in `order`, and problem."""
    buffer = whole.buffer
    tickets = whole.tickets
    is_first = node == 0
    residents = {group_id: buffer.residents[group_id] for group_id in order[node::num_nodes]}
    ledger = Counter(buffer.ledger if is_first else {})
    for group_id, resident in buffer.residents.items():
        if is_first == (group_id not in residents):
            # The first node counted this group, and another node counts it from now on.
            sign = -1 if is_first else 1
            ledger["groups_issued"] += sign
            ledger["tokens_generated"] += sign * resident.num_generated
    next_ids = (
        next_id + node * IDS_PER_NODE for next_id in (tickets.next_group, tickets.next_ticket)
    )
    next_problem = tickets.next_problem + (node - tickets.next_problem) % num_nodes
    return replace(
        whole,
        buffer=replace(buffer, residents=residents, ledger=dict(ledger)),
        tickets=TicketState(next_problem, *next_ids, tickets.put_back[node::num_nodes]),
        queue=[ticket for ticket in whole.queue if ticket.group_id in residents],
        evaluates=whole.evaluates and is_first,
        evaluations=whole.evaluations if is_first else [],
        num_restarts=whole.num_restarts if is_first else 0,
        failures=whole.failures if is_first else Failures(),
    )

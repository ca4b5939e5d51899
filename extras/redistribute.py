"""A run that is resumed on another number of nodes: how its problems are dealt out to them."""

from collections import Counter
from dataclasses import replace

from asyncrl.controller.failures import Failures
from asyncrl.controller.ledger import Ledger
from asyncrl.controller.snapshot import ControllerState
from asyncrl.controller.tickets import IDS_PER_NODE, TicketState


def redistribute(states: list[ControllerState], num_nodes: int) -> list[ControllerState]:
    """Deal out the problems of a run's nodes to another number of nodes. Pure.

    Resident groups are dropped as `discarded`, and their problems are put back. So are problems that one node had
    passed, and another had not reached. The first node keeps the totals, so each ledger balances and their sum is the
    run's.

    Raises RuntimeError if the states are not of one step.
    """
    num_batches = [state.buffer.num_consumed_batches for state in states]
    if len(set(num_batches)) != 1:
        raise RuntimeError(
            f"states of nodes that have consumed different numbers of batches: {num_batches}"
        )
    whole = _merge(states)
    return [_share(whole, node, num_nodes) for node in range(num_nodes)]


def _merge(states: list[ControllerState]) -> ControllerState:
    """Return the state of a run of one node. It joins the states of all nodes, without resident groups."""
    frontier = max(state.tickets.next_problem for state in states)
    put_back, ledger = [], Ledger()
    for state in states:
        put_back += state.tickets.put_back
        put_back += range(state.tickets.next_problem, frontier, len(states))
        ledger.counts.update(state.buffer.ledger)
        for resident in state.buffer.residents.values():
            put_back.append(resident.problem)
            ledger.drop("discarded", resident.members.values())
    counters = [
        max(getattr(state.tickets, name) - node * IDS_PER_NODE for node, state in enumerate(states))
        for name in ("next_group", "last_ticket")
    ]
    return replace(
        states[0],
        buffer=replace(states[0].buffer, residents={}, ledger=dict(ledger.counts)),
        tickets=TicketState(frontier, *counters, sorted(put_back)),
        queue=[],
        evaluates=any(state.evaluates for state in states),
        evaluations=[evaluation for state in states for evaluation in state.evaluations],
        num_restarts=sum(state.num_restarts for state in states),
        failures=_sum_of([state.failures for state in states]),
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


def _share(whole: ControllerState, node: int, num_nodes: int) -> ControllerState:
    """Return what one of several nodes has of the state of all: every num_nodes-th problem."""
    tickets = whole.tickets
    next_problem = tickets.next_problem + (node - tickets.next_problem) % num_nodes
    counters = (
        counter + node * IDS_PER_NODE for counter in (tickets.next_group, tickets.last_ticket)
    )
    put_back = tickets.put_back[node::num_nodes]
    share = replace(whole, tickets=TicketState(next_problem, *counters, put_back))
    if node == 0:
        return share
    return replace(
        share,
        buffer=replace(whole.buffer, ledger={}),
        evaluates=False,
        evaluations=[],
        num_restarts=0,
        failures=Failures(),
    )

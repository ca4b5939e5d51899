"""Which tickets are taken from hosts, and who gets them."""

import itertools

import pytest

from asyncrl.config import Config, SwarmOptions
from asyncrl.controller.prompts import PromptSource
from asyncrl.controller.tickets import TicketSource
from asyncrl.controller.workers import Worker
from data.problem import Problem
from extras.swarm.leases import LeasingDispatcher
from extras.swarm.remote import RemoteWorker, SwarmBuffer


class Outbox:
    """Stands in for the connection of a worker; sends nothing."""

    def send(self, message): ...


def two_hosts(kinds=(RemoteWorker, RemoteWorker), **options):
    """A dispatcher, two hosts that have had a ticket each for 1000 s, and these tickets."""
    config = Config(groups_per_step=1, group_size=2, async_ratio=0, listen="127.0.0.1:1", **options)
    hosts = [kinds[i](i, Outbox(), state="sampling", sent_version=0) for i in range(2)]
    prompts = PromptSource(lambda index: Problem("p", "a"), [], lambda problem: [2, 3])
    tickets = TicketSource(config, prompts)
    dispatcher = LeasingDispatcher(config, hosts, SwarmBuffer(config), tickets)
    dispatcher.fill()
    held = [next(iter(host.running.values())) for host in hosts]
    for host, ticket in zip(hosts, held, strict=True):
        if isinstance(host, RemoteWorker):
            host.given_at[ticket.ticket_id] -= 1000
    return dispatcher, hosts, held


def test_a_ticket_that_holds_the_batch_back_goes_to_a_full_but_much_faster_host_and_not_back():
    dispatcher, (slow, fast), (ticket, other) = two_hosts(max_running_requests=1)
    dispatcher.token_s = {0: 0.1, 1: 0.01}
    assert dispatcher.end_leases() == [ticket], "nobody is much faster than the fast one"
    again = dispatcher.tickets.issue_again(ticket, "moved")
    slow.take_back(ticket.ticket_id)
    fast.take_back(other.ticket_id)
    assert dispatcher.may_start(fast, again) and not dispatcher.may_start(slow, again)
    dispatcher.token_s[1] = 0.06
    assert dispatcher.may_start(slow, again), "what was fast is not so much faster any more"


@pytest.mark.parametrize(
    ("lease_s", "kinds", "is_over"),
    [
        (1001, (RemoteWorker, RemoteWorker), [False, False]),
        (999, (Worker, RemoteWorker), [False, True]),
    ],
    ids=["not over", "over"],
)
def test_a_ticket_whose_lease_is_over_moves_but_that_of_a_local_worker_never(
    lease_s, kinds, is_over
):
    swarm = SwarmOptions(lease_s=lease_s)
    dispatcher, hosts, held = two_hosts(kinds, max_running_requests=2, swarm=swarm)
    assert dispatcher.end_leases() == list(itertools.compress(held, is_over))
    assert [host.awaited == [] for host in hosts] == is_over

"""Which tickets are taken from hosts, and who gets them."""

from types import SimpleNamespace

import pytest

from asyncrl.config import Config, SwarmOptions
from asyncrl.controller.prompts import PromptSource
from asyncrl.controller.tickets import TicketSource
from asyncrl.controller.workers import Worker
from data.problem import Problem
from extras.swarm.leases import LeasingDispatcher
from extras.swarm.remote import RemoteWorker, SwarmBuffer


def local_and_two_hosts(**options):
    """A dispatcher, a local worker and two hosts, and a ticket of each, which they have had for 1000 s."""
    config = Config(groups_per_step=1, group_size=3, async_ratio=0, listen="127.0.0.1:1", **options)
    connection = SimpleNamespace(send=[].append)
    workers = [
        kind(i, connection, state="sampling", sent_version=0)
        for i, kind in enumerate((Worker, RemoteWorker, RemoteWorker))
    ]
    prompts = PromptSource(lambda index: Problem("p", "a"), [], lambda problem: [2, 3])
    tickets = TicketSource(config, prompts)
    dispatcher = LeasingDispatcher(config, workers, SwarmBuffer(config), tickets)
    began = dispatcher.now()
    for host in workers[1:]:
        host.now = lambda: began - 1000
    dispatcher.fill()
    return dispatcher, workers, [next(iter(worker.running.values())) for worker in workers]


def test_a_ticket_that_holds_the_batch_back_goes_to_a_full_but_much_faster_host_and_not_back():
    dispatcher, (_, slow, fast), (_, ticket, other) = local_and_two_hosts(max_running_requests=1)
    dispatcher.token_s = {1: 0.1, 2: 0.01}
    assert dispatcher.end_leases() == [ticket], "nobody is much faster than the fast one"
    again = dispatcher.tickets.issue_again(ticket, "moved")
    slow.take_back(ticket.ticket_id)
    fast.take_back(other.ticket_id)
    assert dispatcher.may_start(fast, again) and not dispatcher.may_start(slow, again)
    dispatcher.token_s[2] = 0.06
    assert dispatcher.may_start(slow, again), "what was fast is not so much faster any more"


@pytest.mark.parametrize(("lease_s", "num_kept"), [(2000, 3), (500, 1)])
def test_a_ticket_whose_lease_is_over_moves_but_that_of_a_local_worker_never(lease_s, num_kept):
    swarm = SwarmOptions(lease_s=lease_s)
    dispatcher, workers, held = local_and_two_hosts(max_running_requests=2, swarm=swarm)
    assert dispatcher.end_leases() == held[num_kept:]
    assert [ticket for worker in workers for ticket in worker.awaited] == held[:num_kept]

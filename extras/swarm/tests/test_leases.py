"""Which tickets are taken from hosts, and who gets them."""

from asyncrl.config import Config
from asyncrl.controller.tickets import PromptSource, TicketSource
from data.problem import Problem
from extras.swarm.leases import LeasingDispatcher
from extras.swarm.remote import RemoteWorker, SwarmBuffer


class Outbox:
    """Stands in for the connection of a worker; sends nothing."""

    def send(self, message): ...


def test_a_ticket_that_holds_the_batch_back_goes_to_a_full_but_much_faster_host_and_not_back():
    config = Config(
        groups_per_step=1, group_size=2, async_ratio=0, max_running_requests=1, listen="127.0.0.1:1"
    )
    slow, fast = (RemoteWorker(i, Outbox(), state="sampling", sent_version=0) for i in range(2))
    tickets = TicketSource(
        config, PromptSource(lambda index: Problem("p", "a"), [], lambda problem: [2, 3])
    )
    dispatcher = LeasingDispatcher(config, [slow, fast], SwarmBuffer(config), tickets)
    dispatcher.token_s = {0: 0.1, 1: 0.01}
    dispatcher.fill()
    held = {id(worker): next(iter(worker.running.values())) for worker in (slow, fast)}
    for worker in (slow, fast):
        worker.given_at[held[id(worker)].ticket_id] -= 1000
    assert dispatcher.end_leases() == [held[id(slow)]], "nobody is much faster than the fast one"
    again = dispatcher.tickets.elsewhere(held[id(slow)])
    assert dispatcher.may_start(fast, again) and not dispatcher.may_start(slow, again)
    dispatcher.token_s[1] = 0.06
    assert dispatcher.may_start(slow, again), "what was fast is not so much faster any more"

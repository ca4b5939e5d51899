"""Which parts a node is made of."""

import pytest

from asyncrl.cluster.cluster import Cluster
from asyncrl.config import Config
from asyncrl.controller.controller import Controller
from asyncrl.controller.tickets import TicketSource
from asyncrl.job.node import Leader, _make_tickets
from asyncrl.weights.models import resolve_model
from extras.baselines import BaselineController


@pytest.mark.parametrize("replicate_prompts", [True, False])
def test_a_group_is_one_ticket_exactly_without_replication(replicate_prompts):
    config = Config(replicate_prompts=replicate_prompts, group_size=3)
    model_path = resolve_model(config.model, config.task)
    tickets = _make_tickets(config, Cluster(), model_path).for_group(0, 0, 0)
    assert [ticket.num_members for ticket in tickets] == ([1, 1, 1] if replicate_prompts else [3])


def test_only_a_baseline_needs_the_controller_and_the_tickets_of_extras():
    assert Leader.controller_class(Config()) is Controller
    assert Leader.controller_class(Config(scheduling="batch")) is BaselineController
    config = Config()
    tickets = _make_tickets(config, Cluster(), resolve_model(config.model, config.task))
    assert type(tickets) is TicketSource

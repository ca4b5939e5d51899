"""Groups and weights between nodes of different roles, over real gloo."""

import os

import pytest
import torch
from several_nodes import NODE_OF_PROCESS, ROLES, random_groups, run_ranks, train_by_roles
from tiny_policy import assert_same_gradient, first_gradient, load, save_tiny_model

from batch import make_updates
from cluster import Cluster
from config import Config
from exchange import Route, exchange_groups, make_routes
from packing import distribute


@pytest.fixture(scope="module")
def four_nodes(tmp_path_factory):
    """What the processes of four nodes found, and their config."""
    folder = str(tmp_path_factory.mktemp("four_nodes"))
    model = save_tiny_model(os.path.join(folder, "model"))
    config = Config(model=model, algo="tis", clip_high=10.0, max_grad_norm=1e9, group_size=2, groups_per_step=6)
    assert run_ranks(train_by_roles, len(NODE_OF_PROCESS), folder, config) == [0] * len(NODE_OF_PROCESS)
    return [torch.load(os.path.join(folder, f"process_{i}.pt"), weights_only=False) for i in range(5)], config


def test_each_group_is_trained_on_once_and_in_order(four_nodes):
    found, _ = four_nodes
    assert found[1]["groups"] == [0, 1, 20] and found[2]["groups"] == [21, 30, 31]
    assert found[0]["groups"] is None and found[4]["groups"] is None


def test_the_step_is_that_of_one_node_with_all_groups(four_nodes, one_rank):
    found, config = four_nodes
    groups = [group for node in (0, 2, 3) for group in random_groups(10 * node, 2, 2, 12)]
    policy = load(config)
    expected = policy.train_step(distribute(make_updates(groups, config), 1, 100_000)[0], policy_version=12)
    for number in (1, 2, 3):
        assert found[number]["metrics"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert_same_gradient(found[number]["gradient"], first_gradient(policy))


def test_nodes_that_only_sample_get_the_new_weights_whole(four_nodes):
    found, _ = four_nodes
    for number in (0, 4):
        assert found[number]["weights"].keys() == found[1]["weights"].keys()
        assert all(torch.equal(w, found[1]["weights"][name]) for name, w in found[number]["weights"].items())
        assert (found[number]["notice"].version, found[number]["notice"].probe) == (1, ((3, 4),))


def test_roles_of_the_test_cover_every_kind_of_node():
    assert set(ROLES.values()) == {("trainer", "rollout"), ("trainer",), ("rollout",)}


@pytest.mark.parametrize("samplers", [(0,), (0, 1), (1, 2, 4)])
@pytest.mark.parametrize("trainers", [(0,), (2, 3), (0, 1, 2, 3)])
def test_routes_deal_every_group_once_and_equally(samplers, trainers):
    routes = make_routes(24, samplers, trainers)
    assert [i for route in routes for i in range(route.start, route.stop)] == list(range(24))
    for role, nodes in (("sampler", samplers), ("trainer", trainers)):
        shares = [sum(r.stop - r.start for r in routes if getattr(r, role) == node) for node in nodes]
        assert shares == [24 // len(nodes)] * len(nodes)


def test_nothing_crosses_where_all_nodes_do_both():
    assert make_routes(8, (0, 1), (0, 1)) == [Route(0, 0, 0, 4), Route(1, 1, 4, 8)]
    groups = random_groups(0, 2, 2, 8)
    assert exchange_groups(groups, 2, Cluster()) == groups

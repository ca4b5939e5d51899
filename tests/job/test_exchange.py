"""Groups and weights between nodes of different roles, over real gloo."""

import dataclasses
import os

import pytest
import torch
from ranks import run_ranks
from several_nodes import NODE_OF_PROCESS, random_groups, train_by_roles
from tiny_policy import assert_same_gradient, first_gradient, load, save_tiny_model

from cluster.cluster import Cluster
from config import Config
from job.exchange import Route, exchange_groups, make_routes
from trainer.batch import distribute, make_updates

SAMPLE_ONLY = (0, 4, 5)
"""Processes of nodes that only sample."""


@pytest.fixture(scope="module")
def five_nodes(tmp_path_factory):
    """What the processes of five nodes found, and their config."""
    folder = str(tmp_path_factory.mktemp("five_nodes"))
    model = save_tiny_model(os.path.join(folder, "model"))
    config = Config(
        model=model, algo="tis", algo_args=("clip_high=10",), max_grad_norm=1e9, group_size=2, groups_per_step=8
    )
    config = dataclasses.replace(config, publish_delay=1, steps=2, eval_every=2)
    assert run_ranks(train_by_roles, len(NODE_OF_PROCESS), folder, config) == [0] * len(NODE_OF_PROCESS)
    return [torch.load(os.path.join(folder, f"process_{i}.pt"), weights_only=False) for i in range(6)], config


def test_each_group_is_trained_on_once_and_in_order(five_nodes):
    found, _ = five_nodes
    assert found[1]["groups"] == [0, 1, 20, 21] and found[2]["groups"] == [30, 31, 40, 41]
    assert all(found[number]["groups"] is None for number in SAMPLE_ONLY)


def test_the_step_is_that_of_one_node_with_all_groups(five_nodes, one_rank):
    found, config = five_nodes
    groups = [group for node in (0, 2, 3, 4) for group in random_groups(10 * node, 2, 2, 12)]
    policy = load(config)
    expected = policy.train_step(distribute(make_updates(groups, config, step=1), 1, 100_000)[0], policy_version=12)
    for number in (1, 2, 3):
        assert found[number]["metrics"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert_same_gradient(found[number]["gradient"], first_gradient(policy))


def test_nodes_that_only_sample_get_each_version_whole_when_it_is_due(five_nodes):
    found, _ = five_nodes
    trained = found[1]["weights"]
    for number in SAMPLE_ONLY:
        notices, weights = zip(*found[number]["published"], strict=True)
        assert [(n.version, n.trainer_version) for n in notices] == [(0, 0), (0, 1), (2, 2)]
        assert [n.evaluate for n in notices] == [True, False, True]
        assert [len(n.probe) for n in notices] == [0, 4, 4] and notices[2].probe_logprobs is not None
        assert all(tensor.dtype == torch.bfloat16 for tensors in weights for tensor in tensors.values())
        assert weights[2].keys() == trained.keys()
        assert all(torch.equal(weights[2][name], w.bfloat16()) for name, w in trained.items())
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in trained)
        assert any(not torch.equal(weights[0][name], weights[2][name]) for name in trained)


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

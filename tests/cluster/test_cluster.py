import dataclasses
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from plain_trainer import record_gradients
from ranks import run_ranks
from several_nodes import TIMEOUT, groups_of_node, train_on_two_nodes
from tiny_policy import assert_same_gradient, load

from asyncrl.cluster.cluster import Cluster, form_cluster, join, wait_for_ranks
from asyncrl.cluster.node_watch import NodeWatch
from asyncrl.config import Config
from asyncrl.trainer.batch import sequences_by_minibatch
from asyncrl.trainer.splitting import distribute

CASES = {"reinforce": 1, "reinforce_baseline": 2, "grpo": 4}
"""Advantage estimator and --replicas of each run on two nodes of two ranks."""


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory, model):
    """What four real gloo ranks found, [rank][case], and the config of each case."""
    folder = str(tmp_path_factory.mktemp("two_nodes"))
    shared = Config(
        model=model,
        algo="tis",
        algo_args=("clip_high=10",),
        max_grad_norm=1e9,
        group_size=2,
        groups_per_step=6,
    )
    configs = [
        dataclasses.replace(
            shared, advantage=advantage, replicas=replicas, max_tokens_per_microbatch=48
        )
        for advantage, replicas in CASES.items()
    ]
    assert run_ranks(train_on_two_nodes, 4, folder, configs) == [0, 0, 0, 0]
    return [torch.load(os.path.join(folder, f"rank_{rank}.pt")) for rank in range(4)], configs


@pytest.mark.parametrize("case", range(len(CASES)), ids=CASES)
def test_two_nodes_give_the_gradient_and_metrics_of_one_with_any_number_of_replicas(
    two_nodes, one_rank, case
):
    found, configs = two_nodes
    alone = dataclasses.replace(configs[case], replicas=1)
    updates = sequences_by_minibatch(
        groups_of_node(0) + groups_of_node(1), alone, Cluster(), step=1
    )
    policy = load(alone)
    gradients = record_gradients(policy)
    (share,) = distribute(updates, 1, 100_000, policy.module.layout, policy.split_over_ranks)
    expected = policy.train_step(share, policy_version=12)
    of_ranks = [of_rank[case] for of_rank in found]
    whole = of_ranks[0][2]
    for metrics, (gradient,), weights, _, _ in of_ranks:
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert_same_gradient(gradient, gradients[0])
        assert all(torch.equal(weights[name], whole[name]) for name in weights)
    sizes, shares = ([of_rank[place] for of_rank in of_ranks] for place in (3, 4))
    num_parameters = sum(tensor.numel() for tensor in whole.values())
    assert sum(sizes) == configs[case].replicas * num_parameters, (
        "each rank has its share of a copy"
    )
    assert len(shares[0][0]) < len(shares[2][0]), "node 0 needs fewer micro-batches"
    num_sequences = [sum(map(sum, share)) for share in shares]
    assert sum(num_sequences[:2]) == sum(num_sequences[2:]) == 6, "no sample leaves its node"


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(
        RuntimeError, match="of 3 ranks that torchrun starts, 0, 2 did not join within 0 s"
    ):
        wait_for_ranks(dist.HashStore(), 1, 3, timeout_s=0.2, action="join")


def gather_slowly(rank: int, folder: str) -> None:
    """Gather from both nodes, the second of which is late. A signal interrupts the first one's next wait."""
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    cluster = form_cluster((rank, f"host{rank}", {}), rank, 2, store, "gloo", TIMEOUT)
    values = [os.urandom(20 << 20), b""]
    time.sleep(rank)
    gathered = cluster.gather(values[rank])
    assert [len(value) for value in gathered] == [20 << 20, 0] and gathered[rank] == values[rank]
    if rank == 0:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        with pytest.raises(InterruptedError):
            cluster.gather(values[rank])
        assert time.monotonic() - start < 2
        store.set("interrupted", "")
    store.wait(["interrupted"])
    dist.destroy_process_group()


def interrupt(number, frame):
    raise InterruptedError("stopped")


def test_leaders_gather_values_of_any_size_and_a_signal_ends_the_wait(tmp_path):
    assert run_ranks(gather_slowly, 2, str(tmp_path)) == [0, 0]


def test_a_wait_that_takes_too_long_names_the_option_and_ends_with_stacks():
    watch = NodeWatch(Cluster(), lambda: "stacks are in FILE")
    error = RuntimeError("Timed out waiting 110000ms for send operation")
    hint = "if a step or a checkpoint takes that long, raise --timeout-s"
    assert str(watch.explain(error)) == f"{error}; {hint}; stacks are in FILE"


def test_ranks_that_torchrun_has_not_started_are_a_mistake_of_the_user(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("GROUP_RANK", raising=False)
    with pytest.raises(ValueError, match=r"RANK is set without .*; start the ranks by torchrun"):
        join(Config(), "cpu")

"""Bodies of spawned ranks that are told which node each is on: no torchrun and no engine, but real gloo."""

import datetime
import os
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from plain_trainer import record_gradients
from tiny_policy import load, random_sequences, weights_of
from trajectories import make_trajectory

from asyncrl.cluster.cluster import form_cluster
from asyncrl.config import Config
from asyncrl.records import Group, Trajectory
from asyncrl.trainer.batch import share_batch
from asyncrl.trainer.sharding import own_shard

TIMEOUT = datetime.timedelta(seconds=60)
NODE_OF_RANK = [0, 0, 1, 1]


def random_groups(
    first_id: int, num: int, group_size: int, max_tokens: int, newest: int = 11
) -> list[Group]:
    """Groups of random trajectories with random rewards, of tokens up to the newest version."""
    rng = np.random.default_rng(first_id)
    sequences = iter(random_sequences(num * group_size, seed=first_id, max_tokens=max_tokens))

    def trajectory(group_id: int, member: int) -> Trajectory:
        sequence = next(sequences)
        return replace(
            make_trajectory(group_id, member),
            tokens=sequence.tokens,
            loss_mask=sequence.loss_mask,
            behavior_logprobs=sequence.behavior_logprobs,
            policy_versions=sequence.policy_versions.clip(max=newest),
            reward=float(rng.normal(group_id)),
        )

    return [
        Group(i, tuple(trajectory(i, m) for m in range(group_size)))
        for i in range(first_id, first_id + num)
    ]


def groups_of_node(node: int) -> list[Group]:
    """Node 0 has short responses and node 1 long ones, so that they need different numbers of micro-batches."""
    return random_groups(100 * node, num=3, group_size=2, max_tokens=(8, 40)[node])


def train_on_two_nodes(rank: int, folder: str, configs: list[Config]) -> None:
    """Train one step per config on four ranks of two nodes; each rank writes `rank_N.pt`."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 4)
    cluster = form_cluster((NODE_OF_RANK[rank], "a host", {}), rank, 4, store, "gloo", TIMEOUT)
    found = []
    for config in configs:
        policy = load(config)
        gradients = record_gradients(policy)
        share = share_batch(
            groups_of_node(cluster.node) if cluster.is_leader else None, 1, policy, cluster
        )
        metrics = policy.train_step(share, policy_version=12)
        weights = weights_of(policy)
        shards = [own_shard(p).numel() for p in policy.module.parameters()]
        num_sequences = [[len(sequences) for sequences in update] for update in share]
        found.append((metrics, gradients, weights, sum(shards), num_sequences))
    torch.save(found, os.path.join(folder, f"rank_{rank}.pt"))
    dist.destroy_process_group()

"""Bodies of spawned ranks that are told which node each is on: no torchrun and no engine, but real gloo."""

import datetime
import os
import signal
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from plain_trainer import record_gradients
from programs import wait_until
from tiny_policy import error_of, load, random_sequences, weights_of
from trajectories import make_trajectory

from asyncrl.cluster.cluster import Peer, form_cluster, join
from asyncrl.config import Config
from asyncrl.records import Group, Trajectory
from asyncrl.trainer import batch
from extras import node_watch
from extras.node_watch import LeaderWatch

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
    peers = [Peer(node, "ab"[node]) for node in NODE_OF_RANK]
    store = dist.FileStore(os.path.join(folder, "store"), len(peers))
    cluster = form_cluster(peers, rank, store, "gloo", TIMEOUT)
    found = []
    for config in configs:
        policy = load(config)
        gradients = record_gradients(policy)
        share = batch.deal(
            groups_of_node(cluster.node) if cluster.is_leader else None, 1, policy, cluster
        )
        metrics = policy.train_step(share, policy_version=12)
        weights = weights_of(policy)
        shards = [p.to_local().numel() for p in policy.module.parameters()]
        num_sequences = [[len(sequences) for sequences in update] for update in share]
        found.append((metrics, gradients, weights, sum(shards), num_sequences))
    torch.save(found, os.path.join(folder, f"rank_{rank}.pt"))
    dist.destroy_process_group()


def meet_and_end(rank: int, folder: str, meetings: list[list[dict[str, str]]]) -> None:
    """Two nodes of a rank each, as under torchrun: they differ, then meet and end in three ways; node 0 takes notes.

    Both end well, then node 1 has an error, then it is killed.
    """
    os.environ |= meetings[0][rank]
    notes = [error_of(join, Config(lr=(0.1, 0.2)[rank]), "cpu")]
    os.environ |= meetings[1][rank]
    cluster = join(Config(num_rollout_workers=rank + 1), "cpu")

    def dump() -> str:
        open(os.path.join(folder, "stacks"), "a").close()
        return "dumped"

    watch = LeaderWatch(cluster, dump)
    watch.finish()
    notes.append(f"finished: {watch.reason}")
    node_watch.GRACE_S = 300  # this process goes on
    watching = [os.path.join(folder, name) for name in ("watching_failing", "watching_killed")]
    failing, killed = LeaderWatch(cluster, dump, "failing"), LeaderWatch(cluster, dump, "killed")
    if rank == 1:
        wait_until(lambda: os.path.exists(watching[0]))
        assert isinstance(failing.explain(ValueError("no\nsuch dataset")), ValueError)
        wait_until(lambda: os.path.exists(watching[1]))
        os.kill(os.getpid(), signal.SIGKILL)
    for watch, path in zip((failing, killed), watching, strict=True):
        notes.append(note_of_the_end(watch, path, os.path.join(folder, "stacks")))
    with open(os.path.join(folder, "notes"), "w") as file:
        file.write("\n".join(notes))


def note_of_the_end(watch: LeaderWatch, watching_path: str, dump_path: str) -> str:
    """What a leader that waits for something else hears of another's end."""
    signals = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    open(watching_path, "w").close()
    wait_until(lambda: signals)
    error = watch.explain(InterruptedError("stopped by SIGTERM"))
    return f"{type(error).__name__}: {error}; stacks: {os.path.exists(dump_path)}"

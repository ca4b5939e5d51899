"""The nodes of a run: which trainer ranks are on which, and the few numbers their leaders tell each other.

Local rank 0 leads its node: it has the rollout workers, their samples and a copy of the weights for them. Across nodes
go the trainer's own collectives and, per step, rewards, counts and metrics; no sample, and no weights for rollout.
"""

import dataclasses
import datetime
import json
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from config import Config
from fingerprint import check_same, fingerprint

JOIN_TIMEOUT_S = 180.0
"""Longest wait for the ranks of all nodes. torchrun starts them together, so this is for their imports only."""


@dataclass(frozen=True)
class Cluster:
    """Where this rank stands among those of all nodes. By default it is the only one, and needs no process group."""

    rank: int = 0
    ranks_of_nodes: tuple[tuple[int, ...], ...] = ((0,),)
    """Trainer ranks of each node, ascending; rank 0 leads the first."""
    hosts: tuple[str, ...] = ("localhost",)
    """Host name of each node."""
    node_group: dist.ProcessGroup | None = None
    """This node's ranks; None for all ranks, where there is one node."""
    leader_group: dist.ProcessGroup | None = None
    """The leaders; None where there is one node."""

    @property
    def num_nodes(self) -> int:
        return len(self.ranks_of_nodes)

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return next(node for node, ranks in enumerate(self.ranks_of_nodes) if self.rank in ranks)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """All ranks of this node; the first is its leader."""
        return self.ranks_of_nodes[self.node]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The leader of each node."""
        return tuple(ranks[0] for ranks in self.ranks_of_nodes)

    @property
    def is_leader(self) -> bool:
        """Whether this is its node's local rank 0."""
        return self.rank in self.leaders

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, who writes the records of the run."""
        return self.rank == 0

    def name(self, node: int) -> str:
        """A node as messages call it."""
        return f"node {node} ({self.hosts[node]})"

    def scatter_on_node(self, values: list | None) -> Any:
        """Give each rank of this node its own of the leader's `values`; collective on the node."""
        mine = [None]
        dist.scatter_object_list(mine, values, src=self.local_ranks[0], group=self.node_group)
        return mine[0]

    def broadcast_on_node(self, value: Any) -> Any:
        """The leader's value, on all ranks of its node; collective on the node."""
        values = [value]
        dist.broadcast_object_list(values, src=self.local_ranks[0], group=self.node_group)
        return values[0]

    def gather(self, value: Any) -> list:
        """The values of all leaders, in the order of nodes; collective over leaders. For small things only."""
        values = [value]
        if self.num_nodes > 1:
            values *= self.num_nodes
            dist.all_gather_object(values, value, group=self.leader_group)
        return values

    def max_over_ranks(self, counts: list[int]) -> list[int]:
        """The largest of each count on any rank of any node; collective."""
        largest = torch.tensor(counts)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()


def form_cluster(node_of_rank: list[int], hosts: list[str], timeout: datetime.timedelta) -> Cluster:
    """Group the ranks by the node that each is on, given with its host by rank; collective, in a process group."""
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of_rank):
        members.setdefault(node, []).append(rank)
    ranks_of_nodes = tuple(map(tuple, members.values()))
    of_nodes = tuple(hosts[ranks[0]] for ranks in ranks_of_nodes)
    alone = Cluster(dist.get_rank(), ranks_of_nodes, of_nodes)
    if alone.num_nodes == 1:
        return alone
    node_groups = [dist.new_group(list(ranks), timeout, "gloo") for ranks in ranks_of_nodes]
    leader_group = dist.new_group(list(alone.leaders), timeout, "gloo")
    return dataclasses.replace(alone, node_group=node_groups[alone.node], leader_group=leader_group)


def join(config: Config, device_type: str) -> Cluster:
    """Meet the ranks of all nodes, make sure that they run the same, and form the process groups; collective.

    Without torchrun this is the only rank. Raises ValueError, on every rank, if nodes differ in code, options or kind
    of device, and RuntimeError if ranks are missing.
    """
    timeout = datetime.timedelta(seconds=config.startup_timeout_s + config.rollout_timeout_s)
    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" not in os.environ:
        path = Path(tempfile.mkdtemp(prefix="train-async-")) / "store"
        dist.init_process_group(backend, init_method=f"file://{path}", rank=0, world_size=1, timeout=timeout)
        return Cluster()
    store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
    facts = _exchange(dist.PrefixStore("facts", store), rank, num_ranks, _facts(config, device_type))
    names = {fact["node"]: f"node {fact['node']} ({fact['host']})" for fact in facts}
    check_same({names[fact["node"]]: fact["fingerprint"] for fact in facts if "fingerprint" in fact})
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    return form_cluster([fact["node"] for fact in facts], [fact["host"] for fact in facts], timeout)


def _facts(config: Config, device_type: str) -> dict:
    """What the others must know of this rank. Only leaders say what their node runs."""
    rank, num_local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    facts = {"node": int(os.environ.get("GROUP_RANK", rank // num_local)), "host": socket.gethostname()}
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        facts["fingerprint"] = fingerprint(config) | {"device": device_type}
    return facts


def _exchange(store: dist.Store, rank: int, num_ranks: int, facts: dict) -> list[dict]:
    """The facts of all ranks, through the store: before there is a process group, nothing else has a short timeout."""
    keys = [str(other) for other in range(num_ranks)]
    store.set(keys[rank], json.dumps(facts))
    try:
        store.wait(keys, datetime.timedelta(seconds=JOIN_TIMEOUT_S))
    except dist.DistStoreError:
        missing = ", ".join(key for key in keys if not store.check([key]))
        raise RuntimeError(
            f"of {num_ranks} trainer ranks {missing} did not come within {JOIN_TIMEOUT_S:.0f} s: "
            "look at what their nodes printed"
        ) from None
    return [json.loads(store.get(key)) for key in keys]


def config_of_node(config: Config, num_nodes: int, num_ranks: int) -> Config:
    """What one node's rollout has to do: its share of the groups.

    Raises ValueError, with the arithmetic, for what cannot be shared by nodes and ranks.
    """
    if num_ranks % config.replicas:
        raise ValueError(
            f"--replicas {config.replicas} does not divide {num_ranks} trainer ranks: {num_ranks} / {config.replicas} "
            f"= {num_ranks / config.replicas:.2f} ranks per replica; change one of the two"
        )
    if config.record and num_nodes > 1:
        raise ValueError(f"--record keeps the batches of one node, and there are {num_nodes}; leave it out")
    shares = num_nodes * config.minibatches
    if config.groups_per_step % shares:
        raise ValueError(
            f"--groups-per-step {config.groups_per_step} is not a multiple of {num_nodes} nodes × --minibatches "
            f"{config.minibatches} = {shares}: {config.groups_per_step} / {shares} = "
            f"{config.groups_per_step / shares:.2f} groups; use {-(-config.groups_per_step // shares) * shares}"
        )
    if config.extra_groups % num_nodes:
        raise ValueError(
            f"--extra-groups {config.extra_groups} is not a multiple of {num_nodes} nodes: {config.extra_groups} / "
            f"{num_nodes} = {config.extra_groups / num_nodes:.2f} per node; change one of the two"
        )
    part = dataclasses.replace(
        config, groups_per_step=config.groups_per_step // num_nodes, extra_groups=config.extra_groups // num_nodes
    )
    if part.max_outstanding_groups * num_nodes != config.max_outstanding_groups:
        raise ValueError(
            f"--async-ratio {config.async_ratio:g} and --over-sampling {config.over_sampling:g} allow "
            f"{config.max_outstanding_groups} outstanding groups, {num_nodes} nodes with {part.groups_per_step} groups "
            f"per step each round that down to {num_nodes} × {part.max_outstanding_groups} = "
            f"{part.max_outstanding_groups * num_nodes}; choose a ratio that leaves whole groups per node"
        )
    return part

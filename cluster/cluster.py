"""The nodes of a run: which trainer ranks are on which, which have rollout workers, and what joins them.

Local rank 0 leads its node: it has the rollout workers, their samples and a copy of the weights for them. Across nodes
go the trainer's own collectives and, per step, rewards, counts and metrics. Samples and weights for rollout cross only
where a node has no trainer or no workers (job/exchange.py).
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

from cluster.fingerprint import check_same, fingerprint
from cluster.leaders import Leaders
from config import Config

JOIN_TIMEOUT_S = 180.0
"""Longest wait for the ranks of all nodes. torchrun starts them together, so this is for their imports only."""


@dataclass(frozen=True)
class Cluster:
    """Where this process stands among those of all nodes. By default it is alone, and needs no process group.

    Ranks are those of the trainer, numbered node by node; a node that only samples has none, and one process.
    """

    node: int = 0
    local_rank: int = 0
    ranks_of_nodes: tuple[tuple[int, ...], ...] = ((0,),)
    """Trainer ranks of each node, ascending."""
    samplers: tuple[int, ...] = (0,)
    """Nodes that have rollout workers."""
    hosts: tuple[str, ...] = ("localhost",)
    """Host name of each node."""
    store: dist.Store | None = None
    """Where process groups are formed; None in a cluster of one that was not formed by `join`."""
    node_group: dist.ProcessGroup | None = None
    """This node's ranks; None for all ranks, where one node has them all."""
    leaders: Leaders | None = None
    """Of all nodes; None where there is one."""
    trainer_leaders: Leaders | None = None
    """Of the nodes that train; None on the others, and where there is one."""

    @property
    def num_nodes(self) -> int:
        return len(self.ranks_of_nodes)

    @property
    def trainers(self) -> tuple[int, ...]:
        """Nodes that have trainer ranks."""
        return tuple(node for node, ranks in enumerate(self.ranks_of_nodes) if ranks)

    @property
    def num_ranks(self) -> int:
        """Trainer ranks of all nodes."""
        return sum(map(len, self.ranks_of_nodes))

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Trainer ranks of this node; the first is its leader."""
        return self.ranks_of_nodes[self.node]

    @property
    def trains(self) -> bool:
        """Whether this node has trainer ranks."""
        return bool(self.local_ranks)

    @property
    def samples(self) -> bool:
        """Whether this node has rollout workers."""
        return self.node in self.samplers

    @property
    def is_leader(self) -> bool:
        """Whether this is its node's local rank 0."""
        return self.local_rank == 0

    @property
    def is_first(self) -> bool:
        """Whether this is trainer rank 0, who writes the records of the run."""
        return self.is_leader and self.node == self.trainers[0]

    @property
    def evaluates(self) -> bool:
        """Whether held-out problems are sampled on this node: the first that samples."""
        return self.node == self.samplers[0]

    @property
    def feeders(self) -> dict[int, int]:
        """Of each node without a trainer, the one that sends it weights: those that train share them out."""
        without = [node for node in self.samplers if not self.ranks_of_nodes[node]]
        return {node: self.trainers[i % len(self.trainers)] for i, node in enumerate(without)}

    def name(self, node: int) -> str:
        """A node as messages call it."""
        return f"node {node} ({self.hosts[node]})"

    def scatter_on_node(self, values: list | None) -> Any:
        """Give each rank of this node its own of the leader's `values`; collective on the node."""
        if len(self.local_ranks) == 1:  # the leader is alone
            return values[0]
        mine = [None]
        dist.scatter_object_list(mine, values, src=self.local_ranks[0], group=self.node_group)
        return mine[0]

    def broadcast_on_node(self, value: Any) -> Any:
        """The leader's value, on all ranks of its node; collective on the node."""
        if len(self.local_ranks) < 2:  # the leader is alone
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self.local_ranks[0], group=self.node_group)
        return values[0]

    def gather_on_node(self, value: Any) -> list | None:
        """The values of this node's ranks, on its leader; None on the others. Collective on the node."""
        if len(self.local_ranks) < 2:  # the leader is alone
            return [value]
        values = [None] * len(self.local_ranks) if self.is_leader else None
        dist.gather_object(value, values, dst=self.local_ranks[0], group=self.node_group)
        return values

    def gather(self, value: Any) -> list:
        """The values of all leaders, in the order of nodes; collective over leaders. For small things only."""
        return self.leaders.gather(value) if self.leaders else [value]

    def gather_over_trainers(self, value: Any) -> list:
        """The values of the leaders of nodes that train; collective over these. For small things only."""
        return self.trainer_leaders.gather(value) if self.trainer_leaders else [value]

    def max_over_ranks(self, counts: list[int]) -> list[int]:
        """The largest of each count on any rank of any node; collective over ranks."""
        largest = torch.tensor(counts)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()


@dataclass(frozen=True)
class Peer:
    """What the processes of a run must know of each other."""

    node: int
    host: str
    roles: tuple[str, ...]
    """`trainer`, `rollout` or both: what its node does."""
    fingerprint: dict[str, str] | None = None
    """What its node runs, of leaders only."""


def form_cluster(
    peers: list[Peer], number: int, store: dist.Store, backend: str, timeout: datetime.timedelta
) -> Cluster:
    """Form the process groups of a run whose processes are `peers`; collective. `number` is that of this one.

    The default process group is that of the trainer's ranks.
    """
    nodes: dict[int, list[int]] = {}
    for i, peer in enumerate(peers):
        nodes.setdefault(peer.node, []).append(i)
    first = [peers[processes[0]] for processes in nodes.values()]
    ranks = {i: rank for rank, i in enumerate(i for i, peer in enumerate(peers) if "trainer" in peer.roles)}
    node = list(nodes).index(peers[number].node)
    cluster = Cluster(
        node,
        list(nodes.values())[node].index(number),
        tuple(tuple(ranks[i] for i in processes if i in ranks) for processes in nodes.values()),
        tuple(n for n, peer in enumerate(first) if "rollout" in peer.roles),
        tuple(peer.host for peer in first),
        store,
    )
    if cluster.trains:
        group_store = dist.PrefixStore("trainer", store)
        dist.init_process_group(backend, store=group_store, rank=ranks[number], world_size=len(ranks), timeout=timeout)
    if cluster.num_nodes == 1:
        return cluster
    return dataclasses.replace(cluster, **_groups(cluster, timeout))


def _groups(cluster: Cluster, timeout: datetime.timedelta) -> dict[str, Any]:
    """The groups of a cluster of several nodes that this process is in."""
    found: dict[str, Any] = {}
    if cluster.trains and len(cluster.trainers) > 1:
        of_nodes = {n: dist.new_group(list(cluster.ranks_of_nodes[n]), timeout, "gloo") for n in cluster.trainers}
        found["node_group"] = of_nodes[cluster.node]
        if cluster.is_leader:
            found["trainer_leaders"] = Leaders("trainers", cluster.store, cluster.node, cluster.trainers, timeout)
    if cluster.is_leader:
        found["leaders"] = Leaders("nodes", cluster.store, cluster.node, range(cluster.num_nodes), timeout)
    return found


def join(config: Config, device_type: str) -> Cluster:
    """Meet the processes of all nodes, make sure that they run the same, and form the process groups; collective.

    Without torchrun this is the only one. Raises ValueError, on every one, if nodes differ in code, options or kind of
    device, or if nobody trains or samples, and RuntimeError if processes are missing.
    """
    timeout = datetime.timedelta(seconds=2 * config.timeout_s)
    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" not in os.environ:
        peers = [Peer(0, "localhost", config.node_roles)]
        check_roles(peers)
        path = Path(tempfile.mkdtemp(prefix="train-async-")) / "store"
        return form_cluster(peers, 0, dist.FileStore(str(path), 1), backend, timeout)
    store, number, num_processes = next(rendezvous("env://", timeout=timeout))
    mine = _describe(config, device_type)
    peers = _meet(dist.PrefixStore("peers", store), number, num_processes, mine)
    names = {peer.node: f"node {peer.node} ({peer.host})" for peer in peers}
    check_same({names[peer.node]: peer.fingerprint for peer in peers if peer.fingerprint})
    check_roles(peers)
    return form_cluster(peers, number, store, backend, timeout)


def _describe(config: Config, device_type: str) -> Peer:
    """What the others must know of this process."""
    rank, num_local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    leads = int(os.environ.get("LOCAL_RANK", "0")) == 0
    return Peer(
        int(os.environ.get("GROUP_RANK", rank // num_local)),
        socket.gethostname(),
        config.node_roles,
        fingerprint(config) | {"device": device_type} if leads else None,
    )


def _meet(store: dist.Store, number: int, num_processes: int, mine: Peer) -> list[Peer]:
    """All peers, through the store: before there is a process group, nothing else has a short timeout."""
    keys = [str(other) for other in range(num_processes)]
    store.set(keys[number], json.dumps(dataclasses.asdict(mine)))
    try:
        store.wait(keys, datetime.timedelta(seconds=JOIN_TIMEOUT_S))
    except dist.DistStoreError:
        missing = ", ".join(key for key in keys if not store.check([key]))
        raise RuntimeError(
            f"of {num_processes} processes that torchrun starts {missing} did not come within {JOIN_TIMEOUT_S:.0f} s: "
            "look at what their nodes printed"
        ) from None
    return [Peer(**json.loads(store.get(key))) for key in keys]


def check_roles(peers: list[Peer]) -> None:
    """Raise ValueError unless some node trains, some node samples, and one that does not train has one process."""
    for role, what in (("trainer", "trains"), ("rollout", "samples")):
        if not any(role in peer.roles for peer in peers):
            raise ValueError(f"no node {what}: --node-roles must have {role} on one node at least; add it")
    for node in {peer.node for peer in peers if "trainer" not in peer.roles}:
        num_processes = sum(peer.node == node for peer in peers)
        if num_processes > 1:
            raise ValueError(
                f"node {node} has no trainer (--node-roles rollout) and {num_processes} processes by torchrun: one "
                "leads all of its rollout workers; use --nproc-per-node 1 there"
            )


def check_shares(config: Config, num_samplers: int, num_trainers: int, num_ranks: int) -> None:
    """Raise ValueError, with the arithmetic, for what nodes that sample, nodes that train, or ranks cannot share."""
    if num_ranks % config.replicas:
        raise ValueError(
            f"--replicas {config.replicas} does not divide {num_ranks} trainer ranks: {num_ranks} / {config.replicas} "
            f"= {num_ranks / config.replicas:.2f} ranks per replica; change one of the two"
        )
    if config.record and num_trainers > 1:
        raise ValueError(f"--record keeps the batches of one node, and {num_trainers} train; leave it out")
    _check_groups(config, num_samplers, "that sample", 1)
    _check_groups(config, num_trainers, "that train", config.minibatches)
    if config.extra_groups % num_samplers:
        raise ValueError(
            f"--extra-groups {config.extra_groups} is not a multiple of {num_samplers} nodes: {config.extra_groups} / "
            f"{num_samplers} = {config.extra_groups / num_samplers:.2f} per node; change one of the two"
        )
    part = config.bounds(num_samplers)
    if part.max_outstanding * num_samplers != config.max_outstanding_groups:
        raise ValueError(
            f"--async-ratio {config.async_ratio:g} and --over-sampling {config.over_sampling:g} allow "
            f"{config.max_outstanding_groups} outstanding groups, {num_samplers} nodes with {part.groups_per_step} "
            f"groups per step each round that down to {num_samplers} × {part.max_outstanding} = "
            f"{part.max_outstanding * num_samplers}; choose a ratio that leaves whole groups per node"
        )


def _check_groups(config: Config, num_nodes: int, which: str, minibatches: int) -> None:
    shares, num_groups = num_nodes * minibatches, config.groups_per_step
    if num_groups % shares:
        times = f" × --minibatches {minibatches} = {shares}" if minibatches > 1 else ""
        raise ValueError(
            f"--groups-per-step {num_groups} is not a multiple of {num_nodes} nodes {which}{times}: {num_groups} / "
            f"{shares} = {num_groups / shares:.2f} groups; use {-(-num_groups // shares) * shares}"
        )

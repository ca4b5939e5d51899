"""The nodes of a run, their trainer ranks and process groups.

Every node trains on its share of a step's groups. Its local rank 0 leads it, and has the node's rollout workers, their
samples and a copy of the weights. Nodes exchange only the trainer's collectives, and rewards, counts and metrics.
"""

import dataclasses
import datetime
import os
import pickle
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from asyncrl.cluster.fingerprint import check_same, fingerprint
from asyncrl.cluster.gathering import Gathering
from asyncrl.config import Config

JOIN_TIMEOUT_S = 180.0
"""Longest wait for the ranks of all nodes, for their imports. torchrun starts them together."""
DOWNLOAD_S = 86400.0
"""Longest wait until all nodes have the model, perhaps downloaded, seconds."""


@dataclass(frozen=True)
class Cluster:
    """The position of this rank among the ranks of all nodes. By default it is the only one."""

    node: int = 0
    local_rank: int = 0
    ranks_of_nodes: tuple[tuple[int, ...], ...] = ((0,),)
    """Ranks of each node, ascending."""
    hosts: tuple[str, ...] = ("localhost",)
    """Host name of each node."""
    store: dist.Store | None = None
    """Store for process groups; None for a single rank without `join`."""
    node_group: dist.ProcessGroup | None = None
    """This node's ranks; None for all ranks, if there is one node."""
    leaders: Gathering | None = None
    """Of all nodes; None if there is one node, and on followers."""

    @property
    def num_nodes(self) -> int:
        return len(self.ranks_of_nodes)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all nodes."""
        return sum(map(len, self.ranks_of_nodes))

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks of this node, its leader first."""
        return self.ranks_of_nodes[self.node]

    @property
    def is_leader(self) -> bool:
        """Whether this is its node's local rank 0."""
        return self.local_rank == 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the run's records and evaluates."""
        return self.is_leader and self.node == 0

    def name(self, node: int) -> str:
        return f"node {node} ({self.hosts[node]})"

    def scatter_on_node(self, values: list | None) -> Any:
        """Return this rank's entry of the leader's `values`; collective on the node."""
        if len(self.local_ranks) == 1:
            return values[0]
        mine = [None]
        dist.scatter_object_list(mine, values, src=self.local_ranks[0], group=self.node_group)
        return mine[0]

    def broadcast_on_node(self, value: Any) -> Any:
        """Return the leader's value; collective on the node."""
        return self.scatter_on_node([value] * len(self.local_ranks))

    def gather(self, value: Any) -> list:
        """Return the values of all leaders, in the order of nodes; collective over leaders. For small values only.

        A signal interrupts the wait. Raises RuntimeError after the timeout.
        """
        if self.leaders is None:
            return [value]
        try:
            values = self.leaders.gather(pickle.dumps(value))
        except TimeoutError:
            raise RuntimeError(
                f"timed out: waited {self.leaders.timeout_s:g} s, 2 × --timeout-s, for all other nodes; if a step or a "
                "checkpoint takes that long, raise --timeout-s"
            ) from None
        return [pickle.loads(value) for value in values]

    def wait_for_models(self) -> None:
        """Wait until all nodes have their model; collective over ranks.

        A signal interrupts the wait. Raises RuntimeError after DOWNLOAD_S, not after --timeout-s.
        """
        if self.num_ranks == 1:
            return
        store = dist.PrefixStore("models", self.store)
        gathering = Gathering(store, dist.get_rank(), self.num_ranks, DOWNLOAD_S, poll_s=0.1)
        try:
            gathering.gather(b"")
        except TimeoutError as ranks:
            raise RuntimeError(
                f"timed out: ranks {ranks} wait for their model after {DOWNLOAD_S:g} s"
            ) from None

    def max_over_ranks(self, counts: list[int]) -> list[int]:
        """Return the maximum of each count over all ranks; collective over ranks."""
        largest = torch.tensor(counts)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()


def on_first_rank(function: Callable[[], Any]) -> Any:
    """Call a function on rank 0. Return its result on all ranks; collective.

    An OSError or ValueError of the function is raised on all ranks.
    """
    outcome = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except (OSError, ValueError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, device="cpu")
    value, error = outcome
    if error is not None:
        raise error
    return value


@dataclass(frozen=True)
class Peer:
    """Facts that a rank sends to all other ranks."""

    node: int
    host: str
    fingerprint: dict[str, str] | None = None
    """Code and options of its node; None unless it is a leader."""


def form_cluster(
    peers: list[Peer], rank: int, store: dist.Store, backend: str, timeout: datetime.timedelta
) -> Cluster:
    """Form the process groups of a run. Return the cluster as seen by `rank`, whose peers are in order; collective."""
    nodes: dict[int, list[int]] = {}
    for other, peer in enumerate(peers):
        nodes.setdefault(peer.node, []).append(other)
    ranks_of_nodes, node = tuple(map(tuple, nodes.values())), list(nodes).index(peers[rank].node)
    hosts = tuple(peers[ranks[0]].host for ranks in ranks_of_nodes)
    cluster = Cluster(node, ranks_of_nodes[node].index(rank), ranks_of_nodes, hosts, store)
    group_store = dist.PrefixStore("trainer", store)
    dist.init_process_group(
        backend, store=group_store, rank=rank, world_size=len(peers), timeout=timeout
    )
    if cluster.num_nodes == 1:
        return cluster
    node_group, _ = dist.new_subgroups_by_enumeration(ranks_of_nodes, timeout, "gloo")
    leaders = None
    if cluster.is_leader:
        leader_store = dist.PrefixStore("leaders", store)
        leaders = Gathering(leader_store, node, cluster.num_nodes, timeout.total_seconds())
    return dataclasses.replace(cluster, node_group=node_group, leaders=leaders)


def join(config: Config, device_type: str) -> Cluster:
    """Meet the ranks of all nodes, check that nodes run the same, and form the process groups; collective.

    Without torchrun this is the only rank. All ranks raise ValueError if nodes differ in code, options or kind of
    device. Raises ValueError for a rank that torchrun has not started, RuntimeError if ranks are missing.
    """
    timeout = datetime.timedelta(seconds=2 * config.timeout_s)
    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" not in os.environ:
        return form_cluster([Peer(0, "localhost")], 0, dist.HashStore(), backend, timeout)
    if not {"LOCAL_RANK", "GROUP_RANK"} <= os.environ.keys():
        raise ValueError(
            "RANK is set without LOCAL_RANK and GROUP_RANK; start the ranks by torchrun, or unset RANK"
        )
    store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
    mine = Peer(int(os.environ["GROUP_RANK"]), socket.gethostname())
    if os.environ["LOCAL_RANK"] == "0":
        mine = dataclasses.replace(mine, fingerprint=fingerprint(config) | {"device": device_type})
    peers = _meet(dist.PrefixStore("peers", store), rank, num_ranks, mine)
    leaders = {f"node {peer.node} ({peer.host})": peer for peer in peers if peer.fingerprint}
    check_same({name: peer.fingerprint for name, peer in leaders.items()})
    return form_cluster(peers, rank, store, backend, timeout)


def _meet(store: dist.Store, rank: int, num_ranks: int, mine: Peer) -> list[Peer]:
    """Return all peers. They are sent as JSON, because nodes may have other versions of this code."""
    try:
        gathering = Gathering(store, rank, num_ranks, JOIN_TIMEOUT_S)
        peers = gathering.gather(msgspec.json.encode(mine))
    except TimeoutError as missing:
        raise RuntimeError(
            f"of {num_ranks} ranks that torchrun starts, {missing} did not join within {JOIN_TIMEOUT_S:.0f} s; look at "
            "the output of their nodes"
        ) from None
    try:
        return [msgspec.json.decode(peer, type=Peer) for peer in peers]
    except msgspec.ValidationError as error:
        raise ValueError(
            f"the nodes have different versions of this code ({error}); use one commit on all nodes"
        ) from None


def check_shares(config: Config, num_nodes: int, num_ranks: int) -> None:
    """Raise ValueError, with the arithmetic, for options that nodes or ranks cannot share."""
    if num_ranks % config.replicas:
        raise ValueError(
            f"--replicas {config.replicas} does not divide {num_ranks} trainer ranks: {num_ranks} / {config.replicas} "
            f"= {num_ranks / config.replicas:.2f} ranks per replica; change --replicas or the number of ranks"
        )
    if config.record and num_nodes > 1:
        raise ValueError(
            f"--record keeps the batches of one node, and {num_nodes} train; remove it"
        )
    shares, num_groups = num_nodes * config.minibatches, config.groups_per_step
    if num_groups % shares:
        times = (
            f" × --minibatches {config.minibatches} = {shares}" if config.minibatches > 1 else ""
        )
        raise ValueError(
            f"--groups-per-step {num_groups} is not a multiple of {num_nodes} nodes{times}: {num_groups} / {shares} = "
            f"{num_groups / shares:.2f} groups; use {-(-num_groups // shares) * shares}"
        )
    if config.extra_groups % num_nodes:
        raise ValueError(
            f"--extra-groups {config.extra_groups} is not a multiple of {num_nodes} nodes: {config.extra_groups} / "
            f"{num_nodes} = {config.extra_groups / num_nodes:.2f} per node; use a multiple"
        )
    part = config.for_node(num_nodes)
    if part.max_outstanding_groups * num_nodes != config.max_outstanding_groups:
        raise ValueError(
            f"--async-ratio {config.async_ratio:g} and --over-sampling {config.over_sampling:g} allow "
            f"{config.max_outstanding_groups} outstanding groups, {num_nodes} nodes with {part.groups_per_step} groups "
            f"per step each round that down to {num_nodes} × {part.max_outstanding_groups} = "
            f"{part.max_outstanding_groups * num_nodes}; choose ratios with whole groups per node"
        )

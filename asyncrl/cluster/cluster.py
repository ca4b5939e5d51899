"""The nodes of a run, their trainer ranks and process groups.

Every node trains on its share of a step's groups. Its local rank 0 leads it, and has the node's rollout workers, their
samples and a copy of the weights. Nodes exchange only the trainer's collectives, and rewards, counts and metrics.
"""

import dataclasses
import datetime
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from asyncrl.cluster.fingerprint import check_same, fingerprint
from asyncrl.config import Config

Value = TypeVar("Value")
JOIN_TIMEOUT_S = 180.0
"""Longest wait for the ranks of all nodes, for their imports. torchrun starts them together."""
DOWNLOAD_S = 86400.0
"""Longest wait until all nodes have the model, perhaps downloaded, seconds."""
POLL_S = 0.002
"""Seconds between two looks at a collective."""
STORE_POLL_S = 0.1
"""Seconds between two looks at the store. It serves all ranks."""


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
    leaders: dist.ProcessGroup | None = None
    """Leaders of all nodes; None if there is one node, and on followers."""

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
        """True on a node's local rank 0."""
        return self.local_rank == 0

    @property
    def is_first(self) -> bool:
        """True on rank 0. It writes the run's records and evaluates."""
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
        arrived = dist.barrier(self.leaders, async_op=True)
        while not arrived.is_completed():  # no signal interrupts a collective
            time.sleep(POLL_S)
        arrived.wait()
        return gather_from_ranks(value, self.leaders)

    def wait_for_models(self) -> None:
        """Wait until all nodes have their model; collective over ranks.

        A signal interrupts the wait. Raises RuntimeError after DOWNLOAD_S, not after --timeout-s.
        """
        if self.num_ranks > 1:
            wait_for_ranks(
                dist.PrefixStore("models", self.store),
                dist.get_rank(),
                self.num_ranks,
                timeout_s=DOWNLOAD_S,
                action="get their model",
            )


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


def max_over_ranks(counts: list[int]) -> list[int]:
    """Return the maximum of each count over all ranks; collective."""
    largest = torch.tensor(counts)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def gather_from_ranks(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return the values of all ranks, or of a group's ranks; collective."""
    if dist.get_world_size(group) == 1:
        return [value]  # to pickle it would take milliseconds of each step
    values: list[Value | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def wait_for_ranks(
    store: dist.Store, rank: int, num_ranks: int, *, timeout_s: float, action: str
) -> None:
    """Wait until all ranks call this with one store without other keys. A signal interrupts the wait.

    Raises RuntimeError, with the missing ranks, after `timeout_s` seconds or if the store is gone.
    """
    store.set(str(rank), "")
    deadline = time.monotonic() + timeout_s
    while not store.check(list(map(str, range(num_ranks)))):
        if time.monotonic() > deadline:
            missing = [str(other) for other in range(num_ranks) if not store.check([str(other)])]
            raise RuntimeError(
                f"of {num_ranks} ranks that torchrun starts, {', '.join(missing)} did not {action} within "
                f"{timeout_s:.0f} s; look at the output of their nodes"
            )
        time.sleep(STORE_POLL_S)


def form_cluster(
    facts: tuple[int, str, dict[str, str]],
    rank: int,
    num_ranks: int,
    store: dist.Store,
    backend: str,
    timeout: datetime.timedelta,
) -> Cluster:
    """Form the process groups of a run. Return the cluster as seen by `rank`; collective.

    `facts` are this rank's node, its host, and on a leader the fingerprint of code and options. The values are plain,
    because nodes can have other versions of this code. All ranks raise ValueError if fingerprints differ.
    """
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("trainer", store),
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
    )
    nodes_of_ranks, hosts_of_ranks, fingerprints = zip(*gather_from_ranks(facts), strict=True)
    nodes: dict[int, list[int]] = {}
    for other, other_node in enumerate(nodes_of_ranks):
        nodes.setdefault(other_node, []).append(other)
    ranks_of_nodes = tuple(map(tuple, nodes.values()))
    node = list(nodes).index(facts[0])
    first_ranks = [ranks[0] for ranks in ranks_of_nodes]
    hosts = tuple(hosts_of_ranks[first] for first in first_ranks)
    cluster = Cluster(node, ranks_of_nodes[node].index(rank), ranks_of_nodes, hosts, store)
    if cluster.num_nodes == 1:
        return cluster
    check_same({cluster.name(i): fingerprints[first] for i, first in enumerate(first_ranks)})
    node_group, _ = dist.new_subgroups_by_enumeration(ranks_of_nodes, timeout, "gloo")
    leaders = dist.new_group(first_ranks, timeout, "gloo")
    return dataclasses.replace(
        cluster, node_group=node_group, leaders=leaders if cluster.is_leader else None
    )


def join(config: Config, device_type: str) -> Cluster:
    """Meet the ranks of all nodes, check that nodes run the same, and form the process groups; collective.

    Without torchrun this is the only rank. All ranks raise ValueError if nodes differ in code, options or kind of
    device. Raises ValueError for a rank that torchrun has not started, RuntimeError if ranks are missing.
    """
    timeout = datetime.timedelta(seconds=2 * config.timeout_s)
    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" not in os.environ:
        return form_cluster((0, "localhost", {}), 0, 1, dist.HashStore(), backend, timeout)
    if not {"LOCAL_RANK", "GROUP_RANK"} <= os.environ.keys():
        raise ValueError(
            "RANK is set without LOCAL_RANK and GROUP_RANK; start the ranks by torchrun, or unset RANK"
        )
    store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
    # groups would wait for --timeout-s, and would not name a missing rank
    wait_for_ranks(
        dist.PrefixStore("ranks", store), rank, num_ranks, timeout_s=JOIN_TIMEOUT_S, action="join"
    )
    values = {}
    if os.environ["LOCAL_RANK"] == "0":
        values = fingerprint(config) | {"device": device_type}
    facts = (int(os.environ["GROUP_RANK"]), socket.gethostname(), values)
    return form_cluster(facts, rank, num_ranks, store, backend, timeout)


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
        raise ValueError(
            f"--groups-per-step {num_groups} is not a multiple of {num_nodes} nodes × --minibatches "
            f"{config.minibatches} = {shares}; use {-(-num_groups // shares) * shares}"
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

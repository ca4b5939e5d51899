"""What crosses nodes where one only trains or only samples (--node-roles): groups one way, weights the other.

Both go through host memory over gloo, from leader to leader. The trainer's leader sends each parameter as it is
gathered; a node that gets them stages them like a trainer would, and its workers load them from there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from cluster.cluster import Cluster
from data.records import Group
from weights.transport import ParameterSpec

# Groups


@dataclass(frozen=True)
class Route:
    """Groups of a step that one node samples and one trains on."""

    sampler: int
    trainer: int
    start: int
    """First of them, counted among all groups of the step in the order of the nodes that sample."""
    stop: int


def make_routes(num_groups: int, samplers: tuple[int, ...], trainers: tuple[int, ...]) -> list[Route]:
    """Deal a step's groups, equally many per node on either side, in order."""
    sampled, trained = num_groups // len(samplers), num_groups // len(trainers)
    routes = []
    for i, sampler in enumerate(samplers):
        for j, trainer in enumerate(trainers):
            start, stop = max(i * sampled, j * trained), min((i + 1) * sampled, (j + 1) * trained)
            if start < stop:
                routes.append(Route(sampler, trainer, start, stop))
    return routes


def exchange_groups(sampled: list[Group] | None, num_groups: int, cluster: Cluster) -> list[Group] | None:
    """From the groups that this node sampled, if it does, to those that it trains on, if it does; collective over
    leaders.

    `num_groups` is that of the whole step. Where all nodes do both, nothing crosses.
    """
    routes = make_routes(num_groups, cluster.samplers, cluster.trainers)
    first = min((route.start for route in routes if route.sampler == cluster.node), default=0)
    kept, sendings = {}, []
    for route in routes:
        if route.sampler == cluster.node:
            part = sampled[route.start - first : route.stop - first]
            if route.trainer == cluster.node:
                kept[route] = part
            else:
                sendings += cluster.leaders.send(part, route.trainer)
    trained: list[Group] = []
    for route in routes:
        if route.trainer == cluster.node:
            trained += kept[route] if route in kept else cluster.leaders.receive(route.sampler)
    for sending in sendings:
        sending.wait()
    return trained if cluster.trains else None


# Weights


@dataclass(frozen=True)
class Notice:
    """What comes with weights: which they are, and what to do with them."""

    version: int
    """Policy version of the weights."""
    trainer_version: int
    """Version that the trainer had reached when it published them; ahead of `version` by publish_delay."""
    probe: tuple[tuple[int, ...], ...]
    """Token ids of the sequences that engine and trainer both score."""
    probe_logprobs: list[np.ndarray] | None
    """The trainer's own at this version, float32 nats per token of each sequence; None if it has not scored them."""
    evaluate: bool


class Feed:
    """The trainer's end: sends weights to the nodes that this one feeds, if any, each parameter as it is gathered.

    Until all have arrived, the leader's host memory holds a copy of them.
    """

    def __init__(self, specs: list[ParameterSpec], cluster: Cluster):
        """Tell the nodes what will come."""
        self.specs, self.leaders = specs, cluster.leaders
        self.followers = [node for node, feeder in cluster.feeders.items() if feeder == cluster.node]
        self._under_way = [sending for node in self.followers for sending in self.leaders.send(specs, node)]

    def send(
        self, notice: Notice, parameters: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Begin to send each (name, tensor), and pass it on."""
        self._under_way += [sending for node in self.followers for sending in self.leaders.send(notice, node)]
        for (name, tensor), spec in zip(parameters, self.specs, strict=True):
            if self.followers:
                sent = tensor.to("cpu", spec.dtype, copy=True).contiguous()
                self._under_way += [self.leaders.send_tensor(sent, node) for node in self.followers]
            yield name, tensor

    def wait(self) -> None:
        """Wait until all that was sent has arrived."""
        for sending in self._under_way:
            sending.wait()
        self._under_way = []


def receive_specs(cluster: Cluster) -> list[ParameterSpec]:
    """What weights will come to this node, which does not train."""
    return cluster.leaders.receive(cluster.feeders[cluster.node])


def receive_notice(cluster: Cluster) -> Notice:
    """Wait for the next weights of this node, which does not train; `receive_parameters` must follow."""
    return cluster.leaders.receive(cluster.feeders[cluster.node])


def receive_parameters(specs: list[ParameterSpec], cluster: Cluster) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each parameter as it arrives."""
    feeder = cluster.feeders[cluster.node]
    for spec in specs:
        yield spec.name, cluster.leaders.receive_tensor(torch.empty(spec.shape, dtype=spec.dtype), feeder)

"""What `--listen` makes of a run: a controller that lets hosts in, and nodes that check what these have sampled."""

import functools
from collections import Counter
from dataclasses import dataclass

from asyncrl.controller.cut import ControllerState
from asyncrl.controller.tickets import TicketSource
from asyncrl.job.node import NobodySamples, Node, Start
from asyncrl.job.publisher import Publisher
from asyncrl.records import Group
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.trainer.policy import Policy
from extras.swarm.controller import SwarmController
from extras.swarm.remote import SwarmWorkers
from extras.swarm.swarm import listen
from extras.swarm.verify import Verifier


def make_controller(
    start: Start,
    *,
    model_path: str,
    run: RunDirectory,
    tickets: TicketSource,
    restored: ControllerState | None,
) -> SwarmController:
    """Make the controller of a node, its workers, and the place where hosts join; collective on leaders."""
    workers = SwarmWorkers(start.config, start.placement, model_path, run.path, start.worker_main)
    num_nodes = start.cluster.num_nodes
    controller = SwarmController(
        start.config, workers, tickets, run.record, start.clock, num_nodes, restored
    )
    controller.swarm = listen(start, model_path, run)
    return controller


@dataclass(frozen=True, kw_only=True)
class SwarmNode(Node):
    """A rank's surroundings in a run that listens."""

    def take_batch(self, step: int, publisher: Publisher) -> list[Group] | None:
        """Wait for a batch that every node believes; see Node. Collective.

        A batch with a response of a host that is not believed is refused, and all groups of that host are dropped.
        Raises NobodySamples, on all ranks, if the run is asked to stop and a node has no worker.
        """
        is_believed = False
        while not is_believed:
            self.clock.enter("wait")
            has_batch = not self.cluster.is_leader or bool(self.controller.hold_batch())
            if self.cluster.max_over_ranks([int(not has_batch)]) == [1]:
                raise NobodySamples
            publisher.check_engines(step)
            is_believed = self._believes(publisher.policy, step - 1)
        if not self.cluster.is_leader:
            return None
        groups = self.controller.consume_batch()
        self.record_batch(step, groups)
        self._count_workers()
        return groups

    @functools.cached_property
    def _verifier(self) -> Verifier:
        verifier = Verifier(self.config, self.cluster, self.tokenizer)
        self.on_end.callback(verifier.close)
        return verifier

    def _believes(self, policy: Policy, version: int) -> bool:
        """Check a share of what hosts sampled with the weights of a version. Returns whether no node refuses its batch;
        collective."""
        swarm = self.controller.swarm if self.cluster.is_leader else None
        if self.config.swarm.verify_share:
            lies = self._verifier.verify(swarm.take_answered() if swarm else [], policy, version)
            for worker, why in lies:
                swarm.shut_out(worker, f"sent what is not true: {why}")
        is_refused = False
        if swarm is not None:
            swarm.verified = self._verifier.metrics() if self.config.swarm.verify_share else {}
            is_refused = self.controller.refuse_batch(swarm.disbelieved)
        return self.cluster.max_over_ranks([int(is_refused)]) == [0]

    def _count_workers(self) -> None:
        """Let each node know how many workers have joined the others; collective on leaders."""
        swarm = self.controller.swarm
        swarm.num_joined = Counter(dict(enumerate(self.cluster.gather(swarm.num_workers))))

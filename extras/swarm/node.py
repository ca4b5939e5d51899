"""The plugin of `--listen`: a controller with hosts, and ranks that check the samples of hosts."""

import functools
from dataclasses import dataclass
from typing import ClassVar

from asyncrl.cluster.cluster import max_over_ranks
from asyncrl.config import Rule
from asyncrl.job.node import Follower, Leader, NobodySamples
from asyncrl.job.publisher import Publisher
from asyncrl.plugins import Plugin
from asyncrl.records import Group
from asyncrl.trainer.policy import Policy
from asyncrl.weights.stop_tokens import stop_token_ids
from extras.swarm.admission import listening_address, public_address
from extras.swarm.controller import SwarmController
from extras.swarm.hub import make_key
from extras.swarm.remote import SwarmWorkers
from extras.swarm.swarm import Swarm
from extras.swarm.verify import Verifier

RULES: list[Rule] = [
    (
        lambda c: c.listen is not None and c.colocate == "sleep",
        "--listen {c.listen} lets remote hosts join, and --colocate sleep is for one GPU that trainer and engine "
        "share; change one of the two",
    ),
    (
        lambda c: c.listen is not None and c.top_logprobs > 0,
        "--listen {c.listen} lets remote hosts join, and nothing checks their --top-logprobs; change one of the two",
    ),
    (
        lambda c: c.num_rollout_workers == 0 and c.weight_sync != "auto",
        "--weight-sync {c.weight_sync} does not go with --num-rollout-workers 0: remote hosts pull the weights; "
        "change one of the two",
    ),
]


class SwarmRank:
    """The part of every rank in a run that listens."""

    def take_batch(self, step: int, publisher: Publisher) -> list[Group] | None:
        """Wait for a batch that every node believes; see Leader. Collective.

        A batch with a response of a disbelieved host is refused, and all groups of that host are dropped.
        Raises, on all ranks, NobodySamples if the run is asked to stop and a node has no worker, and CannotContinue.
        """
        is_believed = False
        while not is_believed:
            self.clock.enter("wait")
            has_batch = True
            with self.wait_together():
                if self.cluster.is_leader:
                    has_batch = bool(self.controller.wait_for_batch())
            if max_over_ranks([int(not has_batch)]) == [1]:
                raise NobodySamples
            publisher.check_engines(step)
            is_believed = self._believes(publisher.policy, step - 1)
        if not self.cluster.is_leader:
            return None
        groups = self.controller.consume_batch()
        self.on_batch(step, groups)
        self._count_workers()
        return groups

    @functools.cached_property
    def _verifier(self) -> Verifier:
        ends = stop_token_ids(self.model_path, self.tokenizer) if self.tokenizer else ()
        verifier = Verifier(self.config, self.cluster, self.tokenizer, stop_tokens=ends)
        self.on_end.callback(verifier.close)
        return verifier

    def _believes(self, policy: Policy, version: int) -> bool:
        """Check a share of the hosts' samples with the weights of a version; collective.

        Return whether no node refuses its batch.
        """
        swarm = self.controller.swarm if self.cluster.is_leader else None
        if self.config.swarm.verify_share:
            lies = self._verifier.verify(
                swarm.intake.take_answered() if swarm else [], policy, version
            )
            for worker, why in lies:
                swarm.shut_out(worker, f"sent what is not true: {why}")
        is_refused = False
        if swarm is not None:
            swarm.verified = self._verifier.metrics() if self.config.swarm.verify_share else {}
            is_refused = self.controller.refuse_batch(swarm.members.disbelieved)
        return max_over_ranks([int(is_refused)]) == [0]

    def _count_workers(self) -> None:
        """Share the number of workers of each node; collective on leaders."""
        swarm = self.controller.swarm
        num_workers = len(self.placement.workers) + swarm.members.num_workers
        swarm.admission.loads = self.cluster.gather(num_workers)


@dataclass(frozen=True)
class SwarmFollower(SwarmRank, Follower):
    """A rank that only trains, and helps to check."""

    tokenizer: ClassVar[None] = None
    """Only a leader has answers to decode."""


@dataclass(frozen=True)
class SwarmLeader(SwarmRank, Leader):
    """A leader whose node listens for hosts."""

    def launch(self) -> None:
        """Listen for hosts, and start the node's own workers; collective on leaders."""
        key_path = self.run.path / "swarm.key"
        keys = self.cluster.gather(make_key(key_path) if self.cluster.is_first else None)[0]
        address = listening_address(self.config.listen, self.cluster)
        swarm = Swarm(self.config, self.model_path, address, keys, self.run)
        self.on_end.callback(swarm.stop)
        address = public_address(self.config.listen, self.cluster, swarm.hub.port)
        addresses = self.cluster.gather(address)
        if self.cluster.is_first:
            swarm.admission.addresses = addresses
            command = f"python rollout.py --join {address} --key {key_path}"
            print(f"sample for this run on another host: {command}", flush=True)
        self.controller.swarm = swarm
        self._count_workers()
        super().launch()


class SwarmPlugin(Plugin):
    """The parts of a run that --listen changes."""

    rules = RULES
    controller = SwarmController
    workers = SwarmWorkers
    ranks = SwarmLeader, SwarmFollower


PLUGIN = SwarmPlugin()

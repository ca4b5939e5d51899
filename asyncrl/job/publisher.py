"""The trainer's side of publishing: which version, and when."""

import collections
from collections.abc import Iterable, Iterator

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl import extras
from asyncrl.job.node import Node, is_due
from asyncrl.records import Group
from asyncrl.trainer.checkpoint import differing_names
from asyncrl.trainer.model import compute_dtype
from asyncrl.trainer.policy import Policy
from asyncrl.weights.ipc import IpcTransport
from asyncrl.weights.nccl import NcclTransport
from asyncrl.weights.shm import ShmTransport
from asyncrl.weights.transport import Announcement, ParameterSpec, Transport


class Publisher:
    """Publishes policy versions, `publish_delay` steps late. Every rank has one; only a leader's has a controller."""

    def __init__(self, node: Node, policy: Policy):
        """Join trainer and workers, and wait until all engines of this node are up."""
        self.node, self.policy, self.config = node, policy, node.config
        if node.cluster.is_first:
            print(f"attention of the trainer: {policy.module.attention}", flush=True)
            if differs := differing_names(
                policy.model_path, [spec.name for spec in policy.sent_specs()]
            ):
                print(
                    f"warning: beside --model {policy.model_path}, checkpoints {differs}",
                    flush=True,
                )
        if node.controller is not None:
            connect_workers(node, policy.sent_specs())
        self._has_warned = False
        # The version that this start of the run announced first: wrong weights at it end the run.
        self._first_announced: int | None = None
        self._snapshots = collections.deque(self._resumed_snapshots())

    def publish(self, step: int, groups: list[Group] | None = None) -> None:
        """Publish the version that is due after a step, 0 before the first, which trained on `groups`; collective.

        The last step's is due at once, as no sample is trained on any more. After every `eval_every` steps, the first
        and the last, the held-out problems are sampled at the published version.
        """
        node, probe = self.node, self.node.probe
        node.clock.enter("publish")
        if step:
            probe.choose(groups, node.cluster)
        probe.score(self.policy, step)
        self.check_engines(step)
        version, parameters = step, self.policy.sent_parameters()
        if node.controller is None:
            for _ in parameters:  # gathering is collective
                pass
            return
        if self.config.publish_delay and step < self.config.steps:
            version, parameters = self._delayed(step, parameters)
        self._announce(version, step, parameters)

    def check_last(self) -> None:
        """Compare the engines at the last version, with which the last evaluation was sampled."""
        node, last = self.node, self.config.steps
        if node.controller is not None and node.probe.tokens_at(last):
            node.controller.finish_probes(last)
        self.check_engines(last)

    def check_engines(self, step: int) -> None:
        """Compare what engines have scored since the last call with the trainer's scores of the same version.

        A worker of this node that has other weights is warned of, once. A joined host is shut out.
        Raises RuntimeError, on a leader only, if the first weights that this start of the run announced are wrong.
        """
        node = self.node
        if node.controller is None:
            return
        dtype, model_type = (
            compute_dtype(self.config, node.device),
            self.policy.module.model.config.model_type,
        )
        for mismatch in node.probe.compare(node.controller.take_probes()):
            node.run.record(
                "mismatch", worker=mismatch.worker, version=mismatch.version, **mismatch.metrics()
            )
            if mismatch.is_allowed(dtype):
                continue
            problem = mismatch.describe(dtype, model_type, node.placement.transport)
            if node.controller.shuts_out(mismatch.worker, problem):
                continue
            if mismatch.version == self._first_announced:
                raise RuntimeError(problem)
            if not self._has_warned:
                self._has_warned = True
                node.run.record("warning", text=f"step {step}: {problem}")
                print(f"warning: step {step}: {problem}", flush=True)

    def _announce(self, version: int, step: int, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights to where workers read them, when there is room, and have the workers load them."""
        controller, is_resumed = self.node.controller, step and step == self.node.first_version
        is_due_now = self.config.eval_every > 0 and is_due(
            step, self.config.eval_every, self.config.steps
        )
        evaluate = controller.withdraw() or (
            self.node.restored.evaluates if is_resumed else is_due_now
        )
        staged = controller.stage(version, parameters)
        if self._first_announced is None:
            self._first_announced = version
        if self.config.colocate == "sleep":
            torch.cuda.empty_cache()  # what the step needed is the engine's again when it wakes
        controller.publish(
            Announcement(version, step, staged, self.node.probe.tokens_at(version), evaluate)
        )

    @property
    def delayed(self) -> dict[int, list[tuple[str, Tensor]]]:
        """Full weights of the versions that are held back, by version, without the newest; copies, none is changed."""
        return dict(list(self._snapshots)[:-1])

    def _resumed_snapshots(self) -> Iterator[tuple[int, list[tuple[str, Tensor]]]]:
        """What was held back, but for what is older than weights that were announced: a last step's are at once."""
        node, names = self.node, [spec.name for spec in self.policy.sent_specs()]
        for version in node.resumed.delayed if node.resumed and node.controller else ():
            if version >= node.restored.announced:
                weights = load_file(node.resumed.part / f"delayed_{version}.safetensors")
                yield version, [(name, weights[name]) for name in names]

    def _delayed(self, step: int, parameters) -> tuple[int, list[tuple[str, Tensor]]]:
        """Keep a copy of these weights on the CPU and return those of `publish_delay` steps ago, or the first."""
        self._snapshots.append(
            (step, [(name, tensor.to("cpu", copy=True)) for name, tensor in parameters])
        )
        while self._snapshots[0][0] < step - self.config.publish_delay:
            self._snapshots.popleft()
        return self._snapshots[0]


def connect_workers(node: Node, specs: list[ParameterSpec]) -> None:
    """Join the workers to where weights are staged on a node, and wait until all their engines are up."""
    transport = Transport(specs)
    match node.placement.transport:
        case "shm":
            transport = ShmTransport(specs)
        case "ipc":
            transport = IpcTransport(specs)
        case "nccl":
            transport = NcclTransport(
                specs, node.device, node.config.rollout_tp, node.config.timeout_s
            )
    node.controller.connect(transport)
    cores = extras.find("cores")
    if cores is not None:
        cores.leave_cores(node.placement, node.on_end)

"""The loop of a node that only samples (--node-roles rollout)."""

from job.exchange import receive_notice, receive_parameters, receive_specs
from job.node import Node
from job.publisher import connect_workers, stage_and_announce
from job.step_log import StepLog


def sample_on(node: Node, log: StepLog) -> None:
    """The loop of the leader of a node that only samples: its batches go to nodes that train, weights come back."""
    specs = receive_specs(node.cluster)
    connect_workers(node, specs)
    for step in range(node.config.steps + 1):
        if step:
            node.take_batch(step)
        notice = receive_notice(node.cluster)
        if notice.probe_logprobs is not None:
            node.probe.note(notice.version, notice.probe_logprobs)
        stage_and_announce(node.controller, notice, receive_parameters(specs, node.cluster))
        if step:
            log.contribute(step)

"""A rollout worker without an engine, for bench_parts.py: what is left is the queue."""

import numpy as np

from data.messages import Finished, Ready, SampledTokens, Stop, Tickets, Update, Updated
from data.records import Ticket, Trajectory
from records.time_ledger import Activity


def run_echo_worker(spec, connection, per_message: int = 1) -> None:
    """A worker that answers each ticket at once with the same response, `per_message` of them in each message."""
    connection.send(Ready(0.0))
    version, activity = -1, Activity()
    while True:
        match connection.recv():
            case Update(version, _, _):
                connection.send(Updated(version, 0.001, SampledTokens(), activity.report()))
            case Tickets(tickets):
                answers = [echo(ticket, version) for ticket in tickets]
                for start in range(0, len(answers), per_message):
                    connection.send(Finished(answers[start : start + per_message], activity.report_if_due()))
            case Stop():
                return


def echo(ticket: Ticket, version: int, num_tokens: int = 9) -> Trajectory:
    """A response of `num_tokens` tokens to a ticket, the default task's mean."""
    prompt = len(ticket.prompt_tokens)
    mask = np.arange(prompt + num_tokens) >= prompt
    return Trajectory(
        ticket_id=ticket.ticket_id,
        group_id=ticket.group_id,
        member=ticket.member,
        tokens=np.concatenate([ticket.prompt_tokens, np.ones(num_tokens)]).astype(np.int64),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        reward=float(ticket.member % 2),
        finish_reason="stop",
        failure="",
        num_turns=1,
        started_at=0.0,
        ended_at=0.0,
        worker=0,
    )

"""Propositions 1 and 2 of ROLL Flash (arXiv 2510.11345), checked on what a simulated run did.

Symbols: K slots, Q responses, N responses of a training step, μ and L mean and longest time that a response holds a
slot, E·N·μ_train/K the time to train on a batch with all machines, β the trainer's share of them, α the async ratio.

1. Q responses that are all there at the start and go each to whichever slot is free are done after at most
   (Q/K)·μ + L (Graham's bound of list scheduling).
2. A synchronous step takes at most (N/K)·(μ + E·μ_train) + L; an asynchronous one, which has (α + 1)·N responses under
   way, at most max{N·μ/((1 − β)·K) + L/(α + 1), E·N·μ_train/(β·K)}.

The maximum in 2 is one of means: it takes for granted that the slower side never waits. With finitely many places and
lengths that vary it does now and then, so the maximum is claimed only where a trainer that is the slower side did not
wait, and where rollout is slower by BALANCE. Of all asynchronous cases the sum of both branches is claimed
(«2 async, no overlap»).

The paper takes a slot to serve at a fixed speed; with the times that responses really held their slots, 1 needs no such
thing. The time that weights travel is not in the paper and is added to each bound. Where a case lacks what the
propositions assume, `unmet` says what, and nothing is claimed.
"""

import statistics
from dataclasses import dataclass

from extras.simulation.cluster import Outcome

BALANCE = 2.0
"""How many times longer rollout's branch must be than training's, not to count as balanced."""


@dataclass(frozen=True)
class Bound:
    """One proposition on one run."""

    proposition: str
    measured_s: float
    bound_s: float
    unmet: str = ""
    """The assumption that this case does not meet; empty if it meets all."""


def unmet_assumption(outcome: Outcome, generation_s: float, train_s: float) -> str:
    """What the asynchronous bound assumes and this run does not have; empty if nothing."""
    config, slots = outcome.case.config, outcome.case.cluster.num_slots
    rollout_s = outcome.numbers["rollout_s"]
    ahead = (config.max_outstanding_groups - config.groups_per_step) * config.group_size
    if ahead < slots:
        return f"rollout may stop: {ahead} places beside the batch that is trained, {slots} slots"
    if train_s >= generation_s and rollout_s > 1e-6:
        return f"training is the slower side and yet waits: {rollout_s:.1f} s a step"
    if train_s < generation_s < BALANCE * train_s:
        return f"rollout and training are balanced: {generation_s:.1f} s and {train_s:.1f} s"
    return ""


def check(outcome: Outcome) -> list[Bound]:
    """Every proposition that speaks of such a run."""
    case, steps, numbers = outcome.case, outcome.steps, outcome.numbers
    sync_s, slots, config = case.cluster.sync_s, case.cluster.num_slots, case.config
    step_s, train_s = numbers["step_s"], numbers["train_s"]
    longest_s = max(max(step.slot_s) for step in steps)
    mean_s = statistics.fmean(s for step in steps for s in step.slot_s)
    rollout_s = config.groups_per_step * config.group_size / slots * mean_s
    if config.async_ratio == 0 and config.publish_delay == 0:
        rollouts = [
            Bound("1", step.wait_s, sum(step.slot_s) / slots + max(step.slot_s)) for step in steps
        ]
        return [*rollouts, Bound("2 sync", step_s, rollout_s + train_s + longest_s + sync_s)]
    generation_s = rollout_s + longest_s / (config.async_ratio + 1)
    unmet = unmet_assumption(outcome, generation_s, train_s)
    return [
        Bound("2 async", step_s, max(generation_s, train_s) + sync_s, unmet),
        Bound("2 async, no overlap", step_s, generation_s + train_s + sync_s),
    ]

"""The ledger: the fate of every group and every generated token."""

import math
import operator
from collections import Counter
from collections.abc import Collection
from typing import Literal, get_args

import numpy as np

from asyncrl.records import Trajectory
from asyncrl.runlog.metrics import Comparison, Mean, Measured

DropReason = Literal["stale", "filtered", "failed", "surplus", "discarded", "late", "shut_out"]
"""`surplus`: no batch needs the group, or its group the member. `discarded`: an update or a resume starts them over.
`late`: the ticket was issued again before its tokens arrived. `shut_out`: a remote host is not believed."""
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
COUNTS = (
    "groups_issued", "groups_consumed", "groups_resident", "tokens_generated", "tokens_consumed", "tokens_resident",
    *(f"{unit}_dropped_{reason}" for reason in DROP_REASONS for unit in ("groups", "tokens")),
)  # fmt: skip


class Ledger:
    """Counts issued groups and generated tokens, and how many are consumed or, by reason, dropped.

    All other groups must be resident in the buffer. FATE is `consumed` or `dropped_REASON`. `measured_FATE` counts the
    groups with a finished member. `length_FATE` and `reward_FATE` sum their means over finished members.
    `responses_*` and `rewards_*` count single responses: `trained`, or `lost` for every reason.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        """All counts. A resumed run continues from them."""

    def issue(self) -> None:
        self.counts["groups_issued"] += 1

    def generate(self, num_tokens: int, dropped: DropReason | None = None) -> None:
        """Count tokens that a worker returned. With a reason they are dropped at once."""
        self.counts["tokens_generated"] += num_tokens
        if dropped is not None:
            self.counts[f"tokens_dropped_{dropped}"] += num_tokens

    def lose(self, trajectory: Trajectory, reason: DropReason) -> None:
        """Count a response that its group has no use for. Its tokens are dropped at once."""
        self.generate(trajectory.num_generated, reason)
        self._count_responses("lost", [trajectory])

    def consume(self, members: Collection[Trajectory]) -> None:
        self._end("consumed", members)
        self._count_responses("trained", members)

    def drop(self, reason: DropReason, members: Collection[Trajectory]) -> None:
        """Count a dropped group and the tokens of its finished members."""
        self._end(f"dropped_{reason}", members)
        self._count_responses("lost", members)

    def _count_responses(self, fate: str, trajectories: Collection[Trajectory]) -> None:
        """Count responses with a token, and rewards. An aborted response counts with its tokens so far."""
        lengths = [t.num_generated for t in trajectories if t.num_generated]
        rewards = [t.reward for t in trajectories if not math.isnan(t.reward)]
        self.counts[f"responses_{fate}"] += len(lengths)
        self.counts[f"response_tokens_{fate}"] += sum(lengths)
        self.counts[f"rewards_{fate}"] += len(rewards)
        self.counts[f"reward_sum_{fate}"] += float(sum(rewards))

    def _end(self, fate: str, members: Collection[Trajectory]) -> None:
        lengths, rewards = [t.num_generated for t in members], [t.reward for t in members]
        self.counts[f"groups_{fate}"] += 1
        self.counts[f"tokens_{fate}"] += sum(lengths)
        if members:
            self.counts[f"measured_{fate}"] += 1
            self.counts[f"length_{fate}"] += float(np.mean(lengths))
            self.counts[f"reward_{fate}"] += float(np.mean(rewards))

    def balance(self, groups_resident: int, tokens_resident: int) -> Counter[str]:
        """Return all COUNTS since the start of the run, and the sums of lengths and rewards.

        Raises RuntimeError unless issued or generated = consumed + dropped + resident.
        """
        counts = self.counts.copy()
        counts["groups_resident"] = groups_resident
        counts["tokens_resident"] = tokens_resident
        for unit, source in (("groups", "issued"), ("tokens", "generated")):
            dropped = sum(counts[f"{unit}_dropped_{reason}"] for reason in DROP_REASONS)
            total, consumed, resident = (
                counts[f"{unit}_{name}"] for name in (source, "consumed", "resident")
            )
            if total != consumed + dropped + resident:
                raise RuntimeError(
                    f"the ledger of {unit} does not balance: {source} {total} ≠ "
                    f"consumed {consumed} + dropped {dropped} + resident {resident}"
                )
        return counts


def ledger_metrics(counts: Counter[str]) -> Measured:
    """Return the metrics of a ledger's `counts`: COUNTS, and how trained data differ from drawn data.

    `dropped/REASON_length_ratio` is the ratio of their mean response lengths. `dropped/REASON_reward_gap` is the
    difference of their mean rewards. Both are over finished members of dropped and of consumed groups.
    `bias/*` is the mean of trained responses minus that of all trained or lost ones. An aborted response counts with
    its tokens so far. So its length is too small, and the true difference of lengths is at most this metric. Responses
    without a token are left out, and so are missing rewards.
    """
    measured: Measured = {f"ledger/{name}": counts[name] for name in COUNTS}
    measured["tokens/generated"] = counts["tokens_generated"]
    for reason in DROP_REASONS:
        for name, quantity, compare in (
            ("length_ratio", "length", operator.truediv),
            ("reward_gap", "reward", operator.sub),
        ):
            dropped, consumed = (
                Mean(counts[f"{quantity}_{fate}"], counts[f"measured_{fate}"])
                for fate in (f"dropped_{reason}", "consumed")
            )
            measured[f"dropped/{reason}_{name}"] = Comparison(compare, dropped, consumed)
    for name, total, number in (
        ("length", "response_tokens", "responses"),
        ("reward", "reward_sum", "rewards"),
    ):
        trained, lost = (
            Mean(counts[f"{total}_{fate}"], counts[f"{number}_{fate}"])
            for fate in ("trained", "lost")
        )
        measured[f"bias/{name}_trained_minus_drawn"] = Comparison(
            operator.sub, trained, trained + lost
        )
    return measured

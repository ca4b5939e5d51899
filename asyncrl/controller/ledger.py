"""Where every group and every generated token went. Pure counting."""

import operator
from collections import Counter
from collections.abc import Collection
from typing import Literal, get_args

import numpy as np

from asyncrl.records import Trajectory
from asyncrl.runlog.metrics import Comparison, Mean, Measured, Sum

DropReason = Literal["stale", "filtered", "failed", "aborted", "late", "shut_out"]
"""`late`: tokens of a ticket that was issued again meanwhile; `shut_out`: of a remote host that is not believed."""
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
COUNTS = (
    "groups_issued", "groups_consumed", "groups_resident", "tokens_generated", "tokens_consumed", "tokens_resident",
    *(f"{unit}_dropped_{reason}" for reason in DROP_REASONS for unit in ("groups", "tokens")),
)  # fmt: skip


class Ledger:
    """Counts groups that are issued and tokens that are generated, until they are consumed or, for a reason, dropped.

    All others must be resident in the buffer. FATE is `consumed` or `dropped_REASON`. `measured_FATE` counts the groups
    with any finished member. `length_FATE` and `reward_FATE` add up their means over finished members. A member that
    still ran has no length and no reward.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        """All that was counted, which a resumed run counts on from."""

    def issue(self) -> None:
        """Count a group that was admitted."""
        self.counts["groups_issued"] += 1

    def generate(self, num_tokens: int, dropped: DropReason | None = None) -> None:
        """Count tokens that a worker returned; given a reason, they are dropped as they come."""
        self.counts["tokens_generated"] += num_tokens
        if dropped is not None:
            self.counts[f"tokens_dropped_{dropped}"] += num_tokens

    def consume(self, members: Collection[Trajectory]) -> None:
        """Count a group that went to the trainer, with its tokens."""
        self._end("consumed", members)

    def drop(self, reason: DropReason, members: Collection[Trajectory]) -> None:
        """Count a resident group that was dropped, with the tokens of the members it had."""
        self._end(f"dropped_{reason}", members)

    def _end(self, fate: str, members: Collection[Trajectory]) -> None:
        lengths, rewards = [t.num_generated for t in members], [t.reward for t in members]
        self.counts[f"groups_{fate}"] += 1
        self.counts[f"tokens_{fate}"] += sum(lengths)
        if members:
            self.counts[f"measured_{fate}"] += 1
            self.counts[f"length_{fate}"] += float(np.mean(lengths))
            self.counts[f"reward_{fate}"] += float(np.mean(rewards))

    def balance(self, groups_resident: int, tokens_resident: int) -> Counter[str]:
        """All COUNTS since the start of the run, issued or generated = consumed + dropped + resident, and the sums.

        Raises RuntimeError if the two sides differ.
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
    """Return the metrics of a ledger's `counts`: COUNTS, and how groups dropped so far differ from those consumed.

    `dropped/REASON_length_ratio` is the ratio of their mean response lengths; `dropped/REASON_reward_gap` is the
    difference of their mean rewards. Both are over members that had finished.
    """
    measured: Measured = {f"ledger/{name}": Sum(counts[name]) for name in COUNTS}
    measured["tokens/generated"] = Sum(counts["tokens_generated"])
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
    return measured

"""Where every group and every generated token went. Pure counting."""

from typing import Literal, get_args

DropReason = Literal["stale", "filtered", "failed", "aborted", "late", "shut_out"]
"""`late`: tokens of a ticket that was issued again meanwhile; `shut_out`: of a machine that is not believed."""
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
COUNTS = (
    "groups_issued", "groups_consumed", "groups_resident", "tokens_generated", "tokens_consumed", "tokens_resident",
    *(f"{unit}_dropped_{reason}" for reason in DROP_REASONS for unit in ("groups", "tokens")),
)  # fmt: skip


class Ledger:
    """Counts groups that are issued and tokens that are generated, until they are consumed or, for a reason, dropped.

    What is neither must be resident: in the buffer, which alone knows how much that is.
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)
        """All that was counted, which a resumed run counts on from."""

    def issue(self) -> None:
        """Count a group that was admitted."""
        self.counts["groups_issued"] += 1

    def generate(self, num_tokens: int, dropped: DropReason | None = None) -> None:
        """Count tokens that a worker returned; given a reason, they are dropped as they come."""
        self.counts["tokens_generated"] += num_tokens
        if dropped is not None:
            self.counts[f"tokens_dropped_{dropped}"] += num_tokens

    def consume(self, num_tokens: int) -> None:
        """Count a group that went to the trainer, with its tokens."""
        self.counts["groups_consumed"] += 1
        self.counts["tokens_consumed"] += num_tokens

    def drop(self, reason: DropReason, num_tokens: int) -> None:
        """Count a resident group that was dropped, with the tokens of the members it had."""
        self.counts[f"groups_dropped_{reason}"] += 1
        self.counts[f"tokens_dropped_{reason}"] += num_tokens

    def balance(self, groups_resident: int, tokens_resident: int) -> dict[str, int]:
        """All COUNTS since the start of the run: issued or generated = consumed + dropped + resident.

        Raises RuntimeError if the two sides differ.
        """
        counts = {**self.counts, "groups_resident": groups_resident, "tokens_resident": tokens_resident}
        for unit, source in (("groups", "issued"), ("tokens", "generated")):
            dropped = sum(counts[f"{unit}_dropped_{reason}"] for reason in DROP_REASONS)
            total, consumed, resident = (counts[f"{unit}_{name}"] for name in (source, "consumed", "resident"))
            if total != consumed + dropped + resident:
                raise RuntimeError(
                    f"the ledger of {unit} does not balance: {source} {total} ≠ "
                    f"consumed {consumed} + dropped {dropped} + resident {resident}"
                )
        return counts

"""Counts of failed responses and groups, with reasons."""

import re
from dataclasses import dataclass, field

REPORTED_SHARE = 0.01
"""Share of failed responses or groups above which a run reports them."""
MAX_KINDS = 100
"""Most kinds of failures. All further ones are counted as OTHER_KIND."""
OTHER_KIND = "another failure"


@dataclass
class Failures:
    """Responses and groups that have ended, and how many of them failed; plain data."""

    num_responses: int = 0
    """Responses that ended or failed; aborted ones do not count."""
    num_groups: int = 0
    """Groups that finished or failed. A group fails if too many of its members fail."""
    num_failed_groups: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """First message of each kind of failure → number of responses."""

    @property
    def num_failed(self) -> int:
        return sum(self.reasons.values())

    @property
    def is_reported(self) -> bool:
        """True if more than REPORTED_SHARE of the responses or groups failed."""
        return (
            self.num_failed > REPORTED_SHARE * self.num_responses
            or self.num_failed_groups > REPORTED_SHARE * self.num_groups
        )

    def count(self, failure: str) -> None:
        """Count a response that was not aborted. `failure` is its reason if it failed, else empty."""
        self.num_responses += 1
        if failure:
            kind = kind_of(failure)
            message = next((known for known in self.reasons if kind_of(known) == kind), failure)
            if message not in self.reasons and len(self.reasons) >= MAX_KINDS:
                message = OTHER_KIND
            self.reasons[message] = self.reasons.get(message, 0) + 1

    def count_group(self, is_failed: bool) -> None:
        self.num_groups += 1
        self.num_failed_groups += is_failed

    @property
    def commonest(self) -> str:
        """The commonest reason; empty if no response failed."""
        return max(self.reasons, key=self.reasons.get, default="")

    def since(self, earlier: "Failures") -> "Failures":
        return Failures(
            self.num_responses - earlier.num_responses,
            self.num_groups - earlier.num_groups,
            self.num_failed_groups - earlier.num_failed_groups,
            {reason: n - earlier.reasons.get(reason, 0) for reason, n in self.reasons.items()},
        )

    def __str__(self) -> str:
        """Return the shares and the commonest reason, on one line."""
        parts = [(self.num_failed, self.num_responses, "responses")]
        if self.num_groups:
            parts.insert(0, (self.num_failed_groups, self.num_groups, "groups"))
        shares = [
            f"{failed:,} of {ended:,} {unit} ({failed / max(1, ended):.1%})"
            for failed, ended, unit in parts
        ]
        number = self.reasons.get(self.commonest, 0)
        return f"{' and '.join(shares)} failed; most often ({number:,}): {self.commonest}"


def kind_of(failure: str) -> str:
    """Return the kind of a failure: file, line and type of the error. Without these it is the beginning of the message,
    without numbers and quotations."""
    raised = re.match(r".*?, line \d+: [\w.]+", failure)
    return raised[0] if raised else re.sub(r"\d+|'[^']*'", "…", failure)[:80]

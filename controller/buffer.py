"""SampleBuffer: which groups may start, which may be trained on, and where every group and token went.

Pure: no clock, no process, no I/O; the same sequence of calls gives the same answers. B is groups_per_step, α is
async_ratio, t the trainer's policy version, all in steps or groups. Freshness as in ROLL Flash (arXiv 2510.11345):
a bound on every sample, kept by capacity at admission and by order at consumption.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from config import Bounds
from data.records import Group, Trajectory

DropReason = Literal["stale", "filtered", "failed", "aborted"]
DROP_REASONS: tuple[DropReason, ...] = ("stale", "filtered", "failed", "aborted")


@dataclass
class _Resident:
    """A group that holds a place: running while members are missing, finished when all have arrived."""

    version: int
    """Oldest version its tokens can have: of its admission, then of its start; the true one once finished."""
    started: bool = False
    num_failed: int = 0
    members: dict[int, Trajectory] = field(default_factory=dict)
    group: Group | None = None
    rank: int = 0
    """Place in the order in which groups finished."""


class SampleBuffer:
    """Admission, freshness, whole groups and the ledger.

    At most `max_outstanding` groups hold a place: running, finished, or consumed and not yet published. Every group
    consumed at version t has min_version ≥ t − max_staleness; `stale_policy` says what is done about those that would
    come too late: `wait` holds batches back until they are in, `drop` reports them as expired. A group whose responses
    an update started over still counts as old as its first start: that may cost tokens, never the bound.

    `extra_groups` of max_outstanding are there to be given up when a batch is full; `extra_members` of a group run so
    that the first group_size to finish make it. With `gate` the places are all there is, as in AReaL
    (arXiv 2505.24298, its rule ⌊(N − 1)/B⌋ ≤ version + η): groups are consumed as they finish, however old.
    """

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self.trainer_version = 0
        self.published_version = 0
        self._residents: dict[int, _Resident] = {}
        self._unpublished: list[int] = []  # trainer version that each consumed, unpublished group is to make
        # Groups whose other members are only counted, and as what; kept for good, as members may return late.
        self._closed: dict[int, DropReason] = {}
        self._num_finished = 0
        self._may_have_batch = False  # whether anything has happened since `take` had none that could give it one
        self._issued = 0
        self._groups: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    # Admission

    def num_free_places(self) -> int:
        """Groups that may be admitted now; none while what is sampled now would be too old for every later batch."""
        if (
            self.bounds.stale_policy != "gate"
            and self.published_version + self.bounds.max_staleness < self.trainer_version
        ):
            return 0
        return self.bounds.max_outstanding - len(self._residents) - len(self._unpublished)

    def admit(self, group_id: int) -> int:
        """Give a place to a new group. Returns the version that its tokens must have at least.

        Raises RuntimeError if there is no place, or if the id was used before.
        """
        if self.num_free_places() < 1:
            raise RuntimeError(
                f"group {group_id} has no place: all {self.bounds.max_outstanding} are taken, {self.ledger()}"
            )
        if group_id in self._residents or group_id in self._closed:
            raise RuntimeError(f"group {group_id} was admitted before")
        self._residents[group_id] = _Resident(self.published_version)
        self._issued += 1
        return self.published_version

    def start(self, group_id: int, version: int) -> None:
        """Note that a worker with `version` takes a member; the first to be taken makes the group that much fresher."""
        resident = self._residents[group_id]
        if not resident.started:
            resident.started, resident.version = True, max(resident.version, version)
            self._may_have_batch = True

    def min_version(self, group_id: int) -> int:
        """Version that further members of a resident group must have at least, as that of the first is counted on."""
        return self._residents[group_id].version

    def add(self, trajectory: Trajectory) -> Group | None:
        """Take in a trajectory that finished. Returns its group if this is the last member it needs.

        One of a group that is finished or dropped is only counted. Raises RuntimeError for a group that was never
        admitted, a member that is there already, an aborted trajectory, or a version older than the group's start.
        """
        self._tokens["generated"] += trajectory.num_generated
        if trajectory.group_id in self._closed:
            self._tokens[self._closed[trajectory.group_id]] += trajectory.num_generated
            return None
        resident = self._residents.get(trajectory.group_id)
        self._check_belongs(trajectory, resident)
        resident.members[trajectory.member] = trajectory
        if len(resident.members) < self.bounds.group_size:
            return None
        self._finish(trajectory.group_id, resident)
        return resident.group

    def _check_belongs(self, trajectory: Trajectory, resident: _Resident | None) -> None:
        who = f"trajectory {trajectory.ticket_id} of group {trajectory.group_id}"
        if resident is None:
            raise RuntimeError(f"{who}, which is not resident")
        if trajectory.member in resident.members:
            raise RuntimeError(f"{who}: member {trajectory.member} arrived twice")
        if trajectory.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"{who} is {trajectory.finish_reason}, and its group waits for it")
        if trajectory.min_version < resident.version:
            raise RuntimeError(
                f"{who} has a token of version {trajectory.min_version}, but its group was started at version "
                f"{resident.version}"
            )

    def _finish(self, group_id: int, resident: _Resident) -> None:
        members = tuple(resident.members[i] for i in sorted(resident.members))
        resident.group = Group(group_id, members)
        resident.version = resident.group.min_version
        resident.rank = self._num_finished
        self._may_have_batch = True
        self._num_finished += 1
        if self.bounds.extra_members:
            self._closed[group_id] = "aborted"

    def add_failed(self, trajectory: Trajectory) -> bool:
        """Count a trajectory that failed. Returns whether its group can still get all the members it needs."""
        self._tokens["generated"] += trajectory.num_generated
        self._tokens[self._closed.get(trajectory.group_id, "failed")] += trajectory.num_generated
        resident = self._residents.get(trajectory.group_id)
        if resident is None or resident.group is not None:
            return True
        resident.num_failed += 1
        return resident.num_failed <= self.bounds.extra_members

    def count_discarded(self, num_tokens: int) -> None:
        """Count tokens of responses that were started over."""
        self._tokens["generated"] += num_tokens
        self._tokens["aborted"] += num_tokens

    # Consumption

    def take(self) -> list[Group] | None:
        """The next batch of B groups, oldest version first, or None while it must be waited for.

        The groups leave the buffer and keep their places until `publish`. Under `wait` a batch is given only if those
        left behind can still be consumed in time, B a step, earliest deadline first; taking the oldest finished groups
        is the choice that leaves the most room, so if this one does not do, none does, and a running group must be
        waited for. Raises RuntimeError if a group would break the bound.
        """
        batch = self._next_batch() if self._may_have_batch else None
        self._may_have_batch = batch is not None and self._are_left_in_time(batch)
        if not self._may_have_batch:
            return None
        groups = [self._residents.pop(group_id).group for group_id in batch]
        for group in groups:
            self._check_fresh(group)
            self._groups["consumed"] += 1
            self._tokens["consumed"] += group.num_generated
        self.trainer_version += 1
        self._unpublished += [self.trainer_version] * len(groups)
        return groups

    def surplus(self) -> list[int]:
        """Groups to give up, at most extra_groups of them, so that `take` need not wait for them or for others.

        Running ones go first. Empty if there is no batch yet, if none need be given up, or if it would not help.
        """
        batch = self._next_batch() if self.bounds.extra_groups else None
        too_late = [] if batch is None else self._left_too_late(batch)
        return too_late if len(too_late) <= self.bounds.extra_groups else []

    def _next_batch(self) -> list[int] | None:
        is_gate = self.bounds.stale_policy == "gate"
        finished = sorted(
            (resident.rank if is_gate else resident.version, group_id)
            for group_id, resident in self._residents.items()
            if resident.group is not None
        )
        if len(finished) < self.bounds.groups_per_step:
            return None
        return [group_id for _, group_id in finished[: self.bounds.groups_per_step]]

    def _are_left_in_time(self, batch: list[int]) -> bool:
        """Whether all groups outside `batch` can be consumed in time, B a step."""
        if self.bounds.stale_policy != "wait":
            return True
        versions = Counter(self._residents[group_id].version for group_id in self._residents.keys() - batch)
        num_due = 0
        for version in sorted(versions):
            num_due += versions[version]
            if num_due > self.bounds.groups_per_step * (version + self.bounds.max_staleness - self.trainer_version):
                return False
        return True

    def _left_too_late(self, batch: list[int]) -> list[int]:
        """Groups, as few as possible, without which the others outside `batch` can be consumed in time."""
        if self._are_left_in_time(batch):
            return []
        left = self._residents.keys() - batch
        kept, too_late = [], []
        for version, group_id in sorted((self._residents[group_id].version, group_id) for group_id in left):
            kept.append(group_id)
            steps_left = version + self.bounds.max_staleness - self.trainer_version
            if len(kept) > self.bounds.groups_per_step * steps_left:
                running = [i for i in kept if self._residents[i].group is None]
                too_late.append((running or kept)[-1])
                kept.remove(too_late[-1])
        return too_late

    def _check_fresh(self, group: Group) -> None:
        staleness = self.trainer_version - group.min_version
        is_bounded = self.bounds.stale_policy != "gate"
        if staleness < 0 or (is_bounded and staleness > self.bounds.max_staleness):
            raise RuntimeError(
                f"group {group.group_id} has tokens of version {group.min_version} at trainer version "
                f"{self.trainer_version}: staleness {staleness} is outside 0 … {self.bounds.max_staleness}"
            )

    def publish(self, trainer_version: int) -> None:
        """Note that the step which made `trainer_version` has had its weights published (publish_delay steps late).

        Frees the places of all groups consumed up to that step.
        """
        self.published_version = max(self.published_version, trainer_version - self.bounds.publish_delay)
        self._unpublished = [version for version in self._unpublished if version > trainer_version]

    # Dropping

    def expired(self) -> list[int]:
        """Groups that no later batch can hold under `drop`: their oldest token would be beyond the bound."""
        if self.bounds.stale_policy != "drop":
            return []
        oldest = self.trainer_version - self.bounds.max_staleness
        return [group_id for group_id, resident in self._residents.items() if resident.version < oldest]

    def drop(self, group_id: int, reason: DropReason) -> None:
        """Take a resident group out, whole, and give its place back."""
        resident = self._residents.pop(group_id)
        self._may_have_batch = True
        self._closed[group_id] = reason
        self._groups[reason] += 1
        self._tokens[reason] += sum(t.num_generated for t in resident.members.values())

    def is_running(self, group_id: int) -> bool:
        """Whether the group holds a place and waits for members."""
        return group_id in self._residents and self._residents[group_id].group is None

    # Ledger

    def ledger(self) -> dict[str, int]:
        """Where every group and generated token is: issued or generated = consumed + dropped + resident.

        Raises RuntimeError if the two sides differ.
        """
        arrived = [t for resident in self._residents.values() for t in resident.members.values()]
        counts = {
            "groups_issued": self._issued,
            "groups_consumed": self._groups["consumed"],
            "groups_resident": len(self._residents),
            "tokens_generated": self._tokens["generated"],
            "tokens_consumed": self._tokens["consumed"],
            "tokens_resident": sum(t.num_generated for t in arrived),
        }
        for reason in DROP_REASONS:
            counts[f"groups_dropped_{reason}"] = self._groups[reason]
            counts[f"tokens_dropped_{reason}"] = self._tokens[reason]
        _check_balance(counts, "groups", "issued")
        _check_balance(counts, "tokens", "generated")
        return counts


def _check_balance(counts: dict[str, int], unit: str, source: str) -> None:
    dropped = sum(counts[f"{unit}_dropped_{reason}"] for reason in DROP_REASONS)
    consumed, resident = counts[f"{unit}_consumed"], counts[f"{unit}_resident"]
    if counts[f"{unit}_{source}"] != consumed + dropped + resident:
        raise RuntimeError(
            f"the ledger of {unit} does not balance: {source} {counts[f'{unit}_{source}']} ≠ "
            f"consumed {consumed} + dropped {dropped} + resident {resident}"
        )

"""SampleBuffer: which groups may start, and which may be trained on.

The obvious design is a queue of finished groups that drops what is older than max_staleness:

    while trainer_version - (group := queue.get()).min_version > max_staleness:
        continue

It drops long responses more often than short ones. This biases what is learnt, and bounds nothing that still runs. So
a group is given a place before it starts, and a batch waits for groups that would come too late for the next.

Pure: no clock, no process, no I/O; the same calls give the same answers. B is groups_per_step, t the trainer's policy
version. Freshness as in ROLL Flash (arXiv 2510.11345): a bound on every sample.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from asyncrl.config import Config
from asyncrl.controller.ledger import DropReason, Ledger
from asyncrl.records import Group, Trajectory


@dataclass
class Resident:
    """A group that holds a place: running while members are missing, finished when all have arrived."""

    problem: int
    """Index of its problem in the task."""
    version: int
    """Oldest version that its tokens can have: that of its admission, then of its start; the true one once finished."""
    started: bool = False
    num_failed: int = 0
    members: dict[int, Trajectory] = field(default_factory=dict)

    @property
    def num_generated(self) -> int:
        return sum(trajectory.num_generated for trajectory in self.members.values())


@dataclass
class BufferState:
    """A buffer in plain data."""

    trainer_version: int
    """All steps until it were published."""
    residents: dict[int, Resident]
    """They may be more than there are places for on this node. Nothing new is admitted until they are consumed."""
    ledger: dict[str, int | float]


class SampleBuffer:
    """Admits groups, makes them whole, and gives batches in which no token is too old.

    At most `max_outstanding_groups` hold a place: running, finished, or consumed and not yet published. Every group
    consumed at version t has min_version ≥ t − max_staleness; `stale_policy` says what is done about those that would
    come too late: `wait` holds batches back until they are in, `drop` reports them as expired, and `gate` consumes
    the oldest finished groups, however old, so that places are all there is (AReaL, arXiv 2505.24298). If an update
    restarts a group's responses, the group keeps the age of its first start. This can waste tokens, but it never breaks
    the bound.
    `extra_groups` of them are there to be given up when a batch is full; `extra_members` of a group run so that the
    first group_size to finish make it.
    """

    def __init__(self, config: Config):
        """`config` is that of the node: see Config.of_node."""
        self.config = config
        self.trainer_version = 0
        self._last_published = 0
        """Trainer version until which all consumed groups have given back their places."""
        self._residents: dict[int, Resident] = {}
        # Groups whose other members are only counted, and as what; kept for good, as members may return late.
        self._closed: dict[int, DropReason] = {}
        # whether anything has happened since `find_batch` found none
        self._may_have_batch = False
        self.ledger = Ledger()

    def state(self) -> BufferState:
        """All that a resumed run needs of the buffer. Every batch counts as published; see `restore`."""
        residents = {
            group_id: replace(resident, members=dict(resident.members))
            for group_id, resident in self._residents.items()
        }
        return BufferState(self.trainer_version, residents, dict(self.ledger.counts))

    def restore(self, state: BufferState) -> None:
        """Continue from a `state`, whose residents the buffer keeps. No member of a closed group can come any more."""
        self.trainer_version = self._last_published = state.trainer_version
        self.ledger.counts.update(state.ledger)
        self._residents = dict(state.residents)
        self._may_have_batch = True

    @property
    def _is_bounded(self) -> bool:
        return self.config.stale_policy != "gate"

    @property
    def oldest_to_start(self) -> int:
        """Oldest version with which a new group may start: the newest that was published, publish_delay steps late."""
        return max(0, self._last_published - self.config.publish_delay)

    # Admission

    def num_free_places(self) -> int:
        """Groups that may be admitted now; none while what is sampled now would be too old for every later batch."""
        if (
            self._is_bounded
            and self.oldest_to_start + self.config.max_staleness < self.trainer_version
        ):
            return 0
        num_unpublished = self.config.groups_per_step * (
            self.trainer_version - self._last_published
        )
        return self.config.max_outstanding_groups - len(self._residents) - num_unpublished

    def admit(self, group_id: int, problem: int) -> int:
        """Give a place to a new group, whose id is new, of the problem with an index. Returns the version that its
        tokens must have at least."""
        self._residents[group_id] = Resident(problem, self.oldest_to_start)
        self.ledger.issue()
        return self.oldest_to_start

    def start(self, group_id: int, version: int) -> None:
        """Note that a worker with `version` takes a member; the first to be taken makes the group that much fresher."""
        resident = self._residents[group_id]
        if not resident.started:
            resident.started, resident.version = True, max(resident.version, version)
            self._may_have_batch = True

    def min_version(self, group_id: int) -> int:
        """Version that further members of a running group need at least, as that of the first is counted on; else 0."""
        # once: the swarm's thread asks while others drop groups
        resident = self._residents.get(group_id)
        return 0 if resident is None or self._is_finished(resident) else resident.version

    def add(self, trajectory: Trajectory) -> Group | None:
        """Take in a trajectory that finished. Returns its group if this is the last member it needs.

        A trajectory of a group that is finished or dropped is only counted. Raises RuntimeError for one that was never
        admitted, a member that is there already, an aborted trajectory, or a version older than the group's start.
        """
        self.ledger.generate(trajectory.num_generated, self._closed.get(trajectory.group_id))
        if trajectory.group_id in self._closed:
            return None
        resident = self._residents.get(trajectory.group_id)
        self._check_belongs(trajectory, resident)
        resident.members[trajectory.member] = trajectory
        if not self._is_finished(resident):
            return None
        self._may_have_batch = True
        if self.config.extra_members:
            self._closed[trajectory.group_id] = "aborted"
        group = self.group(trajectory.group_id)
        resident.version = group.min_version
        return group

    def group(self, group_id: int) -> Group:
        """Return a finished group."""
        resident = self._residents[group_id]
        members = tuple(resident.members[i] for i in sorted(resident.members))
        return Group(group_id, members, resident.problem)

    def _is_finished(self, resident: Resident) -> bool:
        return len(resident.members) == self.config.group_size

    def _check_belongs(self, trajectory: Trajectory, resident: Resident | None) -> None:
        who = f"trajectory {trajectory.ticket_id} of group {trajectory.group_id}"
        if resident is None:
            raise RuntimeError(f"{who}, which is not resident")
        if trajectory.member in resident.members:
            raise RuntimeError(f"{who}: member {trajectory.member} arrived twice")
        if trajectory.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"{who} is {trajectory.finish_reason}, and its group waits for it")
        if (oldest := trajectory.min_version) < (start := resident.version):
            raise RuntimeError(
                f"{who} has a token of version {oldest}, but its group was started at version {start}"
            )

    def add_failed(self, trajectory: Trajectory) -> bool:
        """Count a trajectory that failed. Returns whether its group can still get all the members it needs."""
        self.ledger.generate(
            trajectory.num_generated, self._closed.get(trajectory.group_id, "failed")
        )
        resident = self._residents.get(trajectory.group_id)
        if resident is None or self._is_finished(resident):
            return True
        resident.num_failed += 1
        return resident.num_failed <= self.config.extra_members

    # Consumption

    def find_batch(self) -> list[int] | None:
        """Find the next batch of B groups, oldest version first, or return None while it must be waited for.

        Under `wait` those left behind must still come in time. Taking the oldest finished groups leaves the most room
        for them: if this batch does not do, none does, and a running group must be waited for. Raises RuntimeError if
        a group would break the bound.
        """
        batch = self._next_batch() if self._may_have_batch else None
        self._may_have_batch = batch is not None and next(self._left_too_late(batch), None) is None
        if not self._may_have_batch:
            return None
        for group_id in batch:
            self._check_fresh(group_id)
        return batch

    def consume(self, batch: list[int]) -> list[Group]:
        """Take out and return the groups of a batch: they are trained on now, and keep their places until `publish`."""
        groups = [self.group(group_id) for group_id in batch]
        self.trainer_version += 1
        for group in groups:
            del self._residents[group.group_id]
            self.ledger.consume(group.trajectories)
        return groups

    def surplus(self) -> list[int]:
        """Groups to give up so that a batch is there: at most extra_groups of them, or none if that does not do."""
        batch = self._next_batch() if self.config.extra_groups else None
        too_late = [] if batch is None else list(self._left_too_late(batch))
        return too_late if len(too_late) <= self.config.extra_groups else []

    def _next_batch(self) -> list[int] | None:
        finished = [
            group_id
            for group_id, resident in self._residents.items()
            if self._is_finished(resident)
        ]
        if len(finished) < self.config.groups_per_step:
            return None
        return sorted(finished, key=self._age)[: self.config.groups_per_step]

    def _age(self, group_id: int) -> tuple[int, int]:
        """Return what sorts groups by age, the oldest first."""
        return self._residents[group_id].version, group_id

    def _left_too_late(self, batch: list[int]) -> Iterator[int]:
        """Groups, as few as possible and running ones first, without which the others outside `batch` can all be
        consumed in time: B a step, earliest deadline first. If that order misses a deadline, every order does: the
        groups that are due until then are more than the steps until then can take."""
        if self.config.stale_policy != "wait":
            return
        kept: list[int] = []
        for group_id in sorted(self._residents.keys() - batch, key=self._age):
            kept.append(group_id)
            deadline = self._residents[group_id].version + self.config.max_staleness
            if len(kept) > self.config.groups_per_step * (deadline - self.trainer_version):
                running = [group_id for group_id in kept if self.is_running(group_id)]
                too_late = (running or kept)[-1]
                kept.remove(too_late)
                yield too_late

    def _check_fresh(self, group_id: int) -> None:
        version = self._residents[group_id].version
        staleness = self.trainer_version - version
        if staleness < 0 or (self._is_bounded and staleness > self.config.max_staleness):
            raise RuntimeError(
                f"group {group_id} has tokens of version {version} at trainer version "
                f"{self.trainer_version}: staleness {staleness} is outside 0 … {self.config.max_staleness}"
            )

    def publish(self, trainer_version: int) -> None:
        """Give back the places of all groups consumed up to the step that made `trainer_version`, as that is published
        now, publish_delay steps late."""
        self._last_published = trainer_version

    # Dropping

    def expired(self) -> list[int]:
        """Groups under `drop` that no later batch can hold: their oldest token would be beyond the bound."""
        if self.config.stale_policy != "drop":
            return []
        oldest = self.trainer_version - self.config.max_staleness
        return [
            group_id for group_id, resident in self._residents.items() if resident.version < oldest
        ]

    def drop(self, group_id: int, reason: DropReason) -> int:
        """Take a resident group out, whole, and give its place back. Returns its problem."""
        resident = self._residents.pop(group_id)
        self._may_have_batch = True
        self._closed[group_id] = reason
        self.ledger.drop(reason, resident.members.values())
        return resident.problem

    def is_running(self, group_id: int) -> bool:
        """Whether the group holds a place and waits for members."""
        # once: the swarm's thread asks while others drop groups
        resident = self._residents.get(group_id)
        return resident is not None and not self._is_finished(resident)

    def balance(self) -> Counter[str]:
        """Return where every group and token is. Ledger.balance raises RuntimeError if any is not accounted for."""
        num_tokens = sum(resident.num_generated for resident in self._residents.values())
        return self.ledger.balance(len(self._residents), num_tokens)

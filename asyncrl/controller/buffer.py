"""SampleBuffer decides which groups may start, and which may be trained on.

The obvious design is a queue of finished groups that drops groups older than max_staleness:

    while policy_version - (group := queue.get()).oldest_version > max_staleness:
        continue

It drops long responses more often than short ones, and so biases training. It does not limit running groups either. So
a group gets a place before it starts. A batch waits for groups that would be too old for the next one.

The buffer has no clock, process or I/O. The same calls give the same answers. B is groups_per_step, and t is
`num_consumed_batches`. So policy version t trains on the next batch. docs/reference.md#words defines the versions.
Freshness is a bound on every sample, as in ROLL Flash (arXiv 2510.11345).

The proof of the bound: at t each resident group has v ≥ t − max_staleness. v is its `oldest_possible_version`.

1. Admission: places are free only while a new group's v satisfies this (`num_free_places`). If a batch is held, v must
   satisfy it for t + 1.
2. Assignment: the first worker that gets a ticket of a group raises v to its own version (`note_assignment`). Later
   members need at least v (`needed_version_of_group`), and weights never become older. So no token is older than v.
3. Deadline: a batch increases t by one. Under `wait` it is taken only if the claim then holds for every group that
   stays (`too_late_after`). Under `drop` the groups that break the claim are dropped afterwards (`expired`).
4. Check: `add` refuses a token older than v, and `find_batch` a group that breaks the claim. A mistake ends the run.

With publish_delay K each announcement frees places as if K were 0. Only its weights, and so v, are K steps older.
max_staleness has K for that.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from asyncrl.config import Config
from asyncrl.controller.ledger import DropReason, Ledger
from asyncrl.records import Group, Trajectory


@dataclass
class Resident:
    """A group that holds a place. It is unfinished until the last member that it needs arrives."""

    problem: int
    """Index of its problem in the task."""
    oldest_possible_version: int
    """Oldest version that its tokens can have: at first of its admission, then of its first assignment; exact once
    finished."""
    is_assigned: bool = False
    """True if a worker has, or had, a ticket of it."""
    num_failed: int = 0
    members: dict[int, Trajectory] = field(default_factory=dict)

    @property
    def num_generated(self) -> int:
        return sum(trajectory.num_generated for trajectory in self.members.values())


@dataclass
class BufferState:
    """A buffer in plain data."""

    num_consumed_batches: int
    """See SampleBuffer. A resume publishes before it admits groups, so all these batches count as announced."""
    residents: dict[int, Resident]
    """Groups, perhaps more than this node has places. Then no group is admitted until enough are consumed."""
    ledger: dict[str, int | float]


class SampleBuffer:
    """Admits groups, collects their members, and returns batches without tokens that are too old.

    At most `max_outstanding_groups` hold a place: running, finished, or consumed and not yet announced. Every group
    that policy version t trains on has oldest_version ≥ t − max_staleness. `stale_policy` decides about groups that
    would come too late. `wait` delays batches until they have arrived. `drop` reports them as expired. `gate` consumes
    the oldest finished groups, however old, so only places limit staleness (AReaL, arXiv 2505.24298).
    If an update restarts a group's responses, the group keeps the age of its first start. This can waste tokens, but it
    never breaks the bound. `extra_groups` more groups run, and groups that would be late are given up. `extra_members`
    more members of a group run, and the first group_size to finish make the group.
    """

    def __init__(self, node_config: Config):
        """`node_config` is from Config.for_node: the groups of a step are shared among nodes."""
        self.node_config = node_config
        self.num_consumed_batches = 0
        """It is the policy's version between two steps. During a step it is one more."""
        self._num_batches_at_announcement = 0
        """Batches that were consumed before the last announcement was made. Their groups have freed their places."""
        self.residents: dict[int, Resident] = {}
        self.held: list[int] = []
        """Groups of a batch that was found. It waits for other nodes, or for a check of hosts. They are resident until
        they are consumed."""
        self._fate_of_later_members: dict[int, DropReason] = {}
        """Reason for dropping later members, by group. It is the reason of the group's drop, or `surplus` for a
        finished group with extra_members. Such a group can still be resident. Entries stay, because a member can arrive
        at any time."""
        # False if `find_batch` returned None and the residents have not changed since
        self._may_have_batch = False
        self.ledger = Ledger()

    def state(self) -> BufferState:
        """Return the state that a resumed run needs. Every consumed batch counts as announced, as in BufferState."""
        residents = {
            group_id: replace(resident, members=dict(resident.members))
            for group_id, resident in self.residents.items()
        }
        return BufferState(self.num_consumed_batches, residents, dict(self.ledger.counts))

    def restore(self, state: BufferState) -> None:
        """Continue from a `state`, and keep its residents. No later members come in a resumed run."""
        self.num_consumed_batches = self._num_batches_at_announcement = state.num_consumed_batches
        self.ledger.counts.update(state.ledger)
        self.residents = dict(state.residents)
        self._may_have_batch = True

    @property
    def _is_bounded(self) -> bool:
        return self.node_config.stale_policy != "gate"

    @property
    def admission_version(self) -> int:
        """Oldest version that may start a new group: `due_version` at the last announcement."""
        return self.node_config.due_version(self._num_batches_at_announcement)

    # Admission

    def num_free_places(self) -> int:
        """Return the number of groups that may be admitted now.

        It is 0 while groups that start now would be too old for every later batch. At the end of a run it leaves out
        groups that no step can train on. Then only the last evaluation uses the engines.
        """
        # A group may start while at most ⌈α⌉ consumed batches, plus the allowed suspensions, are unannounced. There are
        # more while an evaluation defers weights. From version K on, K cancels in this comparison. A new group is in
        # no batch before the one after the held batch.
        next_version = self.num_consumed_batches + bool(self.held)
        last_version = self.admission_version + self.node_config.max_staleness
        if self._is_bounded and last_version < next_version:
            return 0
        num_steps_left = self.node_config.steps - self.num_consumed_batches
        if num_steps_left <= 0:
            return 0
        num_unannounced = self.num_consumed_batches - self._num_batches_at_announcement
        num_places = self.node_config.max_outstanding_groups
        num_places -= self.node_config.groups_per_step * num_unannounced
        num_useful = (
            self.node_config.groups_per_step * num_steps_left + self.node_config.num_spare_groups
        )
        return min(num_places, num_useful) - len(self.residents)

    def admit(self, group_id: int, problem: int) -> int:
        """Give a place to a new group with a new id. Return the version that a worker needs to start it."""
        self.residents[group_id] = Resident(problem, self.admission_version)
        self.ledger.issue()
        return self.admission_version

    def note_assignment(self, group_id: int, version: int) -> None:
        """Note that a ticket of a group is assigned to a worker with `version`.

        The first assignment sets the oldest version of the group. Sampling begins later.
        """
        resident = self.residents[group_id]
        if not resident.is_assigned:
            resident.is_assigned = True
            resident.oldest_possible_version = max(resident.oldest_possible_version, version)
            self._may_have_batch = True

    def needed_version_of_group(self, group_id: int) -> int:
        """Return the version that a worker needs to start another member of a running group; else 0."""
        # one look-up, because extras/swarm checks messages of hosts without the lock
        resident = self.residents.get(group_id)
        if resident is None or self._is_finished(resident):
            return 0
        return resident.oldest_possible_version

    def count_aborted(self, trajectory: Trajectory) -> None:
        """Count the tokens of an aborted trajectory. Raises RuntimeError if its group still needs it.

        The dispatcher cancels only the members of a group that was dropped or has finished.
        """
        fate = self._fate_of_later_members.get(trajectory.group_id)
        if fate is None:
            raise RuntimeError(f"{_name(trajectory)} is aborted, but its group needs it")
        self.ledger.lose(trajectory, fate)

    def add(self, trajectory: Trajectory) -> Group | None:
        """Add a finished trajectory. Return its group if this is the last member that the group needs.

        A trajectory of a finished or dropped group is only counted. Raises RuntimeError if its group was never admitted
        or has this member. It is also raised if a token is older than the group's assignment.
        """
        fate = self._fate_of_later_members.get(trajectory.group_id)
        if fate is not None:
            self.ledger.lose(trajectory, fate)
            return None
        self.ledger.generate(trajectory.num_generated)
        resident = self.residents.get(trajectory.group_id)
        self._check_belongs(trajectory, resident)
        resident.members[trajectory.member] = trajectory
        if not self._is_finished(resident):
            return None
        self._may_have_batch = True
        if self.node_config.extra_members:
            self._fate_of_later_members[trajectory.group_id] = "surplus"
        group = self.group(trajectory.group_id)
        resident.oldest_possible_version = group.oldest_version
        return group

    def group(self, group_id: int) -> Group:
        resident = self.residents[group_id]
        members = tuple(resident.members[i] for i in sorted(resident.members))
        return Group(group_id, members, resident.problem)

    def _is_finished(self, resident: Resident) -> bool:
        return len(resident.members) == self.node_config.group_size

    def _check_belongs(self, trajectory: Trajectory, resident: Resident | None) -> None:
        who = _name(trajectory)
        if resident is None:
            raise RuntimeError(f"{who}, which is not resident")
        if trajectory.member in resident.members:
            raise RuntimeError(f"{who}: member {trajectory.member} arrived twice")
        if (oldest := trajectory.oldest_version) < (start := resident.oldest_possible_version):
            raise RuntimeError(
                f"{who} has a token of version {oldest}, but its group was assigned at version {start}"
            )

    def count_failure(self, trajectory: Trajectory) -> bool:
        """Count a failed trajectory. Return whether its group must now be dropped."""
        self.ledger.lose(trajectory, self._fate_of_later_members.get(trajectory.group_id, "failed"))
        resident = self.residents.get(trajectory.group_id)
        if resident is None or self._is_finished(resident):
            return False
        resident.num_failed += 1
        return resident.num_failed > self.node_config.extra_members

    # Consumption

    def find_batch(self) -> list[int] | None:
        """Return the next batch of B groups, oldest version first, or None if it must be waited for.

        Under `wait` all other groups must still meet their deadlines. The oldest finished groups leave the most room
        for them. If this batch leaves too little, every batch does. Raises RuntimeError if a group breaks the bound.
        """
        if not self._may_have_batch:
            return None
        group_ids = self.oldest_finished()
        if group_ids is None or next(self.too_late_after(group_ids), None) is not None:
            self._may_have_batch = False
            return None
        for group_id in group_ids:
            self._check_fresh(group_id)
        return group_ids

    def consume(self, group_ids: list[int]) -> list[Group]:
        """Take out and return the groups of a batch. They keep their places until `free_consumed_places`."""
        groups = [self.group(group_id) for group_id in group_ids]
        self.held = []
        self.num_consumed_batches += 1
        for group in groups:
            del self.residents[group.group_id]
            self.ledger.consume(group.trajectories)
        return groups

    def surplus(self) -> list[int]:
        """Return the groups to give up for a batch; [] if they would be more than extra_groups."""
        group_ids = self.oldest_finished() if self.node_config.extra_groups else None
        too_late = [] if group_ids is None else list(self.too_late_after(group_ids))
        return too_late if len(too_late) <= self.node_config.extra_groups else []

    def oldest_finished(self) -> list[int] | None:
        finished = [
            group_id for group_id, resident in self.residents.items() if self._is_finished(resident)
        ]
        if len(finished) < self.node_config.groups_per_step:
            return None
        return sorted(finished, key=self._age)[: self.node_config.groups_per_step]

    def _age(self, group_id: int) -> tuple[int, int]:
        """Return a sort key: the oldest group comes first."""
        return self.residents[group_id].oldest_possible_version, group_id

    def too_late_after(self, group_ids: list[int]) -> Iterator[int]:
        """Yield the fewest groups to give up so that all others outside the batch `group_ids` meet their deadlines.

        A group's deadline is the last version that may train on it. Unfinished groups are given up first. B groups are
        taken per step, earliest deadline first; if that order misses a deadline, every order does.
        """
        if self.node_config.stale_policy != "wait":
            return
        kept: list[int] = []
        for group_id in sorted(self.residents.keys() - group_ids, key=self._age):
            kept.append(group_id)
            deadline = (
                self.residents[group_id].oldest_possible_version + self.node_config.max_staleness
            )
            # After this batch, deadline − num_consumed_batches batches of B groups are left until the deadline.
            if len(kept) > self.node_config.groups_per_step * (
                deadline - self.num_consumed_batches
            ):
                unfinished = [group_id for group_id in kept if self.is_unfinished(group_id)]
                too_late = (unfinished or kept)[-1]
                kept.remove(too_late)
                yield too_late

    def _check_fresh(self, group_id: int) -> None:
        version = self.residents[group_id].oldest_possible_version
        staleness = self.num_consumed_batches - version
        if staleness < 0 or (self._is_bounded and staleness > self.node_config.max_staleness):
            raise RuntimeError(
                f"group {group_id} has tokens of version {version} at policy version "
                f"{self.num_consumed_batches}: staleness {staleness} is outside 0 … {self.node_config.max_staleness}"
            )

    def free_consumed_places(self, trainer_version: int) -> None:
        """Free the places of all batches up to `trainer_version`: that of the newest Announcement.

        It is up to `publish_delay` steps ahead of the announced weights. Their version is `admission_version` or newer.
        """
        self._num_batches_at_announcement = trainer_version

    # Dropping

    def expired(self) -> list[int]:
        """Return the groups that are too old for every later batch; [] unless stale_policy is `drop`."""
        if self.node_config.stale_policy != "drop":
            return []
        oldest = self.num_consumed_batches - self.node_config.max_staleness
        return [
            group_id
            for group_id, resident in self.residents.items()
            if resident.oldest_possible_version < oldest
        ]

    def drop(self, group_id: int, reason: DropReason) -> int:
        """Remove a whole group and free its place. Return its problem."""
        resident = self.residents.pop(group_id)
        self._may_have_batch = True
        self._fate_of_later_members[group_id] = reason
        self.ledger.drop(reason, resident.members.values())
        return resident.problem

    def is_unfinished(self, group_id: int) -> bool:
        """Return whether a group holds a place and waits for members."""
        # one look-up, because extras/swarm checks messages of hosts without the lock
        resident = self.residents.get(group_id)
        return resident is not None and not self._is_finished(resident)

    def balance(self) -> Counter[str]:
        """Return the ledger with the resident groups and tokens. Raises RuntimeError if it does not balance."""
        num_tokens = sum(resident.num_generated for resident in self.residents.values())
        return self.ledger.balance(len(self.residents), num_tokens)


def _name(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.ticket_id} of group {trajectory.group_id}"

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectories import make_trajectory

from asyncrl.config import Config
from asyncrl.controller.buffer import BufferState, SampleBuffer
from asyncrl.controller.ledger import COUNTS, DROP_REASONS, ledger_metrics
from asyncrl.runlog.metrics import over_nodes
from asyncrl.runlog.plain import decode, encode


def make_buffer(
    groups_per_step=2,
    group_size=2,
    async_ratio=1.0,
    publish_delay=0,
    stale_policy="wait",
    over_sampling=1.0,
    extra_groups=0,
    extra_members=0,
):
    config = Config(
        groups_per_step=groups_per_step,
        async_ratio=async_ratio,
        publish_delay=publish_delay,
        over_sampling=over_sampling,
        extra_groups=extra_groups,
        group_size=group_size,
        stale_policy=stale_policy,
        extra_members=extra_members,
    )
    return SampleBuffer(config)


def finish(buffer, group_id, version=0):
    for member in range(buffer.config.group_size):
        buffer.add(make_trajectory(group_id, member, (version,)))


def take(buffer):
    """Consume the next batch; None if it must be waited for."""
    batch = buffer.find_batch()
    return None if batch is None else buffer.consume(batch)


def test_capacity_is_one_plus_alpha_batches_until_the_weights_are_published():
    buffer = make_buffer(groups_per_step=2, async_ratio=1.5)
    for group_id in range(5):
        buffer.admit(group_id, 0)
    assert buffer.num_free_places() == 0
    finish(buffer, 0)
    finish(buffer, 1)
    assert [g.group_id for g in take(buffer)] == [0, 1]
    assert buffer.num_free_places() == 0
    buffer.publish(trainer_version=1)
    assert buffer.num_free_places() == 2
    assert buffer.admit(5, 0) == 1


def test_a_group_is_consumed_whole_and_in_member_order():
    buffer = make_buffer(groups_per_step=1)
    buffer.admit(0, 0)
    buffer.add(make_trajectory(0, 1))
    assert take(buffer) is None
    buffer.add(make_trajectory(0, 0))
    (group,) = take(buffer)
    assert [t.member for t in group.trajectories] == [0, 1]


def test_under_wait_a_batch_is_held_back_for_a_straggler_that_would_expire():
    """B = 1, α = 1: group 0 straggles while 1 and 2 finish; consuming 2 before 0 would leave 0 two steps stale."""
    buffer = make_buffer(groups_per_step=1)
    buffer.admit(0, 0)
    buffer.admit(1, 0)
    finish(buffer, 1)
    assert [g.group_id for g in take(buffer)] == [1]
    buffer.publish(1)
    assert buffer.admit(2, 0) == 1
    finish(buffer, 2, version=1)
    assert take(buffer) is None
    finish(buffer, 0)
    assert [g.group_id for g in take(buffer)] == [0]


def test_a_group_that_waited_for_a_slot_is_as_fresh_as_its_first_start():
    buffer = make_buffer(groups_per_step=1)
    buffer.admit(0, 0)
    buffer.admit(1, 0)
    finish(buffer, 1)
    take(buffer)
    buffer.publish(1)
    buffer.start(0, version=1)  # no worker had a slot for it before
    buffer.start(0, version=2)
    buffer.admit(2, 0)
    finish(buffer, 2, version=1)
    assert [g.group_id for g in take(buffer)] == [2], "group 0 has a step left"
    with pytest.raises(RuntimeError, match="started at version 1"):
        buffer.add(make_trajectory(0, 0, (0,)))


def test_under_drop_the_straggler_expires_and_its_place_comes_back():
    buffer = make_buffer(groups_per_step=1, stale_policy="drop")
    buffer.admit(0, 0)
    buffer.admit(1, 0)
    finish(buffer, 1)
    take(buffer)
    buffer.publish(1)
    buffer.admit(2, 0)
    finish(buffer, 2, version=1)
    assert [g.group_id for g in take(buffer)] == [2]
    buffer.publish(2)
    assert buffer.expired() == [0]
    buffer.drop(0, "stale")
    assert buffer.num_free_places() == 2
    finish(buffer, 0)  # its members come back late: counted, not trained on
    assert take(buffer) is None
    assert buffer.balance()["tokens_dropped_stale"] == 2


def test_with_alpha_0_and_publish_delay_3_every_group_is_exactly_3_steps_stale():
    buffer = make_buffer(groups_per_step=2, async_ratio=0, publish_delay=3)
    staleness, next_group = [], 0
    for step in range(8):
        while buffer.num_free_places():
            version = buffer.admit(next_group, 0)
            finish(buffer, next_group, version)
            next_group += 1
        staleness.append({step - group.min_version for group in take(buffer)})
        buffer.publish(step + 1)
    assert staleness == [{0}, {1}, {2}, {3}, {3}, {3}, {3}, {3}]


def test_a_trajectory_older_than_its_groups_start_is_refused():
    buffer = make_buffer()
    for group_id in (0, 1):
        buffer.admit(group_id, 0)
        finish(buffer, group_id)
    take(buffer)
    buffer.publish(1)
    buffer.admit(2, 0)
    with pytest.raises(
        RuntimeError,
        match="group 2 has a token of version 0, but its group was started at version 1",
    ):
        buffer.add(make_trajectory(2, 0, (0, 1)))


def test_nothing_is_taken_in_twice():
    buffer = make_buffer()
    buffer.admit(0, 0)
    buffer.add(make_trajectory(0, 0))
    with pytest.raises(RuntimeError, match="member 0 arrived twice"):
        buffer.add(make_trajectory(0, 0))


def test_a_trajectory_of_an_unknown_group_is_refused():
    with pytest.raises(RuntimeError, match="not resident"):
        make_buffer().add(make_trajectory(7, 0))


class SimulatedRun:
    """Drives a SampleBuffer as the controller does, with workers that are slow, late and broken at random."""

    def __init__(self, buffer, seed):
        self.buffer, self.random = buffer, random.Random(seed)
        self.worker_version = 0
        self.running: list[tuple[int, int]] = []
        self.next_group = 0
        self.consumed: list[int] = []
        self.late: list[int] = []
        self.deferred: list[int] = []
        self.can_defer = buffer.config.max_staleness > buffer.config.publish_delay

    def fill(self):
        while self.buffer.num_free_places() > 0:
            version = self.buffer.admit(self.next_group, 0)
            assert version == self.buffer.oldest_to_start <= self.worker_version
            num_members = self.buffer.config.group_size + self.buffer.config.extra_members
            self.running += [(self.next_group, member) for member in range(num_members)]
            self.next_group += 1
        assert self.buffer.num_free_places() == 0

    def start_some(self):
        for group_id, _ in self.running:
            if self.random.random() < 0.5:
                self.buffer.start(group_id, self.worker_version)

    def drop(self, group_id, reason):
        self.buffer.drop(group_id, reason)
        self.running = [item for item in self.running if item[0] != group_id]

    def finish_one(self):
        if not self.running:
            return
        group_id, member = self.running.pop(self.random.randrange(len(self.running)))
        self.buffer.start(group_id, self.worker_version)
        if self.random.random() < 0.05:
            if not self.buffer.add_failed(make_trajectory(group_id, member, (), "failed")):
                self.drop(group_id, "failed")
            self.fill()
            return
        oldest = self.buffer._residents[group_id].version
        versions = sorted(
            self.random.randint(oldest, self.worker_version)
            for _ in range(self.random.randint(1, 3))
        )
        if self.buffer.add(make_trajectory(group_id, member, tuple(versions))) is None:
            return
        late = [item for item in self.running if item[0] == group_id]
        self.running = [item for item in self.running if item[0] != group_id]
        for _, other in late:  # extra members: aborted where they stand, or failing meanwhile
            if self.random.random() < 0.5:
                self.buffer.add(make_trajectory(group_id, other, (self.worker_version,), "aborted"))
            else:
                assert self.buffer.add_failed(
                    make_trajectory(group_id, other, (self.worker_version,), "failed")
                )
        if self.random.random() < 0.2:
            self.drop(group_id, "filtered")
            self.fill()

    def drop_expired(self):
        for group_id in self.buffer.expired():
            self.drop(group_id, "stale")

    def step(self):
        while (batch := self.take()) is None:
            assert self.running, f"no batch, and nothing is running: {self.buffer.balance()}"
            self.finish_one()
        version = self.buffer.trainer_version - 1
        for group in batch:
            assert 0 <= version - group.min_version <= self.buffer.config.max_staleness
        self.consumed += [group.group_id for group in batch]
        self.drop_expired()
        if self.can_defer and self.random.random() < 0.5:
            self.deferred.append(version + 1)  # an evaluation holds the announcement back
        else:
            self.publish(version + 1)
        for _ in range(self.random.randint(0, 6)):
            self.finish_one()
        self.publish_deferred()

    def take(self):
        surplus = self.buffer.surplus()
        for group_id in surplus:
            self.drop(group_id, "aborted")
        batch = take(self.buffer)
        assert batch is not None or not surplus, "groups were given up for nothing"
        ready = self.buffer._next_batch() if batch is None else None
        assert ready is None or next(self.buffer._left_too_late(ready), None) is not None, (
            "a batch was missed"
        )
        return batch

    def publish(self, trainer_version):
        self.deferred.clear()
        self.worker_version = max(
            self.worker_version, trainer_version - self.buffer.config.publish_delay
        )
        self.buffer.publish(trainer_version)
        self.drop_expired()
        self.fill()
        self.start_some()

    def publish_deferred(self):
        if self.deferred:
            self.publish(self.deferred[-1])


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups_per_step=st.integers(1, 4),
    group_size=st.integers(1, 3),
    async_ratio=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0]),
    publish_delay=st.integers(0, 2),
    stale_policy=st.sampled_from(["wait", "drop"]),
    over_sampling=st.sampled_from([1.0, 1.0, 1.5, 2.0, 3.0]),
    extra_groups=st.sampled_from([0, 0, 1, 4]),
    extra_members=st.sampled_from([0, 0, 1, 3]),
)
def test_whatever_the_order_of_arrivals_the_bound_holds_and_nothing_is_lost_or_consumed_twice(
    seed,
    groups_per_step,
    group_size,
    async_ratio,
    publish_delay,
    stale_policy,
    over_sampling,
    extra_groups,
    extra_members,
):
    buffer = make_buffer(
        groups_per_step,
        group_size,
        async_ratio if over_sampling == 1 else 0.0,
        publish_delay,
        stale_policy,
        over_sampling,
        extra_groups,
        extra_members,
    )
    run = SimulatedRun(buffer, seed)
    run.fill()
    for _ in range(8):
        run.step()
        ledger = buffer.balance()  # raises if it does not balance
    dropped = sum(ledger[f"groups_dropped_{reason}"] for reason in DROP_REASONS)
    assert (
        len(run.consumed)
        == len(set(run.consumed))
        == 8 * groups_per_step
        == ledger["groups_consumed"]
    )
    assert run.next_group == len(run.consumed) + dropped + ledger["groups_resident"]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), groups_per_step=st.integers(1, 4), group_size=st.integers(1, 3))
def test_with_alpha_0_every_batch_is_exactly_on_policy(seed, groups_per_step, group_size):
    buffer = make_buffer(groups_per_step, group_size, async_ratio=0)
    run = SimulatedRun(buffer, seed)
    run.fill()
    for step in range(6):
        while (batch := take(buffer)) is None:
            run.finish_one()
        assert {
            v for group in batch for t in group.trajectories for v in t.policy_versions[t.loss_mask]
        } == {step}
        run.publish(step + 1)


def test_extra_groups_are_given_up_when_a_batch_is_full_and_running_ones_first():
    """α = 0: what is left over when the batch is full could never be consumed."""
    buffer = make_buffer(groups_per_step=2, async_ratio=0, extra_groups=2)
    for group_id in range(4):
        buffer.admit(group_id, 0)
    finish(buffer, 3)
    assert buffer.surplus() == [] and take(buffer) is None
    finish(buffer, 1)
    assert sorted(buffer.surplus()) == [0, 2]
    for group_id in buffer.surplus():
        buffer.drop(group_id, "aborted")
    assert [group.group_id for group in take(buffer)] == [1, 3]
    assert buffer.num_free_places() == 0, (
        "what starts before the next version could never be consumed"
    )
    buffer.publish(1)
    assert buffer.num_free_places() == 4


def test_no_more_than_the_extra_groups_are_given_up_for_a_batch():
    buffer = make_buffer(groups_per_step=1, async_ratio=1.0, extra_groups=1)
    for group_id in range(3):
        buffer.admit(group_id, 0)
    finish(buffer, 2)
    assert buffer.surplus() == [1], "one of the two others can still be consumed a step later"


def test_the_first_members_to_finish_make_the_group_and_the_others_are_only_counted():
    buffer = make_buffer(groups_per_step=1, group_size=2, extra_members=2)
    buffer.admit(0, 0)
    assert buffer.add(make_trajectory(0, 3)) is None
    assert buffer.add_failed(make_trajectory(0, 1, (0, 0), "failed")), "two spares, so one may fail"
    group = buffer.add(make_trajectory(0, 0))
    assert [t.member for t in group.trajectories] == [0, 3]
    buffer.add(make_trajectory(0, 2, (0, 0, 0), "aborted"))
    ledger = buffer.balance()
    assert (
        ledger["tokens_dropped_aborted"],
        ledger["tokens_dropped_failed"],
        ledger["tokens_resident"],
    ) == (3, 2, 2)


def test_a_group_fails_with_the_first_member_that_it_cannot_spare():
    buffer = make_buffer(groups_per_step=1, group_size=2, extra_members=1)
    buffer.admit(0, 0)
    assert buffer.add_failed(make_trajectory(0, 0, (), "failed"))
    assert not buffer.add_failed(make_trajectory(0, 1, (), "failed"))


def test_dropped_groups_are_measured_by_their_finished_members_against_those_consumed():
    buffer = make_buffer(groups_per_step=1, group_size=2, async_ratio=4)
    # length and reward of each
    members = {0: ((2, 1.0), (4, 0.0)), 1: ((8, -1.0), (4, -2.0)), 2: ((9, -3.0),), 3: ()}
    for group_id, finished in members.items():
        buffer.admit(group_id, 0)
        for member, (length, reward) in enumerate(finished):
            buffer.add(replace(make_trajectory(group_id, member, (0,) * length), reward=reward))
    assert [group.group_id for group in take(buffer)] == [0]
    for group_id in (1, 2, 3):
        buffer.drop(group_id, "stale")
    again = make_buffer(groups_per_step=1, group_size=2, async_ratio=4)
    again.restore(decode(BufferState, encode(buffer.state())))
    assert again.balance() == buffer.balance()
    ledger = buffer.balance()
    assert ledger["groups_dropped_stale"] == 3 and ledger["measured_dropped_stale"] == 2
    assert (ledger["length_dropped_stale"], ledger["reward_dropped_stale"]) == (6 + 9, -1.5 - 3)
    bias = {"dropped/stale_length_ratio": 7.5 / 3, "dropped/stale_reward_gap": -2.25 - 0.5}
    counts = {f"ledger/{name}": ledger[name] for name in COUNTS}
    expected = counts | bias | {"tokens/generated": ledger["tokens_generated"]}
    assert over_nodes([ledger_metrics(ledger)]) == pytest.approx(expected)
    assert ledger.keys() == {**ledger, **dict.fromkeys(COUNTS, 0)}.keys(), (
        "what was not measured is not there"
    )


@pytest.mark.parametrize(("stale_policy", "worst"), [("wait", 1), ("gate", 7)])
def test_the_gate_bounds_the_mean_staleness_and_the_ledger_the_staleness_of_every_sample(
    stale_policy, worst
):
    """α = η = 1, B = 2: group 0 straggles for six steps, all others finish at once; the gate trains on it."""
    buffer = make_buffer(groups_per_step=2, async_ratio=1.0, stale_policy=stale_policy)
    staleness, next_group = [], 0
    for version in range(20):
        while buffer.num_free_places():
            buffer.admit(next_group, 0)
            if next_group > 0:
                finish(buffer, next_group, version)
            next_group += 1
        if version == 6 and buffer.is_running(0):
            finish(buffer, 0)
        if (batch := take(buffer)) is None:  # only the ledger waits for the straggler
            finish(buffer, 0)
            batch = take(buffer)
        staleness += [version - group.min_version for group in batch]
        buffer.publish(version + 1)
    assert max(staleness) == worst
    assert np.mean(staleness) <= 1.3, "both admit the same number of groups"


def test_over_sampling_consumes_every_group_once_within_the_resumes_allowed():
    buffer = make_buffer(groups_per_step=2, async_ratio=0.0, over_sampling=2.0)
    assert buffer.config.max_outstanding_groups == 4 and buffer.config.max_staleness == 4
    run = SimulatedRun(buffer, seed=0)
    run.can_defer = False
    run.fill()
    for _ in range(30):
        run.step()
    assert len(run.consumed) == len(set(run.consumed)) == 60

"""What the random walk does not show of the buffer and its ledger: refusals, and which groups are given up."""

from dataclasses import replace
from math import nan

import pytest
from trajectories import make_trajectory

from asyncrl.config import Config
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.ledger import Ledger, ledger_metrics
from asyncrl.runlog.metrics import merge_nodes


def make_buffer(num_groups=0, **options):
    """A buffer with some groups of two, which run."""
    buffer = SampleBuffer(Config(**{"groups_per_step": 1, "group_size": 2, **options}))
    for group_id in range(num_groups):
        assert buffer.admit(group_id, problem=group_id) == 0
    return buffer


def finish(buffer, group_id):
    for member in range(2):
        buffer.add(make_trajectory(group_id, member))


REFUSED = [
    (make_trajectory(7, 0), ", which is not resident"),
    (make_trajectory(0, 0), ": member 0 arrived twice"),
    (make_trajectory(0, 1, (1,), "aborted"), " is aborted, but its group needs it"),
    (
        make_trajectory(0, 1, (0, 1)),
        " has a token of version 0, but its group was assigned at version 1",
    ),
]


@pytest.mark.parametrize(("trajectory", "why"), REFUSED)
def test_a_trajectory_that_does_not_belong_is_refused(trajectory, why):
    buffer = make_buffer(1)
    buffer.note_assignment(0, version=1)
    buffer.note_assignment(0, version=2)
    buffer.add(make_trajectory(0, 0, (1, 2)))
    who = f"trajectory {trajectory.ticket_id} of group {trajectory.group_id}"
    receive = buffer.count_aborted if trajectory.finish_reason == "aborted" else buffer.add
    with pytest.raises(RuntimeError, match=f"^{who}{why}$"):
        receive(trajectory)


def test_a_batch_that_would_break_the_bound_is_an_error_with_the_numbers():
    buffer = make_buffer(2, async_ratio=0, stale_policy="drop")
    for group_id in (0, 1):
        finish(buffer, group_id)
    buffer.consume(buffer.find_batch())
    message = "group 1 has tokens of version 0 at policy version 1: staleness 1 is outside 0 … 0"
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        buffer.find_batch()


def test_no_group_starts_that_no_step_can_train_on():
    buffer = make_buffer(4, groups_per_step=2, async_ratio=1.0, steps=3)
    for step, num_free in ((1, 2), (2, 0)):
        for group_id in (2 * step - 2, 2 * step - 1):
            finish(buffer, group_id)
        buffer.consume(buffer.find_batch())
        buffer.free_consumed_places(step)
        assert buffer.num_free_places() == num_free
        for group_id in range(4, 4 + num_free):
            buffer.admit(group_id, group_id)


def test_no_group_starts_too_old_while_a_batch_waits_for_other_nodes():
    buffer = make_buffer(3, groups_per_step=2, async_ratio=0.0, extra_groups=1)
    for group_id in (0, 1):
        finish(buffer, group_id)
    (surplus,) = buffer.surplus()
    buffer.drop(surplus, "surplus")
    assert buffer.num_free_places() == 1
    buffer.held = buffer.find_batch()
    assert buffer.num_free_places() == 0, "it would be of version 0 at version 1"
    buffer.consume(buffer.held)
    buffer.free_consumed_places(1)
    assert buffer.num_free_places() == 3


@pytest.mark.parametrize("stale_policy", ["wait", "drop", "gate"])
def test_the_oldest_finished_groups_come_first(stale_policy):
    """As AReaL has it; those that finish first are often short."""
    buffer = make_buffer(4, async_ratio=3.0, stale_policy=stale_policy)
    for group_id in (3, 1, 2):
        finish(buffer, group_id)
    batches = [buffer.consume(buffer.find_batch()) for _ in range(3)]
    assert [group.group_id for (group,) in batches] == [1, 2, 3]


def test_a_running_group_is_given_up_before_a_finished_one():
    buffer = make_buffer(3, async_ratio=1.0, extra_groups=1)
    finish(buffer, 0)
    finish(buffer, 2)
    assert buffer.surplus() == [1], "one of the two others can still be consumed a step later"


def test_a_ledger_that_does_not_balance_is_an_error_with_both_sides():
    ledger = Ledger()
    ledger.generate(5)
    ledger.generate(2, "late")
    assert ledger.balance(0, 5)["tokens_dropped_late"] == 2
    message = (
        "the ledger of tokens does not balance: generated 7 ≠ consumed 0 + dropped 2 + resident 4"
    )
    with pytest.raises(RuntimeError, match=f"^{message.replace('+', '.')}$"):
        ledger.balance(0, 4)


def test_trained_responses_are_compared_with_all_that_were_trained_or_lost():
    """Lengths of 3 and 1 are trained. Lost ones have 5 so far, 4, 2 until a failure, 6, and one has no token yet."""

    def response(group_id, member, num_tokens, reward, finish_reason="stop"):
        trajectory = make_trajectory(group_id, member, (0,) * num_tokens, finish_reason)
        return replace(trajectory, reward=reward)

    def bias():
        metrics = merge_nodes([ledger_metrics(buffer.balance())])
        return {name: value for name, value in metrics.items() if name.startswith("bias/")}

    buffer = make_buffer(2, extra_members=1)
    buffer.add(response(0, 0, 3, 1.0))
    buffer.add(response(0, 1, 1, 0.0))
    buffer.add(response(1, 0, 4, 0.5))
    assert bias() == {}, "the fate of no response is known"
    buffer.consume([0])
    assert bias() == {"bias/length_trained_minus_drawn": 0, "bias/reward_trained_minus_drawn": 0}
    buffer.count_aborted(response(0, 2, 5, nan, "aborted"))
    assert not buffer.count_failure(response(1, 1, 2, nan, "failed"))
    buffer.drop(1, "stale")
    buffer.count_aborted(response(1, 1, 0, nan, "aborted"))
    buffer.add(response(1, 2, 6, 0.0))
    length, reward = (3 + 1 + 5 + 4 + 2 + 6) / 6, (1.0 + 0.0 + 0.5 + 0.0) / 4
    assert bias() == {
        "bias/length_trained_minus_drawn": 2 - length,
        "bias/reward_trained_minus_drawn": 0.5 - reward,
    }

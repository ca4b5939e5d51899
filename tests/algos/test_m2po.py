"""M2PO: which tokens of an update it leaves out, against the paper's loop, and the gradient of the others."""

import math
from dataclasses import replace

import pytest
import torch
from loss_checks import (
    check_stats,
    check_values_and_gradients,
    evaluate,
    one_token,
    random_inputs,
    select,
)

from algos import LossInputs
from algos.m2po import loss


def left_out(inputs, threshold):
    """Algorithm 1 as a loop: leave out the furthest token that goes on, until the mean of those left is small."""
    log_ratios = (inputs.logprobs.detach() - inputs.behavior_logprobs).tolist()
    moments = [log_ratio**2 for log_ratio in log_ratios]
    signs = [
        a * log_ratio for a, log_ratio in zip(inputs.advantages.tolist(), log_ratios, strict=True)
    ]
    going = [i for i, sign in enumerate(signs) if sign > 0]
    kept = set(going)
    while kept and sum(moments[i] for i in kept) / len(kept) > threshold:
        kept.remove(max(kept, key=lambda i: moments[i]))
    return [i in going and i not in kept for i in range(len(moments))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("threshold", [1e-9, 0.01, 0.04, 0.2, 0.5, 100.0])
def test_it_leaves_out_what_the_loop_of_the_paper_leaves_out(seed, threshold):
    inputs = random_inputs(seed=seed, spread=0.6)
    losses, stats = evaluate(loss, inputs, m2_threshold=threshold)
    check_stats(stats, {"ratio", "clipped"}, 60)
    assert stats["clipped"].bool().tolist() == left_out(inputs, threshold)
    out = stats["clipped"].bool()
    assert not losses[out].any() and losses[~out].all()
    if threshold == 0.2:
        assert 0 < out.sum() < 40


@pytest.mark.parametrize(
    ("log_ratios", "advantages", "threshold", "out"),
    [
        # Trinity-RFT, tests/algorithm/test_m2po_policy_loss.py: test_masks_largest_trust_region_token_…, test_only_
        # constrains_the_ppo_trust_region_quadrants and test_full_batch_mask_is_not_recomputed_per_microbatch.
        ([0.1, 0.2, 0.3], [1.0] * 3, 0.04, [0, 0, 1]),
        ([1.0, -1.0, 1.0, -1.0], [-1.0, 1.0, 1.0, -1.0], 0.1, [0, 0, 1, 1]),
        ([0.01**0.5, 0.09**0.5, 0.05**0.5], [1.0] * 3, 0.04, [0, 1, 0]),
        # Ours: one that comes back, however far away, takes none of those that go on along.
        ([3.0, 3.0, 0.1], [-1.0, 1.0, 1.0], 0.04, [0, 1, 0]),
    ],
)
def test_what_is_left_out_is_what_trinity_rft_leaves_out(log_ratios, advantages, threshold, out):
    assert (
        evaluate(loss, moved(log_ratios, advantages), m2_threshold=threshold)[1]["clipped"].tolist()
        == out
    )


def test_a_token_that_is_left_out_stays_in_the_mean_as_in_trinity_rft():
    # Trinity-RFT, the same file, test_loss_uses_the_original_token_denominator_and_masks_gradients.
    inputs = moved([0.0, 1.0], [1.0, 1.0])
    losses, _ = evaluate(loss, inputs, m2_threshold=0.1)
    (slopes,) = torch.autograd.grad(losses.mean(), inputs.logprobs)
    assert losses.mean().item() == pytest.approx(-0.5) and slopes.tolist() == pytest.approx(
        [-0.5, 0.0]
    )


def test_tokens_that_moved_equally_far_are_left_out_together():
    # without one of the first two the mean would be 0.13
    inputs = moved([0.5, 0.5, 0.1], [1.0] * 3)
    assert evaluate(loss, inputs, m2_threshold=0.14)[1]["clipped"].tolist() == [1.0, 1.0, 0.0]


def moved(log_ratios, advantages):
    """Tokens of one sequence, a whole update, that moved by these log-ratios since they were sampled."""
    behavior = torch.zeros(len(log_ratios), dtype=torch.float64)
    return replace(
        random_inputs(len(log_ratios)),
        logprobs=(behavior + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_(),
        behavior_logprobs=behavior,
        advantages=torch.tensor(advantages, dtype=torch.float64),
    )


def test_what_is_left_has_the_value_and_gradient_of_importance_weighted_policy_gradient():
    inputs = random_inputs(seed=3)
    out = evaluate(loss, inputs)[1]["clipped"].bool()
    kept = select(inputs, ~out)
    kept = replace(kept, logprobs=kept.logprobs.detach().requires_grad_())

    def oracle(tokens):
        return [-math.exp(t.logprob - t.behavior) * t.advantage for t in tokens]

    check_values_and_gradients(lambda tokens: loss(tokens, inputs.to("cpu")), oracle, kept)


def test_the_whole_update_decides_and_not_the_micro_batch():
    calm, wild = one_token(0.1, advantage=1.0), one_token(1.0, advantage=1.0)
    both = random_inputs(2)
    columns = {
        name: torch.cat([getattr(calm, name), getattr(wild, name)]).detach()
        for name in both.__dataclass_fields__
    }
    update = LossInputs(**columns | {"sequence_ids": torch.tensor([0, 1])})
    assert loss(wild, update)[1]["clipped"].tolist() == [1.0]
    assert loss(calm, update)[1]["clipped"].tolist() == [0.0], "0.01 is left, by itself below 0.04"
    assert loss(calm, update, m2_threshold=0.001)[1]["clipped"].tolist() == [1.0]
    back = one_token(1.0, advantage=-1.0)
    assert evaluate(loss, back)[1]["clipped"].tolist() == [0.0], "its gradient brings it back"

"""M2PO: which tokens of an update it leaves out, against the paper's loop, and the gradient of the others."""

import math
from dataclasses import replace

import pytest
import torch
from loss_checks import as_update, check_stats, check_values_and_gradients, one_token, random_inputs, select

from algos import LossInputs
from algos.m2po import loss


def left_out(inputs, threshold):
    """Algorithm 1 as a loop: leave out the furthest token that goes on, until the mean of what is left is small."""
    log_ratios = (inputs.logprobs.detach() - inputs.behavior_logprobs).tolist()
    moments = [log_ratio**2 for log_ratio in log_ratios]
    signs = [a * log_ratio for a, log_ratio in zip(inputs.advantages.tolist(), log_ratios, strict=True)]
    kept, may_go = set(range(len(moments))), [i for i, sign in enumerate(signs) if sign > 0]
    while may_go and sum(moments[i] for i in kept) / len(kept) > threshold:
        furthest = max(may_go, key=lambda i: moments[i])
        may_go.remove(furthest)
        kept.remove(furthest)
    return [i not in kept for i in range(len(moments))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("threshold", [1e-9, 0.01, 0.04, 0.2, 0.5, 100.0])
def test_it_leaves_out_what_the_loop_of_the_paper_leaves_out(seed, threshold):
    inputs = random_inputs(seed=seed, spread=0.6)
    losses, stats = loss(inputs, m2_threshold=threshold)
    check_stats(stats, {"ratio", "clipped"}, 60)
    assert stats["clipped"].bool().tolist() == left_out(inputs, threshold)
    out = stats["clipped"].bool()
    assert not losses[out].any() and losses[~out].all()
    if threshold == 0.2:
        assert 0 < out.sum() < 40


def test_what_is_left_has_the_value_and_gradient_of_importance_weighted_policy_gradient():
    inputs = random_inputs(seed=3)
    out = loss(inputs)[1]["clipped"].bool()
    kept = as_update(select(inputs, ~out))
    kept = replace(kept, logprobs=kept.logprobs.detach().requires_grad_())

    def oracle(tokens):
        return [-math.exp(t.logprob - t.behavior) * t.advantage for t in tokens]

    check_values_and_gradients(lambda tokens: loss(replace(tokens, update=inputs.update)), oracle, kept)


def test_the_whole_update_decides_and_not_the_micro_batch():
    calm, wild = one_token(0.1, advantage=1.0), one_token(1.0, advantage=1.0)
    both = as_update(random_inputs(2))
    columns = {
        name: torch.cat([getattr(calm, name), getattr(wild, name)]).detach()
        for name in both.__dataclass_fields__
        if name != "update"
    }
    update = LossInputs(**columns | {"sequence_ids": torch.tensor([0, 1])})
    assert loss(replace(wild, update=update))[1]["clipped"].tolist() == [1.0]
    assert loss(replace(calm, update=update))[1]["clipped"].tolist() == [0.0], "0.01 is left, by itself below 0.04"
    assert loss(replace(calm, update=update), m2_threshold=0.001)[1]["clipped"].tolist() == [1.0]
    back = one_token(1.0, advantage=-1.0)
    assert loss(as_update(back))[1]["clipped"].tolist() == [0.0], "its gradient brings it back"

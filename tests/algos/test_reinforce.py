import torch
from loss_checks import (
    check_stats,
    check_values_and_gradients,
    each,
    one_token,
    random_inputs,
)

from algos import LOSSES

loss = LOSSES["reinforce"]


def oracle(token):
    return -token.advantage * token.logprob


def test_values_and_gradients_equal_the_formula():
    check_values_and_gradients(loss, each(oracle), random_inputs())


def test_staleness_changes_the_reported_ratio_but_not_the_gradient():
    inputs = one_token(log_ratio=3.0, advantage=2.0)
    losses, stats = loss(inputs)
    losses.sum().backward()
    assert inputs.logprobs.grad.item() == -2.0
    torch.testing.assert_close(stats["ratio"], torch.tensor([3.0], dtype=torch.float64).exp())


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio"}, 60)

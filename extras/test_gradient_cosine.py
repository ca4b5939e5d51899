"""The cosine of two gradients is that of the gradients that the optimizer sees, on one rank and on two."""

import itertools

import pytest
import torch
import torch.distributed as dist
from plain_trainer import make_step, record_gradients
from ranks import run_group
from tiny_policy import load, make_config, random_sequences, save_tiny_model

pytestmark = pytest.mark.usefixtures("one_rank")


def whole(gradient):
    return torch.cat([part.flatten().double() for part in gradient.values()])


def check_cosines(rank, model):
    policy = load(make_config(model, gradient_cosine=True, minibatches=2))
    gradients = record_gradients(policy)
    found = []
    for seed in range(3):
        updates = [random_sequences(4, seed=10 * seed + update) for update in range(2)]
        metrics, _ = make_step(policy, updates, 40)
        found.append(metrics["loss/gradient_cosine"])
    vectors = [whole(gradient) for gradient in gradients]
    cosines = [
        torch.cosine_similarity(before, now, dim=0).item()
        for before, now in itertools.pairwise(vectors)
    ]
    # the first step has one pair, as nothing was before its first update
    expected = [cosines[0], sum(cosines[1:3]) / 2, sum(cosines[3:5]) / 2]
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(cosines)) == 5 and dist.get_rank() == rank


def test_cosine_on_one_rank(tmp_path):
    check_cosines(0, save_tiny_model(str(tmp_path)))


def test_cosine_on_two_ranks(tmp_path):
    run_group(check_cosines, 2, save_tiny_model(str(tmp_path)))


def test_a_run_without_a_gradient_before_has_no_cosine(tmp_path):
    policy = load(make_config(save_tiny_model(str(tmp_path)), gradient_cosine=True))
    metrics, _ = make_step(policy, [random_sequences(4)], 40)
    assert "loss/gradient_cosine" not in metrics

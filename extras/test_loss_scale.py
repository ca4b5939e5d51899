"""A scaled loss has the gradient of the loss, also where float16 has none of it; what overflows is skipped."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from plain_trainer import PlainTrainer, check_step, make_step, randomize, relative_error
from ranks import run_group
from tiny_policy import VERSION, load, make_config, random_sequences, save_tiny_model

from asyncrl.config import AdvantageOptions, OptimOptions
from asyncrl.trainer.checkpoint_writer import restore_training_state, training_state, write_shards
from asyncrl.trainer.policy import NotFinite, Policy
from asyncrl.trainer.splitting import distribute
from extras import loss_scale

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("model")), tied=False)


def step(policy, sequences, num_ranks=1):
    """Make a step of one update. Return its metrics."""
    share = distribute([sequences], num_ranks, 60)[dist.get_rank()]
    return policy.train_step(share, VERSION)


def scale_of(policy):
    return policy.optimizer.param_groups[0]["loss_scale"]


@pytest.mark.parametrize(
    "options",
    [
        {"optim": OptimOptions(entropy_coef=0.5)},
        {"lora_rank": 3, "kl_coef": 0.1, "save_memory": ("activations", "optimizer")},
        {"advantage": "gae", "advantage_options": AdvantageOptions(value_coef=0.3)},
    ],
)
def test_the_gradient_and_all_metrics_are_those_without_a_scale(model, options):
    """In float32, where a scale, a power of two, changes no digit."""
    config, sequences = make_config(model, **options), random_sequences(9)
    plain = load(config)
    randomize(plain)
    metrics, gradients = PlainTrainer(plain).train_step([sequences])
    metrics |= {"loss/scale": loss_scale.FIRST_SCALE, "loss/skipped_updates": 0}
    parts = (plain.module, plain.reference, plain.loss, plain.device, plain.clock)
    policy = Policy(config, model, *parts)
    policy.plugins.append(loss_scale.ScaledLoss(policy))
    check_step(policy, [sequences], 60, (metrics, gradients))


def test_float16_has_the_gradient_of_a_small_loss_by_its_scale_alone(model):
    """To 1 %, as 11 bits leave of 2 layers; without a scale most of it is below the least number of float16."""
    config = make_config(model, dtype="float16", algo="reinforce")
    sequences = [replace(s, advantage=s.advantage * 1e-5) for s in random_sequences(9)]
    errors = {}
    for scale in (loss_scale.FIRST_SCALE, 1.0):
        policy = load(config)
        _, (expected,) = PlainTrainer(policy).train_step([sequences])
        policy.optimizer.param_groups[0]["loss_scale"] = scale
        _, (gradient,) = make_step(policy, [sequences], 60)
        errors[scale] = relative_error(gradient, expected)
    assert errors[loss_scale.FIRST_SCALE] < 0.01 < 0.1 < errors[1.0]


def overflow_on_two_ranks(rank, config, folder):
    """Skip an update whose gradient one rank alone has, make one, and continue from there. Return what came of it."""
    policy = load(config)
    before = {name: tensor.clone() for name, tensor in policy.named_full_parameters()}
    policy.optimizer.param_groups[0]["loss_scale"] = 2.0**40
    (sequence,) = random_sequences(1)
    skipped = step(policy, [sequence], num_ranks=2)
    is_same = [torch.equal(before[name], t) for name, t in policy.named_full_parameters()]
    num_updates = policy.num_updates, len(policy.optimizer.state)
    policy.optimizer.param_groups[0] |= {"loss_scale": 2.0**9, "updates_since_change": 198}
    step(policy, random_sequences(4), num_ranks=2)
    group = dist.new_group(backend="gloo")
    write_shards(training_state(policy), folder, group)
    resumed = load(config)
    restore_training_state(resumed, folder, group)
    scales = [step(p, random_sequences(4), num_ranks=2)["loss/scale"] for p in (policy, resumed)]
    return skipped, all(is_same), num_updates, scales


def test_an_update_that_overflows_on_one_rank_is_skipped_on_all_and_a_resume_keeps_the_scale(
    model, tmp_path
):
    config = make_config(model, dtype="float16", optimizer="adamw")
    for outcome in run_group(overflow_on_two_ranks, 2, config, str(tmp_path)):
        metrics, is_same, num_updates, scales = outcome
        assert (metrics["loss/skipped_updates"], metrics["loss/scale"]) == (1, 2.0**39)
        assert (metrics["loss/grad_norm"], metrics["loss/changed_weights"]) == (0, 0)
        assert math.isfinite(metrics["loss/total"]) and is_same and num_updates == (0, 0)
        # doubled by the 200th update in a row, which the resumed policy makes too
        assert scales == [2.0**10] * 2


def test_a_loss_that_no_scale_helps_against_ends_the_run(model):
    policy = load(make_config(model, dtype="float16"))
    (sequence,) = random_sequences(1)
    for advantage in (math.nan, 1e30):
        scales = [scale_of(policy)]
        with pytest.raises(NotFinite):
            while True:
                step(policy, [replace(sequence, advantage=advantage)])
                scales.append(scale_of(policy))
        assert scales == [2.0**power for power in range(16, 16 - len(scales), -1)]
    assert scales[-1] == loss_scale.LEAST_SCALE

"""The learning rate of each update, and which optimizer an option makes."""

import numpy as np
import pytest
import torch
from tiny_policy import load, make_config, random_sequences
from torch.utils._python_dispatch import TorchDispatchMode
from user_files import write_user_code

from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.optimizer import (
    choose_lr,
    learning_rate,
    make_optimizer,
    step_and_count_changes,
    try_optimizer,
)

SHARES = np.arange(1, 9) / 8
"""Of the updates after warm-up, how many are made."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, np.ones(8)),
        ({"scale_lr_by_ess": True}, np.full(8, 0.5)),
        ({"lr_scheduler": "linear"}, 1 - SHARES),
        ({"lr_scheduler": "linear", "min_lr_ratio": 0.2}, 1 - 0.8 * SHARES),
        ({"lr_scheduler": "cosine"}, (1 + np.cos(np.pi * SHARES)) / 2),
    ],
)
def test_after_warm_up_the_rate_follows_its_schedule_to_the_last_update(options, expected):
    """The ten updates of five steps, also where the run has made others before with other epochs."""
    config = Config(lr=0.1, steps=5, minibatches=2, optim=OptimOptions(warmup_steps=2, **options))
    ess = 0.25 if config.optim.scale_lr_by_ess else 1.0
    for first in (0, 7):
        rates = [learning_rate(config, first + update, update / 2, ess) for update in range(10)]
        assert rates[2:] == pytest.approx(0.1 * expected, abs=1e-12)
        assert first or rates[:2] == pytest.approx([0.05 * ess**0.5, 0.1 * ess**0.5])


@pytest.mark.parametrize(
    ("optimizer", "items", "expected"),
    [
        ("adamw", (), {"betas": (0.9, 0.999), "weight_decay": 0.0, "fused": True}),
        ("adamw", ("beta2=0.95", "weight_decay=0.1"), {"betas": (0.9, 0.95), "weight_decay": 0.1}),
        ("sgd", ("momentum=0.9", "nesterov=true"), {"momentum": 0.9, "nesterov": True}),
        ("adafactor", ("weight_decay=0.1", "d=2"), {"weight_decay": 0.1, "d": 2.0}),
    ],
)
def test_each_optimizer_gets_its_options_by_the_names_of_its_signature(optimizer, items, expected):
    config = Config(optimizer=optimizer, lr=0.25, optim=OptimOptions(warmup_steps=3, args=items))
    try_optimizer(config)
    groups = [{"params": [torch.ones(2, 2, requires_grad=True)], "lr": 0.25}]
    assert (expected | {"lr": 0.25}).items() <= make_optimizer(config, groups).defaults.items()


@pytest.mark.parametrize(
    ("num_parameters", "options", "lr", "is_far"),
    [
        (120_000, {}, 1e-3, False),
        (134_515_008, {}, 4e-5, False),
        (10**9, {}, 1e-6, False),
        (8_190_735_360, {}, 1e-6, False),
        (8_190_735_360, {"optimizer": "adam"}, 1e-6, False),
        (8_190_735_360, {"lora_rank": 8}, 1e-5, False),
        (8_190_735_360, {"lr": 1e-5}, 1e-5, False),
        (8_190_735_360, {"lr": 1.1e-5}, 1.1e-5, True),
        (8_190_735_360, {"lr": 1e-4, "lora_rank": 8}, 1e-4, False),
        (8_190_735_360, {"lr": 1e-3, "lora_rank": 8}, 1e-3, True),
        (8_190_735_360, {"lr": 1e-3, "optimizer": "adam"}, 1e-3, True),
        (8_190_735_360, {"lr": 1.0, "optimizer": "sgd"}, 1.0, False),
        (134_515_008, {"lr": 1e-3}, 1e-3, True),
        (134_515_008, {"lr": 1e-9}, 1e-9, False),
        (120_000, {"lr": 0.01}, 0.01, False),
    ],
)
def test_the_learning_rate_fits_the_number_of_parameters(num_parameters, options, lr, is_far):
    config, line = choose_lr(Config(**options), num_parameters)
    assert config.lr == pytest.approx(lr)
    assert line.startswith("warning: --lr" if is_far else f"lr: {lr:g}")
    assert ("the default for" in line) == ("lr" not in options)


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "adafactor"])
def test_an_optimizer_whose_updates_are_of_another_size_needs_a_learning_rate(optimizer):
    try_optimizer(Config(optimizer=optimizer, lr=1.0))
    with pytest.raises(ValueError, match=f"^--optimizer {optimizer} needs --lr: .*add --lr$"):
        try_optimizer(Config(optimizer=optimizer))


HALVED = """
from torch.optim import SGD


def halved(groups, *, lr, share: float = 0.5):
    return SGD([{"params": group["params"], "lr": group["lr"] * share} for group in groups])
"""


@pytest.mark.usefixtures("one_rank")
def test_groups_of_a_users_optimizer_keep_their_share_of_the_learning_rate(tmp_path, model):
    path = write_user_code(tmp_path, HALVED)
    optim = OptimOptions(warmup_steps=2, args=("share=0.25",))
    policy = load(make_config(model, lr=0.5, optimizer=f"{path}:halved", optim=optim))
    measured = policy.train_step([[random_sequences(4)]], policy_version=11)
    assert measured["loss/lr"] == 0.5 / 2, "the first of two updates of warm-up"
    assert [group["lr"] for group in policy.optimizer.param_groups] == [0.25 * 0.5 / 2]


def test_of_few_weights_all_are_compared_and_of_many_a_sample_from_all_columns(monkeypatch):
    small, large = (torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 7), (64, 64)))
    small.grad, large.grad = torch.zeros_like(small), torch.zeros_like(large)
    small.grad[1] = 1  # 7 weights
    large.grad[:, 60:] = 1  # 256 weights
    num_weights = 21 + 64 * 64

    def count(lr):
        optimizer = torch.optim.SGD([small, large], lr)
        return step_and_count_changes(optimizer, [small, large]).tolist()

    assert count(lr=0.1) == [263, num_weights - 263]
    assert count(lr=1e-6) == [0, num_weights], "less than bfloat16 shows"
    monkeypatch.setattr("asyncrl.trainer.optimizer.MAX_COMPARED", 500)
    num_changed, num_unchanged = count(lr=0.1)
    assert num_changed + num_unchanged == 3 + 456, "every ninth"
    assert num_changed / 459 == pytest.approx(263 / num_weights, rel=0.05)


def test_comparing_more_parameters_takes_no_more_kernels():
    class Kernels(TorchDispatchMode):
        """Counts operations that compute or copy."""

        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += not function.is_view
            return function(*args, **(kwargs or {}))

    def count(num_parameters):
        parameters = [torch.nn.Parameter(torch.ones(5, 3)) for _ in range(num_parameters)]
        optimizer = torch.optim.SGD(parameters, lr=0.1)  # without gradients it computes nothing
        with Kernels() as kernels:
            step_and_count_changes(optimizer, parameters)
        return kernels.count

    assert count(2) == count(100)

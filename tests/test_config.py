import json
import math
import re

import pytest
from option_words import words_that_change
from programs import run_python

from algos import ADVANTAGES, LOSSES
from asyncrl.config import OPTIONS, Config, SwarmOptions, allowed_values
from asyncrl.job.command_line import parse_config, read_options
from asyncrl.trainer.optimizer import OPTIMIZERS

NUMBERS = [
    option
    for option in OPTIONS.values()
    if (isinstance(option.default, int | float) and not isinstance(option.default, bool))
    or option.name in ("gpu_memory_utilization", "num_rollout_workers")
]


@pytest.mark.parametrize("option", NUMBERS, ids=lambda option: option.name)
def test_every_number_has_a_range_that_holds_no_infinity(option):
    assert re.search(r"[≥>] [^e]+ and [≤<] [^e]+", allowed_values(option.kind, math.inf))
    for value in ("inf", "nan"):
        with pytest.raises(ValueError, match=rf"^{option.flag} must be .+, got '?{value}'?$"):
            read_options([option.flag, value]).checked()


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "resume"])
def test_every_option_can_be_given(name):
    config = read_options(words_that_change(OPTIONS[name]))
    assert [other.name for other in OPTIONS.values() if other.value_in(config) != other.default][
        :1
    ] == [name]
    assert Config.from_dict(json.loads(json.dumps(config.as_dict()))) == config


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (
            "--algo-args clip_high=0.28 dual_clip=3",
            {"algo_args": ("clip_high=0.28", "dual_clip=3")},
        ),
        ("--algo-args", {}),
        ("--drop-zero-variance", {"drop_zero_variance": True}),
        ("--no-replicate-prompts", {"replicate_prompts": False}),
        ("--compile", {"compile": True}),
        ("--no-compile", {"compile": False}),
        ("--no-compile --compile=None", {}),
        ("--async_ratio=2 --run-name None", {"async_ratio": 2.0}),
        ("--run-name ...", {"run_name": "..."}),
        ("--listen h:1 --num-rollout-workers 0", {"listen": "h:1", "num_rollout_workers": 0}),
    ],
)
def test_words_of_the_command_line_give_options_their_values(words, options):
    config = parse_config(words.split())
    assert config == Config(**options)
    assert Config.from_dict(json.loads(json.dumps(config.as_dict()))) == config


def test_help_shows_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    shown = capsys.readouterr().out
    assert not [name for name in {**LOSSES, **ADVANTAGES, **OPTIMIZERS} if f"`{name}`" not in shown]
    options = [option.flag for option in OPTIONS.values()]
    places = [re.search(rf"^  {option}[ ,\n]", shown, re.M).start() for option in options]
    assert places == sorted(places) and len(re.findall(r"\(default:\s", shown)) == len(options) + 5


def test_help_answers_within_two_seconds_of_cpu_time_and_without_heavy_imports():
    probe = (
        "import sys, time, train_async\n"
        "sys.argv = ['train_async.py', '--help']\n"
        "try: train_async.main()\n"
        "except SystemExit: pass\n"
        "print('HEAVY', [m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])\n"
        "print('CPU', time.process_time())"
    )
    words = run_python("-c", probe).stdout.split()
    # half a second, where nobody else makes the cores slow
    assert float(words[-1]) < 2 and words[-4:-1] == ["HEAVY", "[]", "CPU"]
    assert "--async-ratio" in words


@pytest.mark.parametrize(
    ("words", "lengths"),
    [
        ("", (40, 48)),
        ("--model some/model --task reasoning_gym:chain_sum", (512, 1024)),
        ("--model smollm2 --task sums:one_digit", (512, 24)),
        ("--model some/model --max-response-tokens 48", (512, 48)),
    ],
)
def test_lengths_that_are_not_given_suit_what_is_no_toy(words, lengths):
    config = parse_config(words.split())
    assert (config.max_prompt_tokens, config.max_response_tokens) == lengths


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "no trained token is older than 1 step (--async-ratio 1 rounded up)"),
        (
            {"async_ratio": 0.5, "publish_delay": 3},
            "no trained token is older than 4 steps (--async-ratio 0.5 rounded up + --publish-delay 3)",
        ),
        (
            {"async_ratio": 0.0, "over_sampling": 2.0},
            "no trained token is older than 4 steps (--async-ratio 0 rounded up + 4 suspensions of a response)",
        ),
        (
            {"swarm": SwarmOptions(refresh_lag=2)},
            "no trained token is older than 3 steps (--async-ratio 1 rounded up + --swarm.refresh-lag 2)",
        ),
        (
            {"stale_policy": "gate"},
            "--stale-policy gate bounds the mean staleness by --async-ratio 1 rounded up, and no maximum",
        ),
    ],
)
def test_a_run_says_at_its_start_how_old_a_trained_token_may_be(options, line):
    assert Config(**options).freshness() == f"freshness: {line}"

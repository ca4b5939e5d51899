import dataclasses
import inspect
import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from option_words import words_that_change

from asyncrl.config import OPTIONS, Config, allowed_values, read_arguments
from asyncrl.job.command_line import option_texts, parse_config, read_options

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("async_ratio", "publish_delay", "outstanding", "staleness"),
    [(0, 0, 10, 0), (0.1, 0, 11, 1), (1, 0, 20, 1), (1.25, 0, 22, 2), (2, 1, 30, 3), (0, 3, 10, 3)],
)
def test_capacity_and_bound_follow_from_alpha_and_the_delay(
    async_ratio, publish_delay, outstanding, staleness
):
    config = Config(groups_per_step=10, async_ratio=async_ratio, publish_delay=publish_delay)
    assert (config.max_outstanding_groups, config.max_staleness) == (outstanding, staleness)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1 and at most 1,000,000,000, got '0'"),
        (["--async-ratio", "-1"], "--async-ratio must be at least 0 and at most 1,000, got '-1'"),
        (["--async-ratio", "inf"], "--async-ratio must be at least 0 and at most 1,000, got 'inf'"),
        (
            ["--async-ratio", "1e308"],
            "--async-ratio must be at least 0 and at most 1,000, got '1e308'",
        ),
        (
            ["--over-sampling", "1001", "--async-ratio", "0"],
            "--over-sampling must be at least 1 and at most 1,000, got '1001'",
        ),
        (
            ["--max-grad-norm", "inf"],
            "--max-grad-norm must be above 0 and at most 1,000,000,000, got 'inf'",
        ),
        (
            ["--gpu-memory-utilization", "nan"],
            "--gpu-memory-utilization must be above 0 and at most 1, got 'nan'",
        ),
        (
            ["--timeout-s", "1e308"],
            "--timeout-s must be above 0 and at most 1,000,000, got '1e308'",
        ),
        (
            ["--eval-problems", "1000000000000"],
            "--eval-problems must be at least 1 and at most 100,000, got '1000000000000'",
        ),
        (
            ["--extra-groups", "100000000"],
            "--extra-groups must be at least 0 and at most 1,000,000, got '100000000'",
        ),
        (
            ["--extra-members", "10000000"],
            "--extra-members must be at least 0 and at most 1,000,000, got '10000000'",
        ),
        (
            ["--extra-groups", "99936", "--group-size", "4", "--extra-members", "7"],
            "100000 outstanding groups of 4 + 7 responses are 1,100,000, at most 1,000,000 may be outstanding; lower "
            "--groups-per-step, --async-ratio, --over-sampling, --extra-groups, --group-size or --extra-members",
        ),
        (
            ["--groups-per-step", "1000000"],
            "2000000 outstanding groups of 8 + 0 responses are 16,000,000",
        ),
        (
            ["--async-ratio", "1000", "--group-size", "1000"],
            "32032 outstanding groups of 1000 + 0 responses",
        ),
        (
            ["--steps", "1000000000000"],
            "--steps must be at least 1 and at most 1,000,000,000, got '1000000000000'",
        ),
        (
            ["--temperature", "0"],
            "--temperature must be at least 0.01 and at most 2, outside of which vLLM clips or refuses, got '0'",
        ),
        (["--temperature", "2.1"], "refuses, got '2.1'"),
        (["--top-p", "1.5"], "--top-p must be above 0 and at most 1"),
        (["--top-k", "-1"], "--top-k must be at least 0 and at most 1,000,000,000"),
        (["--min-p", "1"], "--min-p must be at least 0 and below 1"),
        (["--min-p", "-0.1"], "--min-p must be at least 0 and below 1"),
        (
            ["--groups-per-step", "10", "--minibatches", "4"],
            "--groups-per-step 10 is not a multiple of --minibatches 4; change one of the two",
        ),
        (
            ["--max-prompt-tokens", "9000", "--max-response-tokens", "9000"],
            "9000 = 18000; raise the first",
        ),
        (["--group-size", "1"], "--group-size 1, which leaves nothing to compare"),
        (
            ["--advantage", "reinforce_baseline", "--group-size", "1"],
            "--group-size 1, which leaves nothing to compare",
        ),
        (
            ["--share-prefix", "prompt", "--group-size", "1", "--advantage", "reinforce"],
            "--group-size 1, which leaves nothing to share",
        ),
        (
            ["--share-prefix", "trie"],
            "--share-prefix must be off or prompt or tree, got 'trie'; did you mean tree?",
        ),
        (["--share-prefix"], "--share-prefix expected one argument"),
        (
            ["--drop-zero-variance", "--group-size", "1", "--advantage", "gae"],
            "every group would be dropped",
        ),
        (["--run-name", ""], "--run-name must be made of letters"),
        (["--algo", "grop"], "nor FILE.py:NAME; did you mean grpo?"),
        (["--task", "addtion"], "got 'addtion'; did you mean addition?"),
        (["--warmup", "5"], "--warmup is no option; write --optim.warmup VALUE;"),
        (
            ["--weight_decay=0.1"],
            "--weight-decay is no option; write --optim.args weight_decay=VALUE;",
        ),
        (
            ["--optim-args", "warmup=5"],
            "--optim-args is no option; its options are --optim.NAME VALUE each now, as",
        ),
        (["--swarm-args", "lease_s=5"], "its options are --swarm.NAME VALUE each now"),
        (
            ["--algo-args", "cap=2", "--algo-args", "clip_low=0"],
            "--algo-args is given twice; put all its values behind one",
        ),
        (
            ["--optim.warmup", "-1"],
            "--optim.warmup must be at least 0 and at most 1,000,000,000, got '-1'",
        ),
        (["--optim.least", "2"], "--optim.least must be at least 0 and at most 1, got '2'"),
        (
            ["--optim.schedule", "step"],
            "--optim.schedule must be constant or linear or cosine, got 'step'",
        ),
        (
            ["--swarm.refresh-lag", "1001"],
            "--swarm.refresh-lag must be at least 0 and at most 1,000, got '1001'",
        ),
        (["--swarm.lag", "1"], "--swarm.lag is no option"),
        (["--async-ration", "2"], "--async-ration is no option; did you mean --async-ratio?"),
        (
            ["--steps", "many"],
            "--steps must be at least 1 and at most 1,000,000,000, got 'many'",
        ),
        (["--lr"], "--lr expected one argument"),
        (
            ["--save-memory", "activation"],
            "got 'activation'; did you mean activations?",
        ),
        (
            ["--save-memory", "gradients"],
            "--save-memory must be auto or activations or optimizer, got 'gradients'",
        ),
        (
            ["--lora-rank", "-1"],
            "--lora-rank must be at least 0 and at most 1,000,000,000, got '-1'",
        ),
        (
            ["--algo-args", "clip_high"],
            "--algo-args must be NAME=VALUE, as in clip_high=0.28 or held_out=0.2, got 'clip_high'",
        ),
        (
            ["--algo-args", "clip_high="],
            "--algo-args must be NAME=VALUE, as in clip_high=0.28 or held_out=0.2, got 'clip_high='",
        ),
        (["--algo", "aipo", "--algo-args", "cap=2", "cap=3"], "--algo-args cap=3: is given twice"),
        (
            ["--task", "chess"],
            "sums:largest_of_four, frozen_lake, guess_number, or your own, FILE.py:NAME, got 'chess'",
        ),
        (
            ["--over-sampling", "0.5"],
            "--over-sampling must be at least 1 and at most 1,000, got '0.5'",
        ),
        (["--over-sampling", "2"], "does not go with --async-ratio 1; use 0"),
        (
            ["--over-sampling", "2", "--async-ratio", "0", "--on-update", "wait"],
            "leaves nothing to resume",
        ),
        (
            ["--over-sampling", "5.5", "--async-ratio", "0", "--groups-per-step", "32"],
            "does not go with 5 suspensions of the last responses, of 4 at most",
        ),
        (
            ["--no-replicate-prompts", "--on-update", "resume"],
            "does not go with --on-update resume",
        ),
        (
            ["--no-replicate-prompts", "--group-size", "300"],
            "--max-running-requests 256 below --group-size 300",
        ),
        (
            ["--scheduling", "batch", "--extra-members", "1"],
            "--extra-members 1, which gives up the slowest responses, does not go with",
        ),
        (
            ["--extra-groups", "2", "--stale-policy", "gate"],
            "does not go with --stale-policy gate: none is",
        ),
        (["--colocate", "sleep"], "--async-ratio 1, which lets it run ahead; use 0"),
        (
            ["--colocate", "sleep", "--async-ratio", "0", "--over-sampling", "2"],
            "loses the KV cache, does not go with --on-update keep",
        ),
        (
            ["--rollout-tp", "0"],
            "--rollout-tp must be at least 1 and at most 1,000,000,000, got '0'",
        ),
        (
            ["--gpu-memory-utilization", "1.5"],
            "--gpu-memory-utilization must be above 0 and at most 1, got '1.5'",
        ),
        (["--run-name", "a/b"], "--run-name must be made of letters"),
        (["--run-name", "."], "neither . nor .., got '.'"),
        (["--run-name", ".."], "neither . nor .., got '..'"),
        (
            ["--num-rollout-workers", "-1"],
            "--num-rollout-workers must be at least 0 and at most 1,000,000,000, got '-1'",
        ),
        (
            ["--num-rollout-workers", "0"],
            "leaves nobody to sample; add --listen HOST:PORT, where remote hosts join",
        ),
        (
            ["--listen", "h:1", "--num-rollout-workers", "0", "--weight-sync", "shm"],
            "--weight-sync shm does not go",
        ),
        (
            ["--listen", "h:1", "--scheduling", "lockstep"],
            "come and go, does not go with --scheduling lockstep",
        ),
        (
            ["--listen", "h:1", "--scheduling", "batch"],
            "--scheduling batch, a baseline for one host",
        ),
        (
            ["--listen", "h:1", "--colocate", "sleep", "--async-ratio", "0"],
            "does not go with --colocate sleep, which",
        ),
    ],
)
def test_bad_values_are_one_line_that_says_what_is_allowed(options, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_config(options)
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2 and line.startswith("error: ") and message in line


def with_value(option, value):
    """The default options with another value of one."""
    group, _, field = option.path.rpartition(".")
    if not group:
        return dataclasses.replace(Config(), **{field: value})
    return dataclasses.replace(
        Config(), **{group: dataclasses.replace(getattr(Config(), group), **{field: value})}
    )


NUMBERS = [
    option
    for option in OPTIONS.values()
    if (isinstance(option.default, int | float) and not isinstance(option.default, bool))
    or option.name in ("gpu_memory_utilization", "num_rollout_workers")
]


@pytest.mark.parametrize("option", NUMBERS, ids=lambda option: option.name)
def test_every_number_has_a_range_that_holds_no_infinity(option):
    assert re.match(
        r"(at least|above) [^e]+ and (at most|below) [^e]+", allowed_values(option.kind)
    )
    for value in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match=rf"^{option.flag} must be .+, got (inf|nan)$"):
            with_value(option, value).checked()


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "resume"])
def test_every_option_can_be_given(name):
    config = read_options(words_that_change(OPTIONS[name]))
    assert [other.name for other in OPTIONS.values() if other.value_in(config) != other.default][
        :1
    ] == [name]
    assert Config.from_dict(json.loads(json.dumps(config.as_dict()))) == config


def test_a_name_may_hold_dots():
    assert Config(run_name="...").checked() and Config(run_name=".a").checked()


def test_capacity_and_bound_grow_with_over_sampling_and_extra_groups():
    config = Config(
        groups_per_step=10, async_ratio=0, over_sampling=1.5, extra_groups=3, publish_delay=1
    )
    assert (config.max_outstanding_groups, config.max_staleness) == (18, 5)


def test_arguments_of_the_loss_survive_json_and_may_be_given_as_none():
    config = parse_config(["--algo-args", "clip_high=0.28", "dual_clip=3", "--algo", "grpo"])
    assert config.algo_args == ("clip_high=0.28", "dual_clip=3")
    assert Config.from_dict(json.loads(json.dumps(config.as_dict()))) == config
    assert parse_config(["--algo-args"]).algo_args == ()


def test_switches_need_no_value():
    config = parse_config(["--drop-zero-variance", "--no-replicate-prompts"])
    assert config.drop_zero_variance and not config.replicate_prompts
    of_three = [parse_config(args).compile for args in ([], ["--compile"], ["--no-compile"])]
    assert of_three == [None, True, False]


def test_a_run_may_do_without_rollout_workers_where_machines_join():
    config = parse_config(["--listen", "h:1", "--num-rollout-workers", "0", "--rollout-tp", "2"])
    assert (config.listen, config.num_rollout_workers, config.rollout_tp) == ("h:1", 0, 2)


def test_an_option_may_be_written_with_underscores_and_unset():
    assert parse_config(
        ["--async_ratio=2", "--run-name", "None", "--num-rollout-workers", "2"]
    ) == Config(async_ratio=2.0, num_rollout_workers=2)


@pytest.mark.parametrize(
    ("words", "is_on"),
    [(["--compile"], True), (["--no-compile"], False), (["--no-compile", "--compile=None"], None)],
)
def test_a_switch_that_may_be_unset_has_three_values(words, is_on):
    assert parse_config(words).compile is is_on


def test_help_shows_every_option_with_its_default_under_one_of_a_few_titles(capsys):
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    shown = capsys.readouterr().out
    options = [option.flag for option in OPTIONS.values()]
    places = [re.search(rf"^  {option}[ ,\n]", shown, re.M).start() for option in options]
    assert places == sorted(places) and len(re.findall(r"\(default:\s", shown)) == len(options) + 3
    titles = re.findall(r"^(\w.*):$", shown, re.M)
    assert (
        titles[:2] == ["What most runs choose", "Freshness"]
        and titles[-2] == "Remote hosts that join (--swarm.NAME)"
    )


def test_every_option_has_a_text():
    assert [name for _, name, _ in option_texts(Config) if name] == list(OPTIONS)


def children_cpu_s() -> float:
    """CPU time of all children that have ended: unlike wall time, the same on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_answers_within_a_second_and_without_heavy_imports():
    probe = (
        "import sys, train_async\n"
        "sys.argv = ['train_async.py', '--help']\n"
        "try: train_async.main()\n"
        "except SystemExit: pass\n"
        "print('HEAVY', [m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    cpu_s = children_cpu_s()
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert children_cpu_s() - cpu_s < 2  # half a second, where nobody else makes the cores slow
    assert "HEAVY []" in done.stdout and "--async-ratio" in done.stdout


def test_lengths_that_are_not_given_suit_what_is_no_toy():
    lengths = lambda *args: (  # noqa: E731
        (config := parse_config(list(args))).max_prompt_tokens,
        config.max_response_tokens,
    )
    assert lengths() == (40, 48)
    assert lengths("--model", "some/model", "--task", "reasoning_gym:chain_sum") == (512, 1024)
    assert lengths("--model", "smollm2", "--task", "sums:one_digit") == (512, 24)
    assert lengths("--model", "some/model", "--max-response-tokens", "48") == (512, 48)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("a=b", str, "a=b"),
        ("2", Literal[1, 2], 2),
        ("0.5", float | None, 0.5),
        ("false", bool, False),
    ],
)
def test_text_is_read_as_the_type_of_the_annotation(text, kind, value):
    parameter = inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, annotation=kind)
    converted = read_arguments("task-args", (f"x={text}",), "a task", (parameter,))["x"]
    assert converted == value and type(converted) is type(value)

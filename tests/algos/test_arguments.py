import inspect
import itertools
import math
from typing import Literal

import pytest
import torch
from loss_checks import evaluate, gradient, random_inputs
from own_files import LOSS, write_own

from algos import LOSSES, LossInputs
from asyncrl.config import Config, read_arguments
from asyncrl.job.command_line import parse_config
from asyncrl.trainer.loss import choose_loss, try_loss

GIVEN = {
    "clip_low": ("0.5", 0.5), "clip_high": ("1.5", 1.5), "dual_clip": ("3", 3.0), "behavior_weight_cap": ("1.2", 1.2),
    "action": ("truncate", "truncate"), "unified_mask": ("true", True), "positive_weight": ("2", 2.0),
    "negative_weight": ("0", 0.0), "tau": ("1e-2", 0.01), "low": ("0.9", 0.9), "high": ("1.1", 1.1),
    "level": ("sequence", "sequence"), "cap": ("1.5", 1.5), "m2_threshold": ("100", 100.0),
    "divergence": ("kl", "kl"), "delta_low": ("0.01", 0.01), "delta_high": ("0.01", 0.01), "delta": ("0.01", 0.01),
    "tau_positive": ("2", 2.0), "tau_negative": ("2", 2.0), "k_positive": ("1", 1.0), "lambda_positive": ("1", 1.0),
    "k_negative": ("1", 1.0), "lambda_negative": ("1", 1.0),
}  # fmt: skip
"""A value other than the default for every keyword argument of every loss, as text and as what it means."""
KEYWORDS = [
    (algo, name)
    for algo, loss in LOSSES.items()
    for name in list(inspect.signature(loss).parameters)[1:]
    if name != "update"
]


def hyperparameters(algo: str, items: tuple[str, ...]) -> dict:
    """The keyword arguments that a loss gets from --algo-args."""
    return choose_loss(Config(algo=algo, algo_args=items)).keywords


CAP = "at least 1 and at most 1,000,000,000, where 1 is the ratio of a fresh token"


@pytest.mark.parametrize(("algo", "name"), KEYWORDS)
def test_every_keyword_argument_of_every_loss_can_be_given_and_changes_the_loss(algo, name):
    text, value = GIVEN[name]
    chosen = hyperparameters(algo, (f"{name}={text}",))
    assert chosen == {name: value} and type(chosen[name]) is type(value)
    inputs = random_inputs(num_tokens=600, spread=2.0)
    changed, _ = evaluate(LOSSES[algo], inputs, **chosen)
    assert not torch.equal(changed, evaluate(LOSSES[algo], inputs)[0])


@pytest.mark.parametrize(("algo", "name"), KEYWORDS)
def test_a_default_is_within_the_range_of_its_argument(algo, name):
    default = inspect.signature(LOSSES[algo]).parameters[name].default
    if default is not None:
        assert hyperparameters(algo, (f"{name}={str(default).lower()}",)) == {name: default}


def test_several_arguments_are_read_and_none_is_none():
    assert hyperparameters("grpo", ("clip_high=0.28", "dual_clip=3")) == {
        "clip_high": 0.28,
        "dual_clip": 3.0,
    }
    assert hyperparameters("grpo", ()) == {}


@pytest.mark.parametrize(
    ("algo", "item", "message"),
    [
        (
            "grpo",
            "clip_hihg=0.3",
            "--algo grpo takes clip_low, clip_high, dual_clip; did you mean clip_high?",
        ),
        ("grpo", "nonsense=1", "--algo grpo takes clip_low, clip_high, dual_clip"),
        ("grpo", "inputs=1", "--algo grpo takes clip_low, clip_high, dual_clip"),
        ("reinforce", "clip_low=0.1", "--algo reinforce takes none"),
        ("grpo", "clip_low=1.1", "clip_low of --algo grpo must be at least 0 and at most 1"),
        ("grpo", "clip_low=-0.1", "clip_low of --algo grpo must be at least 0 and at most 1"),
        (
            "gspo",
            "clip_high=-1",
            "clip_high of --algo gspo must be at least 0 and at most 1,000,000,000",
        ),
        (
            "grpo",
            "dual_clip=1",
            "dual_clip of --algo grpo must be above 1 and at most 1,000,000,000",
        ),
        (
            "tis",
            "clip_high=0.4",
            f"clip_high of --algo tis must be {CAP}",
        ),
        (
            "icepop",
            "low=1.5",
            "low of --algo icepop must be at least 0 and below 1, where 1 is the ratio of a fresh token",
        ),
        (
            "aipo",
            "cap=0",
            f"cap of --algo aipo must be {CAP}",
        ),
        (
            "aipo",
            "cap=inf",
            f"cap of --algo aipo must be {CAP}",
        ),
        (
            "aipo",
            "cap=nan",
            f"cap of --algo aipo must be {CAP}",
        ),
        (
            "aipo",
            "cap=two",
            f"cap of --algo aipo must be {CAP}",
        ),
        (
            "aipo",
            "cap",
            f"cap of --algo aipo must be {CAP}",
        ),
        ("kimi", "tau=0", "tau of --algo kimi must be above 0 and at most 1,000,000,000"),
        (
            "weighted_topr",
            "positive_weight=-1",
            "positive_weight of --algo weighted_topr must be at least 0 and at most 1,000,000,000",
        ),
        ("cispo", "unified_mask=yes", "unified_mask of --algo cispo must be true or false"),
        ("decoupled_ppo", "action=cut", "action of --algo decoupled_ppo must be mask or truncate"),
        ("icepop", "level=tokens", "level of --algo icepop must be token or sequence"),
        ("dppo", "divergence=js", "divergence of --algo dppo must be tv or kl"),
        (
            "dppo",
            "delta_high=0",
            "delta_high of --algo dppo must be above 0 and at most 1,000,000,000",
        ),
        (
            "sapo",
            "tau_negative=0",
            "tau_negative of --algo sapo must be at least 1e-06 and at most 1,000,000",
        ),
        ("opsm", "delta=0", "delta of --algo opsm must be above 0 and at most 1,000,000,000"),
        (
            "mis",
            "low=1",
            "low of --algo mis must be at least 0 and below 1, where 1 is the ratio of a fresh token",
        ),
        (
            "mis",
            "high=0.9",
            f"high of --algo mis must be {CAP}",
        ),
        ("mis", "level=batch", "level of --algo mis must be token or sequence or geometric"),
        (
            "tis_ppo",
            "cap=0.8",
            f"cap of --algo tis_ppo must be {CAP}",
        ),
        ("gmpo", "clip_low=0", "clip_low of --algo gmpo must be above 0 and at most 1,000,000,000"),
        (
            "vespo",
            "k_positive=-1",
            "k_positive of --algo vespo must be at least 0 and at most 1,000,000,000",
        ),
        (
            "vespo",
            "lambda_negative=0",
            "lambda_negative of --algo vespo must be above 0 and at most 1,000,000,000",
        ),
        (
            "sequence_is",
            "cap=0.5",
            f"cap of --algo sequence_is must be {CAP}",
        ),
    ],
)
def test_what_a_loss_does_not_take_or_allow_is_one_line_that_says_what_it_does(algo, item, message):
    with pytest.raises(ValueError) as error:
        hyperparameters(algo, (item,))
    assert str(error.value) == f"--algo-args {item}: {message}"


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


def test_an_argument_without_annotation_has_the_type_of_its_default(monkeypatch):
    monkeypatch.setitem(LOSSES, "own", lambda inputs, *, power=2, scale=1.0: None)
    assert hyperparameters("own", ("power=3", "scale=2")) == {"power": 3, "scale": 2.0}
    with pytest.raises(ValueError, match=r"power of --algo own must be a whole number"):
        hyperparameters("own", ("power=2.5",))
    assert not math.isnan(hyperparameters("own", ("scale=1e300",))["scale"])


EXTREMES = (
    "0",
    "1e-300",
    "1e-30",
    "1e-6",
    "0.5",
    "1",
    "1.0000001",
    "2",
    "1e6",
    "1e9",
    "1e30",
    "1e300",
    "-1",
)
OPTIONS = (
    *((), ("level=sequence",), ("level=geometric",), ("action=truncate",)),
    *(("divergence=kl",), ("unified_mask=true",)),
)


@pytest.mark.parametrize("algo", LOSSES)
def test_an_extreme_value_is_refused_or_trains_fresh_tokens(algo):
    names = [name for of, name in KEYWORDS if of == algo and type(GIVEN[name][1]) is float]
    num_trained = 0
    for name, value, option in itertools.product(names, EXTREMES, OPTIONS):
        try:
            loss = choose_loss(Config(algo=algo, algo_args=(f"{name}={value}", *option)))
            try_loss(loss)
        except ValueError as error:
            words = (
                "must be at least",
                "must be above",
                "takes",
                "is allowed",
                "must be token or",
                "take other arguments",
            )
            assert "\n" not in str(error) and any(word in str(error) for word in words)
            continue
        fresh = random_inputs(spread=0.0)
        slopes = gradient(loss, convert_to_float32(fresh))
        assert torch.isfinite(slopes).all() and slopes.any(), (name, value)
        num_trained += 1
    assert num_trained >= 3 * len(names)


@pytest.mark.parametrize(
    ("algo", "items", "message"),
    [
        (
            "vespo",
            ("lambda_positive=100",),
            "k_positive=2 and lambda_positive=100 give weights up to e^90.18",
        ),
        (
            "vespo",
            ("k_negative=1000",),
            "k_negative=1000 and lambda_negative=2 give weights up to e^5217",
        ),
        ("vespo", ("k_positive=0", "lambda_positive=21"), "at most e^20 is allowed"),
        (
            "weighted_topr",
            ("positive_weight=0", "negative_weight=0"),
            "both 0, and nothing is trained",
        ),
        ("grpo", ("clip_low=0", "clip_high=0"), "nothing would be trained; take other arguments"),
        ("mis", ("low=0.9999999", "high=1"), "nothing would be trained; take other arguments"),
    ],
)
def test_what_two_arguments_may_not_be_together_is_one_line_before_anything_starts(
    algo, items, message, capsys
):
    with pytest.raises(SystemExit):
        parse_config(["--algo", algo, "--algo-args", *items])
    said = capsys.readouterr().err
    assert said.startswith(f"error: --algo {algo}: ") and message in said and said.count("\n") == 1
    assert "Traceback" not in said


def test_a_loss_without_a_gradient_on_fresh_tokens_is_refused():
    def masked(inputs):
        return torch.where(inputs.logprobs == inputs.behavior_logprobs, 0.0, inputs.logprobs), {}

    with pytest.raises(ValueError, match=r"whose ratio is 1, have .+ nothing would be trained"):
        try_loss(masked)
    with pytest.raises(ValueError, match="nan"):
        try_loss(lambda inputs: (inputs.logprobs * math.nan, {}))


@pytest.mark.parametrize("algo", LOSSES)
def test_the_defaults_of_every_loss_train_tokens_that_rounding_has_moved(algo):
    try_loss(choose_loss(Config(algo=algo, algo_args=())))


@pytest.mark.parametrize(
    ("algo", "items"),
    [
        ("grpo", ("clip_low=0", "clip_high=0")),
        ("grpo", ("clip_low=1e-6", "clip_high=1e-6", "dual_clip=3")),
        ("gspo", ("clip_low=0", "clip_high=0")),
        ("cispo", ("clip_low=0", "clip_high=0", "unified_mask=true")),
        ("decoupled_ppo", ("clip_low=0", "clip_high=0")),
        ("mis", ("low=0.9999999", "high=1")),
        ("mis", ("low=0.9999999", "high=1", "level=sequence")),
        ("mis", ("low=0.9999999", "high=1", "level=geometric")),
        ("icepop", ("low=0.9999999", "high=1")),
        ("dppo", ("delta_low=1e-9", "delta_high=1e-9")),
        ("gmpo", ("clip_low=1e-9", "clip_high=1e-9")),
        ("m2po", ("m2_threshold=1e-12",)),
    ],
)
def test_a_clip_or_band_that_rounding_alone_leaves_is_refused(algo, items):
    with pytest.raises(
        ValueError,
        match=r"only rounding has moved, .+ nothing would be trained; take other arguments",
    ):
        try_loss(choose_loss(Config(algo=algo, algo_args=items)))


@pytest.mark.parametrize(
    ("algo", "items"),
    [
        ("grpo", ("clip_low=0",)),
        ("grpo", ("clip_high=0",)),
        ("mis", ("high=1",)),
        ("mis", ("low=0.9999999",)),
        ("cispo", ("clip_low=0", "clip_high=0")),
        ("opsm", ("delta=1e-9",)),
    ],
)
def test_a_clip_that_trains_good_tokens_or_bad_ones_alone_or_only_levels_their_weights_is_taken(
    algo, items
):
    try_loss(choose_loss(Config(algo=algo, algo_args=items)))


@pytest.mark.parametrize("algo", LOSSES)
def test_advantages_per_token_are_refused_with_the_losses_that_need_equal_ones(algo, capsys):
    args = ["--algo", algo, "--advantage", "gae"]
    if not hasattr(LOSSES[algo], "needs_equal_advantages"):
        assert parse_config(args).algo == algo
        return
    with pytest.raises(SystemExit):
        parse_config(args)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: --algo {algo} needs one advantage for all tokens of a response, and --advantage"
    )
    assert parse_config(args[:2]).algo == algo


def test_a_loss_of_the_user_s_own_says_itself_that_it_needs_equal_advantages(tmp_path, capsys):
    marked = LOSS.replace(
        "import torch", "import torch\nfrom algos.inputs import needs_equal_advantages"
    )
    path = write_own(tmp_path, marked.replace("def loss(", "@needs_equal_advantages\ndef loss("))
    with pytest.raises(SystemExit):
        parse_config(["--algo", f"{path}:loss", "--advantage", "gae"])
    assert f"--algo {path}:loss needs one advantage for all tokens" in capsys.readouterr().err
    unmarked = write_own(tmp_path, LOSS)
    assert parse_config(["--algo", f"{unmarked}:loss", "--advantage", "gae"]).advantage == "gae"


def convert_to_float32(inputs):
    columns = {name: getattr(inputs, name).detach() for name in inputs.__dataclass_fields__}
    columns = {
        name: column.float() if column.is_floating_point() else column
        for name, column in columns.items()
    }
    columns["logprobs"].requires_grad_()
    return LossInputs(**columns)

"""Every option of a run, in one flat frozen dataclass that tyro turns into the command line.

Imports nothing heavy, so that `python train_async.py --help` answers at once. Sizes are in tokens, groups or steps and
times in seconds, as each field says; symbols in parentheses are those of ROLL Flash (arXiv 2510.11345).
"""

import dataclasses
import math
import re
import sys
from dataclasses import dataclass
from typing import Literal

Algo = Literal[
    "reinforce", "grpo", "decoupled_ppo", "tis", "cispo", "topr", "weighted_topr", "gspo", "kimi", "icepop", "aipo"
]  # fmt: skip
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce", "reinforce_baseline"]
KlEstimator = Literal["k1", "k2", "k3", "unbiased"]


@dataclass(frozen=True)
class Config:
    """Train a language model by asynchronous reinforcement learning under a freshness bound."""

    # What is trained
    model: str = "tiny"
    """Path or Hugging Face name of a causal LM; `tiny` is made here, in about a minute, on first use."""
    task: str = "addition"
    """`addition`, `gsm8k`, or `reasoning_gym:NAME` with NAME a dataset of the reasoning-gym library."""
    data_path: str | None = None
    """Local copy of the task's dataset (a folder `datasets` can load), for machines that reach no hub."""
    algo: Algo = "grpo"
    """Policy loss: a file of algos/, with its formula and paper on top."""
    advantage: Advantage = "grpo"
    """Advantage estimator, algos/advantages.py."""

    # How much, and how stale
    steps: int = 80
    """Steps to train; each consumes one batch of groups and makes the next policy version."""
    groups_per_step: int = 32
    """Groups (prompts) that one step consumes (B)."""
    group_size: int = 8
    """Responses sampled per prompt (G)."""
    async_ratio: float = 1.0
    """At most ⌊(1 + async_ratio)·groups_per_step⌋ groups are outstanding (α, may be fractional; 0 is synchronous)."""
    stale_policy: Literal["wait", "drop"] = "wait"
    """How the bound is kept: block for the groups that expire first, or drop and re-issue what expired."""
    publish_delay: int = 0
    """Publish weights this many steps late (K): with async_ratio 0 every token is exactly K steps stale."""
    on_update: Literal["keep", "recompute", "wait"] = "keep"
    """Running requests at a weight update: go on with the old KV cache, rebuild it, or drain first."""

    # Sampling
    max_prompt_tokens: int = 40
    """Longest prompt, tokens; a longer one is an error."""
    max_response_tokens: int = 48
    """Longest response, tokens; a longer one is cut and scored as it is."""
    temperature: float = 1.0
    """Softmax temperature of sampling and of the trainer's log-probs."""
    top_p: float = 1.0
    """Nucleus mass of sampling and of the trainer's log-probs."""
    max_running_requests: int = 128
    """Trajectories that one rollout worker samples at the same time."""

    # Optimisation
    lr: float = 1e-3
    """AdamW learning rate after warm-up."""
    warmup: int = 5
    """Optimizer updates of linear warm-up."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    max_grad_norm: float = 1.0
    """Gradient norm above which the gradient is scaled down."""
    clip_low: float | None = None
    """Lower clip range (ε_low) of the loss; unset uses the loss's own default."""
    clip_high: float | None = None
    """Upper clip range (ε_high) of the loss; unset uses the loss's own default."""
    minibatches: int = 1
    """Optimizer updates per step; must divide groups_per_step."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Proximal log-probs with minibatches > 1: a forward pass per step, or interpolated from behavior and current."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Token weights of the summed loss: 1/tokens, 1/(sequences·length), or 1/(sequences·max_response_tokens)."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the initial model (β); 0 keeps no reference model in memory."""
    kl_estimator: KlEstimator = "k3"
    """Form of the KL penalty, algos/kl.py: which of them have a gradient that is a KL's, and whose."""
    max_tokens_per_microbatch: int = 16384
    """Token budget of one forward/backward pass, prompt tokens included: memory only, never the gradient."""

    # Placement
    num_rollout_workers: int | None = None
    """Rollout workers on this node; unset takes one per GPU that trains nothing, and at least one."""
    gpu_memory_utilization: float = 0.4
    """Share of a GPU's memory that an engine may use where it shares the GPU with a trainer rank; 0.9 on its own."""

    # Evaluation, records
    eval_every: int = 10
    """Steps between evaluations on held-out problems; 0 turns them off."""
    eval_problems: int = 256
    """Held-out problems per evaluation, one sampled response each."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves only the last step."""
    seed: int = 0
    """Seed of prompts, sampling and initialisation."""
    run_name: str | None = None
    """Name of the run's directory under runs_dir; unset makes one from task, algo, α and the time."""
    runs_dir: str = "runs"
    """Directory that holds the runs."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Mirror the metrics to Weights & Biases."""

    # Timeouts and failures
    startup_timeout_s: float = 600.0
    """Longest start of a rollout worker, seconds."""
    rollout_timeout_s: float = 300.0
    """Longest wait for a batch, an evaluation or a weight update, seconds; past it all stacks are dumped."""
    reward_timeout_s: float = 10.0
    """Longest scoring of one response, seconds; past it the trajectory has failed."""
    max_worker_restarts: int = 3
    """Restarts of rollout workers in one run; one more death ends it."""

    def checked(self) -> "Config":
        """Return the config, or raise ValueError: one line with what was got, what is allowed and what to change.

        Not in __post_init__, where tyro would catch the error and fold it into a box.
        """
        _check_ranges(self)
        _check_cross_fields(self)
        return self

    @property
    def max_outstanding_groups(self) -> int:
        """⌊(1 + α)·B⌋: groups that are running, waiting, or in the batch whose weights are not published."""
        return math.floor((1 + self.async_ratio) * self.groups_per_step + 1e-9)

    @property
    def max_staleness(self) -> int:
        """Oldest version a trained token may have, in steps behind the trainer: ⌈α⌉ + publish_delay."""
        return math.ceil(self.async_ratio - 1e-9) + self.publish_delay

    @property
    def max_sequence_tokens(self) -> int:
        """Context length of the engine: longest prompt plus longest response."""
        return self.max_prompt_tokens + self.max_response_tokens

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)


_AT_LEAST = {
    "steps": 1, "groups_per_step": 1, "group_size": 1, "async_ratio": 0, "publish_delay": 0, "max_prompt_tokens": 1,
    "max_response_tokens": 1, "max_running_requests": 1, "warmup": 0, "weight_decay": 0, "minibatches": 1,
    "kl_coef": 0, "eval_every": 0, "eval_problems": 1, "save_every": 0, "max_worker_restarts": 0, "seed": 0,
}  # fmt: skip
_ABOVE_ZERO = (
    "temperature", "lr", "max_grad_norm", "startup_timeout_s", "rollout_timeout_s", "reward_timeout_s",
)  # fmt: skip
_SHARES = ("top_p", "gpu_memory_utilization")
_TASK = re.compile(r"addition|gsm8k|reasoning_gym:\w+")


def _check_ranges(config: Config) -> None:
    for name, low in _AT_LEAST.items():
        if not getattr(config, name) >= low:
            raise ValueError(f"--{_flag(name)} must be at least {low}, got {getattr(config, name)}")
    for name in _ABOVE_ZERO:
        if not getattr(config, name) > 0:
            raise ValueError(f"--{_flag(name)} must be above 0, got {getattr(config, name)}")
    for name in _SHARES:
        if not 0 < getattr(config, name) <= 1:
            raise ValueError(f"--{_flag(name)} must be in (0, 1], got {getattr(config, name)}")
    if config.clip_low is not None and not 0 <= config.clip_low <= 1:
        raise ValueError(f"--clip-low must be in [0, 1], got {config.clip_low}")
    if config.clip_high is not None and not config.clip_high >= 0:
        raise ValueError(f"--clip-high must be at least 0, got {config.clip_high}")
    if config.num_rollout_workers is not None and config.num_rollout_workers < 1:
        raise ValueError(f"--num-rollout-workers must be at least 1, got {config.num_rollout_workers}")
    if not _TASK.fullmatch(config.task):
        raise ValueError(f"--task must be addition, gsm8k or reasoning_gym:NAME, got {config.task!r}")
    if config.run_name is not None and not re.fullmatch(r"[\w.+=-]+", config.run_name):
        raise ValueError(f"--run-name may hold letters, digits and . _ + = -, got {config.run_name!r}")


def _check_cross_fields(config: Config) -> None:
    if config.groups_per_step % config.minibatches:
        raise ValueError(
            f"--groups-per-step {config.groups_per_step} is not a multiple of --minibatches {config.minibatches}: "
            f"{config.groups_per_step} / {config.minibatches} = {config.groups_per_step / config.minibatches:.2f} "
            "groups per update; change one of the two"
        )
    if config.max_tokens_per_microbatch < config.max_sequence_tokens:
        raise ValueError(
            f"--max-tokens-per-microbatch {config.max_tokens_per_microbatch} is below one whole sequence: "
            f"--max-prompt-tokens {config.max_prompt_tokens} + --max-response-tokens {config.max_response_tokens} = "
            f"{config.max_sequence_tokens}; raise the first or lower the others"
        )
    if config.group_size == 1 and config.advantage != "reinforce":
        raise ValueError(
            f"--advantage {config.advantage} compares responses of one prompt, and --group-size 1 leaves nothing to "
            "compare: every advantage would be 0; use --group-size 2 or more, or --advantage reinforce"
        )
    if config.algo == "tis" and None not in (config.clip_low, config.clip_high) and config.clip_low > config.clip_high:
        raise ValueError(
            f"--clip-low {config.clip_low} is above --clip-high {config.clip_high}, the range of tis is empty"
        )


def _flag(name: str) -> str:
    return name.replace("_", "-")


def parse_config(args: list[str] | None = None) -> Config:
    """Read the command line (`args`, or sys.argv) into a Config.

    Exits with status 2 and one line that says what was got, what is allowed and what to change.
    """
    import tyro

    config = tyro.cli(Config, args=args, config=(tyro.conf.FlagConversionOff,))
    try:
        return config.checked()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None

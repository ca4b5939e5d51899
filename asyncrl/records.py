"""Records that are sent between controller, rollout workers and trainer.

T is the length of a trajectory in tokens, prompt included. This is the life of a trajectory. An arrow leads to the next
call in time, and at a semicolon other work is between:

1. Controller (asyncrl/controller/), when a place is free: `Controller.admit_and_send` → `Dispatcher.admit_groups` →
   `TicketSource.next_group` → `SampleBuffer.admit` → `TicketSource.for_group` → `Dispatcher.enqueue` → `send_out` →
   `assign` → the message `Tickets`.
2. Worker (rollout.py, asyncrl/engine/): `RolloutWorker._start_tickets` → `make_episodes` → `_run_ticket` →
   `Episode.run` → `play` → `take_turns` → `act` → `ask_policy` → `LLMProxy.generate` → `sample_part` →
   `read_completion`; then `Environment.step` → `make_trajectory` → `RolloutWorker.flush` → the message `Finished`.
3. Controller: `Controller.on_message` → `finish_tickets` (its slot is free) → `_on_trajectory` → `Dispatcher.add` →
   `SampleBuffer.add`. The trajectory of an evaluation goes to `Evaluation.add`.
4. Trainer (asyncrl/job/node.py, asyncrl/trainer/): `Leader.take_batch` → `Controller.wait_for_batch` →
   `hold_batch` → `SampleBuffer.find_batch`; `consume_batch`; `share_batch` → `sequences_by_minibatch` →
   `estimate_advantages`; `distribute`; `Policy.train_step` → `pack_to_train` → `pack`; for each update `_make_update` →
   `_per_token_loss` → `forward` → `TokenLogprobs.forward`, the log-probs now → the loss, times `token_weights`;
   `backward`; `_step` (clips the gradient, calls the optimizer).

The death of a worker, and cancellation, are in asyncrl/controller/controller.py.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "failed", "aborted"]
"""End of a trajectory."""
CompletionEnd = Literal["stop", "length", "interrupted"]
"""End of a response, or of its first part. The rest of an `interrupted` one can be sampled.

`interrupted` is vLLM's `abort`. `LLMProxy.generate` continues to sample after an interruption. It returns `interrupted`
only if its caller ended the request. Episode then reports `aborted`.
"""
EVALUATION_GROUP, GREEDY_GROUP = -1, -2
"""group_id of evaluation tickets, sampled as in training or greedily; they never enter the buffer."""


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """Values that are recorded for each token when it is sampled. A completion has R tokens, a sequence T.

    A new column is a field here. `read_completion` fills it, and a loss reads it as `inputs.columns[NAME]`.
    A token that the policy did not write has the value `off_mask`.
    """

    behavior_logprobs: np.ndarray = field(metadata={"dtype": np.float32, "off_mask": 0})
    """The engine's log-prob of the token under the exact sampling transform, nats."""
    policy_versions: np.ndarray = field(metadata={"dtype": np.int32, "off_mask": -1})
    """Version of the weights that sampled the token, steps."""
    top_ids: np.ndarray | None = field(
        default=None, metadata={"dtype": np.int32, "off_mask": 0, "is_wide": True}
    )
    """[R or T, K] ids of the K likeliest tokens in the token's place, likeliest first. None without --top-logprobs."""
    top_logprobs: np.ndarray | None = field(
        default=None, metadata={"dtype": np.float32, "off_mask": 0, "is_wide": True}
    )
    """[R or T, K] log-probs of the same, nats, as behavior_logprobs. None without --top-logprobs."""


DTYPES = {column.name: np.dtype(column.metadata["dtype"]) for column in fields(TokenColumns)}
"""Type of each column, by its name."""
OPTIONAL_COLUMNS = {column.name for column in fields(TokenColumns) if column.default is None}
"""Columns that some runs do not record."""


def slice_columns(record: TokenColumns, where: slice | np.ndarray) -> dict[str, np.ndarray]:
    """Return the recorded columns of some tokens, by name. `where` is a slice, or a mask of all tokens."""
    columns = {name: getattr(record, name) for name in DTYPES}
    return {name: values[where] for name, values in columns.items() if values is not None}


def join_columns(parts: Sequence[TokenColumns]) -> dict[str, np.ndarray]:
    """Return the columns of records that follow each other, by name. Raises RuntimeError as `spread_columns`."""
    *starts, length = itertools.accumulate((len(part.policy_versions) for part in parts), initial=0)
    return spread_columns(zip(starts, parts, strict=True), length)


def spread_columns(parts: Iterable[tuple[int, TokenColumns]], length: int) -> dict[str, np.ndarray]:
    """Return the columns of `length` tokens by name. Each part begins at its position.

    The rest has the values off the loss mask. An optional column is left out if no part has it. Raises RuntimeError if
    a part with tokens lacks a column of another one.
    """
    placed = [(start, slice_columns(part, slice(None))) for start, part in parts]
    spread = {}
    num_sampled = sum(len(columns["policy_versions"]) > 0 for _, columns in placed)
    for field_ in fields(TokenColumns):
        name = field_.name
        known = [(start, columns[name]) for start, columns in placed if name in columns]
        if not known and name in OPTIONAL_COLUMNS:
            continue
        if sum(len(values) > 0 for _, values in known) < num_sampled:
            raise RuntimeError(
                f"only some parts of a response have the column {name}; a part from a checkpoint lacks a column that "
                "was added since, so begin a new run"
            )
        shape = known[0][1].shape[1:] if known else ()
        spread[name] = np.full((length, *shape), field_.metadata["off_mask"], DTYPES[name])
        for start, values in known:
            spread[name][start : start + len(values)] = values
    return spread


@dataclass(frozen=True)
class Completion(TokenColumns):
    """A response, or its first part. Any worker can continue it. Written by a rollout worker."""

    tokens: list[int]
    """R token ids of the response."""
    finish_reason: CompletionEnd
    experts: np.ndarray | None = None
    """[P + R − 1, layers, k] uint8 or uint16, experts of all tokens but the last: P of the prompt, R − 1 sampled. The
    engine's keys and values had them at the last token. None without --router-replay."""

    @property
    def text_tokens(self) -> list[int]:
        """Token ids of the text for rewards and environments, without the stop token."""
        return self.tokens[:-1] if self.finish_reason == "stop" else self.tokens


@dataclass(frozen=True)
class Ticket:
    """A request for one trajectory, or for all trajectories of a group. Written by the controller."""

    ticket_id: int
    """Unique in the run. A ticket that is issued again has a new one."""
    group_id: int
    member: int
    """Position in the group, from 0, of the trajectory or of the first one. Extra members come last."""
    num_members: int
    """Number of trajectories, sampled by one request: 1, or more in extras/baselines.py."""
    attempt: int
    """Number of this node's workers that died with the ticket."""
    prompt_tokens: tuple[int, ...]
    """Token ids of the prompt; empty if the environment's first observation is the prompt."""
    answer: str
    """Right answer, or the problem's columns as JSON, for the reward function."""
    environment_seed: int | None
    """Seed of the environment, the same for a whole group; None for single-turn tasks."""
    seed: int
    """Sampling seed, from run seed, group and member. A ticket whose workers died twice gets a new one."""
    min_version: int
    """Policy version that the worker must have loaded before it starts, steps. Later members of a group can need more
    (`Dispatcher.needed_version`). `SampleBuffer.add` checks that."""
    prefix: Completion | None = field(default=None, compare=False)
    """First part of the response, from before the run was resumed. It is continued."""

    @property
    def is_evaluation(self) -> bool:
        """True if its problem is held out."""
        return self.group_id in (EVALUATION_GROUP, GREEDY_GROUP)


@dataclass(frozen=True)
class Trajectory(TokenColumns):
    """A sampled response with all data for training. Written by a rollout worker."""

    ticket_id: int
    group_id: int
    member: int
    tokens: np.ndarray
    """[T] int64, prompt and response. The environment's tokens are between the turns."""
    loss_mask: np.ndarray
    """[T] bool, True for tokens that the policy wrote."""
    reward: float
    """Sum of the rewards of all steps; NaN if it failed or was aborted."""
    finish_reason: FinishReason
    """`stop`: policy or environment ended it. `length`: truncated. `failed`: a step or reward raised or hung.
    `aborted`: the controller ended it."""
    failure: str
    """Reason of a failure, one line; else empty."""
    num_turns: int
    """Turns of the policy; 1 for single-turn tasks."""
    started_at: float
    """Unix time, seconds."""
    ended_at: float
    """Unix time, seconds."""
    worker: int
    """Index of the rollout worker."""
    turns: tuple[tuple[float, float, float], ...] = ()
    """Start and end of each turn that was answered, and the time of the answer; Unix times, seconds."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name; empty if it failed or was aborted."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of the turns of an environment. Empty for other tasks, and if it failed or was aborted."""
    last_observation: str = ""
    """Text of such an environment that no token shows, because the episode ended."""
    segment_lengths: tuple[int, ...] = ()
    """Tokens of each segment of an agent's trajectory. The arrays join the segments. Empty for other tasks: all tokens
    are one segment. A generated token is on the loss mask of one segment only."""
    experts: np.ndarray | None = None
    """[T − 1, layers, k] uint8 or uint16, experts of the last completion; None without --router-replay."""

    @property
    def is_evaluation(self) -> bool:
        """True if its problem is held out."""
        return self.group_id in (EVALUATION_GROUP, GREEDY_GROUP)

    @property
    def num_generated(self) -> int:
        """Tokens that the policy wrote."""
        return int(self.loss_mask.sum())

    @property
    def segments(self) -> list[slice]:
        """Segments as slices of the arrays. Each is a sequence for the trainer."""
        ends = itertools.accumulate(self.segment_lengths or (len(self.tokens),))
        return [slice(start, end) for start, end in itertools.pairwise([0, *ends])]

    @property
    def num_beyond_prompt(self) -> int:
        """Tokens that max_response_tokens limits: all after the prompt, or an agent's sampled tokens, at least one."""
        if self.segment_lengths:
            return self.num_generated
        return len(self.tokens) - int(self.loss_mask.argmax())

    @functools.cached_property
    def oldest_version(self) -> int:
        """Oldest version of its generated tokens, steps. There must be one."""
        return int(self.policy_versions[self.loss_mask].min())


@dataclass(frozen=True)
class Group:
    """The trajectories of one prompt: the unit of admission, dropping and advantage."""

    group_id: int
    trajectories: tuple[Trajectory, ...]
    """group_size trajectories, by member."""
    problem: int = -1
    """Index of its problem in the task, from the controller; −1 if unknown."""

    @property
    def rewards(self) -> np.ndarray:
        """[G] float64."""
        return np.array([t.reward for t in self.trajectories], dtype=np.float64)

    @property
    def oldest_version(self) -> int:
        """Oldest version of the generated tokens of all trajectories, steps."""
        return min(t.oldest_version for t in self.trajectories)


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise RuntimeError for a trajectory that could poison a loss, with its first wrong token.

    A generated token needs a version, and a finite log-prob up to 1e-4 nats, to allow for rounding.
    """
    logprobs = trajectory.behavior_logprobs
    # a NaN is in no range
    is_valid = (logprobs > -np.inf) & (logprobs <= 1e-4) & (trajectory.policy_versions >= 0)
    bad = np.flatnonzero(trajectory.loss_mask & ~is_valid)
    if len(bad):
        t = int(bad[0])
        raise RuntimeError(
            f"trajectory {trajectory.ticket_id} (group {trajectory.group_id}, member {trajectory.member}, worker "
            f"{trajectory.worker}), token {t} (id {int(trajectory.tokens[t])}): behavior log-prob "
            f"{float(trajectory.behavior_logprobs[t])} nats at version {int(trajectory.policy_versions[t])}; expected "
            "a finite value ≤ 0 and a version ≥ 0. The engine's log-prob is broken: check the model's dtype and head"
        )

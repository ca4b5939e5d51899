"""The records that travel between controller, rollout workers and trainer. Frozen; they pickle small.

T is the length of one trajectory in tokens, prompt and everything after it.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "failed", "aborted"]
EVALUATION_GROUP, GREEDY_GROUP = -1, -2
"""group_id of evaluation tickets, sampled as in training or greedily; they never enter the buffer."""


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """What is recorded of each token when it is sampled. A completion has R tokens, a sequence T.

    A new column is a field here. `read_completion` fills it, and a loss reads it as `inputs.columns[NAME]`.
    A token that the policy did not write has the value `off_mask`.
    """

    behavior_logprobs: np.ndarray = field(metadata={"dtype": np.float32, "off_mask": 0})
    """The engine's log-prob of the token under the exact sampling transform, nats."""
    policy_versions: np.ndarray = field(metadata={"dtype": np.int32, "off_mask": -1})
    """Version of the weights that sampled the token, steps."""


DTYPES = {column.name: np.dtype(column.metadata["dtype"]) for column in fields(TokenColumns)}
"""Type of each column, by its name."""


def slice_columns(record: TokenColumns, tokens: slice | np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns of some tokens by name, but for those that were not recorded."""
    columns = {name: getattr(record, name) for name in DTYPES}
    return {name: values[tokens] for name, values in columns.items() if values is not None}


def join_columns(parts: Iterable[TokenColumns]) -> dict[str, np.ndarray]:
    """Return the columns of several records behind each other, by name."""
    columns = [slice_columns(part, slice(None)) for part in parts]
    empty = {name: np.zeros(0, dtype) for name, dtype in DTYPES.items()}
    names = columns[0] if columns else empty
    return {name: np.concatenate([part[name] for part in columns or [empty]]) for name in names}


def spread_columns(parts: Iterable[tuple[int, TokenColumns]], length: int) -> dict[str, np.ndarray]:
    """Return columns [length] by name. Each part begins at its place; elsewhere are the values off the loss mask."""
    spread = {}
    for field_ in fields(TokenColumns):
        spread[field_.name] = np.full(length, field_.metadata["off_mask"], DTYPES[field_.name])
    for start, part in parts:
        for name, values in slice_columns(part, slice(None)).items():
            spread[name][start : start + len(values)] = values
    return spread


@dataclass(frozen=True)
class Completion(TokenColumns):
    """A response, whole or as far as it has come. Any worker can continue it. Written by a rollout worker."""

    tokens: list[int]
    """R token ids, those of the response only."""
    finish_reason: FinishReason
    """Why it has ended; `aborted` if more of it can be sampled."""
    experts: np.ndarray | None = None
    """[P + R − 1, layers, k] uint8 or uint16, the experts of the prompt's P tokens and of all its own but the last.
    They are those of the engine's keys and values when it sampled the last token; None without --router-replay."""

    @property
    def text_tokens(self) -> list[int]:
        """Token ids of the text that rewards and environments get: all but the stop token."""
        return self.tokens[:-1] if self.finish_reason == "stop" else self.tokens


@dataclass(frozen=True)
class Ticket:
    """Asks a rollout worker for one trajectory, or for all those of a group. Written by the controller."""

    ticket_id: int
    """Unique in the run; a re-issued ticket has a new one."""
    group_id: int
    """Group the trajectory belongs to."""
    member: int
    """Position in the group, from 0; extra members come last. The first one's, if it asks for several."""
    num_members: int
    """Trajectories asked for, sampled by one request: 1, or more in extras/baselines.py."""
    attempt: int
    """0 for the first issue, one more each time a worker of the run's own died with it."""
    prompt_tokens: tuple[int, ...]
    """The prompt, token ids; empty where the environment's first observation is the prompt."""
    answer: str
    """What the reward function compares with; its form is the task's own."""
    environment_seed: int | None
    """Seed of the environment that asks, the same for a whole group; None for single-turn tasks."""
    seed: int
    """Sampling seed, from run seed, group and member, and from the second new attempt on also from that."""
    min_version: int
    """Policy version that the worker must have loaded before it starts, steps."""
    prefix: Completion | None = field(default=None, compare=False)
    """What there is of the response from before the run was resumed; it is continued."""

    @property
    def is_evaluation(self) -> bool:
        """Whether it asks for a held-out problem."""
        return self.group_id in (EVALUATION_GROUP, GREEDY_GROUP)


@dataclass(frozen=True)
class Trajectory(TokenColumns):
    """One sampled response and all that training needs of it. Written by a rollout worker."""

    ticket_id: int
    group_id: int
    member: int
    tokens: np.ndarray
    """[T] int64, prompt then response; where there are several turns, the environment's tokens stand between them."""
    loss_mask: np.ndarray
    """[T] bool, True where the policy wrote the token."""
    reward: float
    """Sum of the rewards of all steps; NaN when failed or aborted."""
    finish_reason: FinishReason
    """`stop` (policy or environment ended it), `length` (cut), `failed` (step or reward raised or hung), `aborted`."""
    failure: str
    """Why it failed, one line; empty otherwise."""
    num_turns: int
    """Turns of the policy; 1 for single-turn tasks."""
    started_at: float
    """Unix time, seconds."""
    ended_at: float
    """Unix time, seconds."""
    worker: int
    """Index of the rollout worker."""
    turns: tuple[tuple[float, float, float], ...] = ()
    """When the policy began and ended each turn that was answered, and when it was answered; Unix times, seconds."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """What the reward is made of, by the names that its functions give; empty when failed or aborted."""
    segment_lengths: tuple[int, ...] = ()
    """Tokens of each segment of an agent's trajectory; the fields above have them joined. Empty for other tasks: all
    tokens are one segment. A generated token is on the loss mask of one segment only."""
    experts: np.ndarray | None = None
    """[T − 1, layers, k] uint8 or uint16, those of the last completion; None without --router-replay."""

    @property
    def is_evaluation(self) -> bool:
        """Whether it answers a held-out problem."""
        return self.group_id in (EVALUATION_GROUP, GREEDY_GROUP)

    @property
    def num_generated(self) -> int:
        """Tokens that the policy wrote."""
        return int(self.loss_mask.sum())

    @property
    def segments(self) -> list[slice]:
        """Places of the segments in the arrays, each a sequence for the trainer."""
        ends = np.cumsum(self.segment_lengths or len(self.tokens)).tolist()
        return [slice(start, end) for start, end in itertools.pairwise([0, *ends])]

    @property
    def num_beyond_prompt(self) -> int:
        """Tokens that max_response_tokens limits: all after the prompt, or those that an agent sampled; needs one."""
        if self.segment_lengths:
            return self.num_generated
        return len(self.tokens) - int(self.loss_mask.argmax())

    @property
    def oldest_version(self) -> int:
        """Oldest version among its generated tokens, steps; needs at least one such token."""
        return int(self.policy_versions[self.loss_mask].min())


@dataclass(frozen=True)
class Group:
    """The trajectories of one prompt: the unit of admission, of dropping and of advantage."""

    group_id: int
    trajectories: tuple[Trajectory, ...]
    """group_size trajectories, in member order."""
    problem: int = -1
    """Index of its problem in the task; −1 where it is not known. By controller."""

    @property
    def rewards(self) -> np.ndarray:
        """[G] float64."""
        return np.array([t.reward for t in self.trajectories], dtype=np.float64)

    @property
    def oldest_version(self) -> int:
        """Oldest version among the generated tokens of all its trajectories, steps."""
        return min(t.oldest_version for t in self.trajectories)


def check_trajectory(trajectory: Trajectory) -> None:
    """Refuse a trajectory whose behaviour log-probs could poison a loss.

    Raises RuntimeError naming the trajectory and the first offending token: a log-prob that is not finite or is
    positive by more than rounding, or a generated token without a version.
    """
    mask = trajectory.loss_mask
    logprobs = np.where(mask, trajectory.behavior_logprobs, 0.0)
    bad = np.flatnonzero(
        ~np.isfinite(logprobs) | (logprobs > 1e-4) | (mask & (trajectory.policy_versions < 0))
    )
    if len(bad):
        t = int(bad[0])
        raise RuntimeError(
            f"trajectory {trajectory.ticket_id} (group {trajectory.group_id}, member {trajectory.member}, worker "
            f"{trajectory.worker}), token {t} (id {int(trajectory.tokens[t])}): behavior log-prob "
            f"{float(trajectory.behavior_logprobs[t])} nats at version {int(trajectory.policy_versions[t])}; expected "
            "a finite value ≤ 0 and a version ≥ 0. The engine's log-prob is broken: check the model's dtype and head"
        )

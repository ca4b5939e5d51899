"""Responses: what the engine has sampled, and how it is read from vLLM's output."""

from dataclasses import dataclass, field

import numpy as np

from asyncrl.engine.vllm_setup import token_versions
from asyncrl.records import Completion, FinishReason, join_columns


@dataclass
class Request:
    """A response that is being sampled, by one request of the engine or by several, one after the other."""

    engine_id: str | None = None
    """The engine request that samples it now."""
    aborted: bool = False
    """Whether its caller gave it up, and not an update."""
    segments: list[Completion] = field(default_factory=list)
    """What was sampled before each update that interrupted it."""

    @property
    def tokens(self) -> list[int]:
        """All tokens sampled so far, which the next request of the engine continues."""
        return [token for segment in self.segments for token in segment.tokens]

    def keep_only(self, version: int) -> int:
        """Drop what was sampled unless all of it is of one version. Returns the number of tokens dropped."""
        if all((segment.policy_versions == version).all() for segment in self.segments):
            return 0
        num_tokens = len(self.tokens)
        self.segments.clear()
        return num_tokens

    def end(self, finish_reason: FinishReason) -> Completion:
        """Return the whole response: what was sampled between updates, joined."""
        experts = self.segments[-1].experts if self.segments else None
        return Completion(self.tokens, finish_reason, experts, **join_columns(self.segments))


def read_completion(output) -> Completion:
    """Return the Completion in a vLLM CompletionOutput.

    Raises RuntimeError if the engine ended it for another reason than those of a response.
    """
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
    if output.finish_reason not in reasons:
        raise RuntimeError(f"the engine ended a request with {output.finish_reason!r}")
    tokens = list(output.token_ids)
    logprobs = output.logprobs.logprobs if tokens else []
    return Completion(
        tokens,
        reasons[output.finish_reason],
        output.routed_experts,
        behavior_logprobs=np.array(logprobs, dtype=np.float32),
        policy_versions=token_versions(output),
    )

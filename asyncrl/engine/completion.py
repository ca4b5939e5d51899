"""Responses, and how they are read from vLLM's output."""

from dataclasses import dataclass, field

import numpy as np

from asyncrl.records import Completion, CompletionEnd, join_columns


@dataclass
class Request:
    """A running response. It is sampled by one request of the engine, or by several one after the other."""

    engine_id: str | None = None
    """The engine's running request for it."""
    is_aborted: bool = False
    """True if its caller ended it, so that the rest is not sampled. Its Episode is then aborted, too. An agent can end
    one call, and its episode continues."""
    parts: list[Completion] = field(default_factory=list)
    """Parts between updates that interrupted it."""

    @property
    def tokens(self) -> list[int]:
        """All tokens sampled so far."""
        return [token for part in self.parts for token in part.tokens]

    def keep_only(self, version: int) -> int:
        """Drop all tokens if any has another version. Return the number of dropped tokens."""
        if all((part.policy_versions == version).all() for part in self.parts):
            return 0
        num_tokens = len(self.tokens)
        self.parts.clear()
        return num_tokens

    def end(self, finish_reason: CompletionEnd) -> Completion:
        if len(self.parts) == 1 and self.parts[0].finish_reason == finish_reason:
            return self.parts[0]
        experts = self.parts[-1].experts if self.parts else None
        return Completion(self.tokens, finish_reason, experts, **join_columns(self.parts))


def read_completion(output, num_top: int) -> Completion:
    """Return the Completion of a vLLM CompletionOutput with the `num_top` likeliest tokens in each place.

    Raises RuntimeError for an unknown finish reason.
    """
    reasons: dict[str, CompletionEnd] = {"stop": "stop", "length": "length", "abort": "interrupted"}
    if output.finish_reason not in reasons:
        raise RuntimeError(f"the engine ended a request with {output.finish_reason!r}")
    tokens = list(output.token_ids)
    # vLLM lists the sampled token of each place first, then the likeliest ones, after the sampling transform.
    shape = (len(tokens), 1 + num_top)
    logprobs = np.reshape(output.logprobs.logprobs if tokens else [], shape).astype(np.float32)
    top = {}
    if num_top:
        ids = np.reshape(output.logprobs.token_ids if tokens else [], shape).astype(np.int32)
        likeliest = slice(1, 1 + num_top)
        top = {"top_ids": ids[:, likeliest], "top_logprobs": logprobs[:, likeliest]}
    return Completion(
        tokens,
        reasons[output.finish_reason],
        output.routed_experts,
        behavior_logprobs=logprobs[:, 0],
        policy_versions=token_versions(output),
        **top,
    )


def token_versions(output) -> np.ndarray:
    """Return the version that sampled each token of a CompletionOutput, [R] int32."""
    versions = np.full(len(output.token_ids), -1, dtype=np.int32)
    # vLLM stamps a token with the version that LLMProxy._load set before it was sampled. check_trajectory refuses a
    # token that is in no span.
    for span in output.weight_versions:
        versions[span.start : span.end] = int(span.version)
    return versions

"""Contradictions in a trajectory of a host: with its ticket, with the run's options, or within itself.

Every trajectory is checked before it is used; 50 tokens take about 20 µs. verify.py checks for a share of them whether
log-probs and rewards are true.
"""

from collections.abc import Iterator
from itertools import chain, pairwise
from math import isclose, isnan, log

import numpy as np

from asyncrl.config import Config, is_environment
from asyncrl.engine.episode import MAX_LAST_OBSERVATION
from asyncrl.engine.rewards import MAX_FAILURE, MAX_REWARD, are_parts
from asyncrl.records import DTYPES, OPTIONAL_COLUMNS, Ticket, Trajectory, slice_columns

MAX_LOGPROB = 1e-4  # nats, by rounding
MAX_SURPRISE = 40.0
"""Most nats that a response can be less likely than if all tokens of the vocabulary were equally likely. For tokens
sampled by their probabilities p, 1/∏(p·vocabulary) is 1 on average. So by Markov's inequality an honest response
exceeds this once in e⁴⁰. A larger ratio of probabilities would overflow in a loss."""
CLOCK_SLACK_S = 1.0
"""Most seconds that an honest clock can be set back."""
_DTYPES = {"tokens": np.int64, "loss_mask": np.bool_, **DTYPES}


def find_mistake(
    trajectory: Trajectory, ticket: Ticket, config: Config, newest_version: int, vocab_size: int
) -> str | None:
    """Return, in a few words, what no honest host sends for this ticket; None if there is no such mistake.

    wire.py has checked the types of the fields. `ticket.min_version` is the version that the ticket needed when it was
    given out. `newest_version` is the newest that its worker was told of.
    """
    return next(_find_mistakes(trajectory, ticket, config, newest_version, vocab_size), None)


def _find_mistakes(
    t: Trajectory, ticket: Ticket, config: Config, newest_version: int, vocab_size: int
) -> Iterator[str]:
    """Find all mistakes. Each check assumes that the checks before it found no mistake."""
    yield from _check_ticket(t, ticket, vocab_size)
    generated = np.flatnonzero(t.loss_mask)
    num_known = _count_known(t, generated, ticket)
    versions = t.policy_versions[generated[num_known:]].tolist()
    if config.is_agent:
        yield from _check_segments(t, config)
    else:
        if t.segment_lengths:
            yield "segments, which only an agent has"
        yield from _check_places(t, generated, ticket, config)
        must_continue = ticket.prefix is not None and config.on_update != "restart"
        if must_continue and len(generated) and not num_known:
            yield "another beginning than the ticket's"
        if versions != sorted(versions):
            yield f"versions {versions[0]} … {versions[-1]}, not ascending"
    oldest = ticket.min_version
    if versions and not (oldest <= min(versions) and max(versions) <= newest_version):
        yield (
            f"versions {min(versions)} … {max(versions)}, "
            f"not from {oldest} at least to {newest_version} at most"
        )
    yield from _check_times(t, config.is_agent)
    yield from _check_values(t, generated, vocab_size)
    yield from _check_ending(t, len(generated), config)


def _check_ticket(t: Trajectory, ticket: Ticket, vocab_size: int) -> Iterator[str]:
    if (t.ticket_id, t.group_id) != (ticket.ticket_id, ticket.group_id):
        yield f"ticket {t.ticket_id} of group {t.group_id}, asked were {ticket.ticket_id} and {ticket.group_id}"
    if not 0 <= t.member - ticket.member < ticket.num_members:
        yield f"member {t.member}, asked were {ticket.num_members} from {ticket.member} on"
    for name, dtype in _DTYPES.items():
        array = getattr(t, name)
        if array is None and name in OPTIONAL_COLUMNS:
            continue
        if array.dtype != dtype or array.shape != (t.tokens.size,):
            yield f"{name} of {array.dtype} {array.shape} for {t.tokens.size} tokens"
    if np.count_nonzero(t.tokens.view(np.uint64) >= vocab_size):  # negative ones are large then
        yield f"tokens from {t.tokens.min()} to {t.tokens.max()}, not in 0 … {vocab_size - 1}"


def _check_segments(t: Trajectory, config: Config) -> Iterator[str]:
    """Find segments that no calls of an agent make: each begins with a prompt, and ends with sampled tokens."""
    if sum(t.segment_lengths) != len(t.tokens) or min(t.segment_lengths, default=1) < 1:
        yield f"segments of {t.segment_lengths} tokens for {len(t.tokens)}"
        return
    for segment in t.segments if t.segment_lengths else ():
        mask = t.loss_mask[segment]
        if mask[0] or not mask[-1] or len(mask) > config.max_sequence_tokens:
            yield f"a segment of {len(mask)} tokens that no calls made"
    if not len(t.segment_lengths) <= t.num_turns <= t.num_generated <= config.max_response_tokens:
        yield f"{len(t.segment_lengths)} segments, {t.num_turns} turns and {t.num_generated} generated tokens"


def _check_places(
    t: Trajectory, generated: np.ndarray, ticket: Ticket, config: Config
) -> Iterator[str]:
    length, num_generated = len(t.tokens), len(generated)
    start = int(generated[0]) if num_generated else length
    if (
        start > config.max_prompt_tokens
        or length - start > config.max_response_tokens
        or (num_generated and not start)
    ):
        yield f"{start} tokens of prompt and {length - start} after it"
    if not config.is_multi_turn and (length or t.finish_reason != "aborted"):
        if (
            start != len(ticket.prompt_tokens)
            or tuple(t.tokens[:start].tolist()) != ticket.prompt_tokens
        ):
            yield "another prompt than the ticket's"
        if start + num_generated < length:
            yield "tokens after the prompt that are not generated"
    least, most = min(1, num_generated), 1
    if config.is_multi_turn:  # a turn that was aborted at once has no token
        least, most = np.count_nonzero(t.loss_mask[1:] > t.loss_mask[:-1]), num_generated + 1
    if not least <= t.num_turns <= most or not t.num_turns - 1 <= len(t.turns) <= t.num_turns:
        yield f"{t.num_turns} turns, {len(t.turns)} of them with times, not {least} to {most} by its tokens"


def _count_known(t: Trajectory, generated: np.ndarray, ticket: Ticket) -> int:
    """Return the number of generated tokens that are the ticket's prefix: all of it, or 0."""
    if ticket.prefix is None:
        return 0
    places = generated[: len(ticket.prefix.tokens)]
    recorded = {"tokens": ticket.prefix.tokens, **slice_columns(ticket.prefix, slice(None))}
    are_same = all(
        np.array_equal(getattr(t, name)[places], values) for name, values in recorded.items()
    )
    return len(places) if are_same else 0


def _check_values(t: Trajectory, generated: np.ndarray, vocab_size: int) -> Iterator[str]:
    logprobs = t.behavior_logprobs[generated].tolist()
    total, least = sum(logprobs), -len(logprobs) * log(vocab_size) - MAX_SURPRISE
    if not total >= least or max(logprobs, default=0.0) > MAX_LOGPROB:  # NaN is not
        yield f"log-probs that are {total:.4g} nats in total, {least:.4g} is the least, and at most {max(logprobs):.4g}"
    if np.count_nonzero(t.behavior_logprobs) > len(logprobs) - logprobs.count(0.0):
        yield "a log-prob of a token that is not generated"
    if t.policy_versions.tolist().count(-1) < len(t.tokens) - len(generated):
        yield "a version of a token that is not generated"


def _check_ending(t: Trajectory, num_generated: int, config: Config) -> Iterator[str]:
    reason, has_ended = t.finish_reason, t.finish_reason in ("stop", "length")
    has_times = config.is_agent or len(t.turns) == t.num_turns
    if has_ended and not (num_generated and t.loss_mask[-1] and has_times):
        yield "an end that is not after a turn of the policy"
    if reason == "failed" and not (t.num_turns or config.is_multi_turn):
        yield "a failure before the policy's turn"
    if (
        reason == "length"
        and not config.is_multi_turn
        and num_generated != config.max_response_tokens
    ):
        yield f"cut at {num_generated} tokens, not at {config.max_response_tokens}"
    if not (abs(t.reward) <= MAX_REWARD if has_ended else isnan(t.reward)):
        yield f"a reward of {t.reward:.4g}, {reason}"
    has_parts = has_ended and are_parts(t.reward_parts)
    if t.reward_parts and (not has_parts or is_environment(config.task)):
        yield f"{len(t.reward_parts)} parts of a reward, {reason}"
    yield from _check_turns(t, has_ended and is_environment(config.task))
    if len(t.failure) > MAX_FAILURE or bool(t.failure) != (reason == "failed"):
        yield f"{len(t.failure)} characters of failure, {reason}"


def _check_turns(t: Trajectory, has_rewards: bool) -> Iterator[str]:
    num_turns, total = t.num_turns if has_rewards else 0, sum(t.turn_rewards)
    if len(t.turn_rewards) != num_turns:
        yield f"{len(t.turn_rewards)} rewards of turns, not {num_turns}"
    # Python 3.12 sums with compensation, and the episode without.
    rounding = 1e-9 * sum(map(abs, t.turn_rewards))
    if has_rewards and not isclose(total, t.reward, abs_tol=rounding):
        yield f"rewards of turns with a sum of {total:.4g}, and a reward of {t.reward:.4g}"
    if len(t.last_observation) > (MAX_LAST_OBSERVATION if has_rewards else 0):
        yield f"{len(t.last_observation)} characters of a last observation"


def _check_times(t: Trajectory, is_agent: bool) -> Iterator[str]:
    """Find times that are out of order. An agent's calls can overlap, so each has an order of its own."""
    calls = t.turns if is_agent else [tuple(chain.from_iterable(t.turns))]
    for times in calls or [()]:
        for earlier, later in pairwise((t.started_at, *times, t.ended_at)):
            if not 0 <= earlier - CLOCK_SLACK_S <= later < 1e11:  # or NaN
                yield f"a time of {later:.17g} after {earlier:.17g}"

"""Verification: the trainer computes log-probs and rewards of a share of the hosts' responses again.

Log-probs come from a forward pass without gradient. The trainer must still have the version that all tokens of a
response claim. Other responses come too late and are counted. With async_ratio 0 this does not happen. In the default
job 82% come too late, and all responses of a host that lags. Rewards of any version are scored again while the trainer
trains. Environments cannot be played again, so their rewards count as not checked. trust.py checks every response for
contradictions. Not stopped:

- A host that samples truly but chooses, for example the best of several responses. Seeds are assigned, but a response
  is not checked against its seed.
- A host that always claims an older version than the trainer's, as far as tickets allow: all of it is too late.
- Lies below `allowed_distance`: in bfloat16 engines differ by that much, and weights some steps older can, too.
- Few lies: n of them are all missed with probability (1 − verify_share)^n.
- Lies found after the update that trained on them. A lie found before an update never enters it.
- False rewards of environments and async functions, and false parts of rewards. Rewards whose scoring fails here.
- Hosts that take tickets and give them back, fail or are slow. This only costs time.
"""

import asyncio
import hashlib
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from itertools import chain

import numpy as np
import torch

from asyncrl.cluster.cluster import Cluster, gather_from_ranks
from asyncrl.config import Config
from asyncrl.engine.reward_pool import RewardPool
from asyncrl.engine.rewards import load_scorer
from asyncrl.records import GREEDY_GROUP, Ticket, Trajectory, slice_columns
from asyncrl.runlog.metrics import Max, Measured
from asyncrl.trainer.model import compute_dtype
from asyncrl.trainer.packing import TrainSequence
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.splitting import distribute

SLACK_TOKENS, LARGEST = 10, 50
"""Tokens without a difference that are added to every response. So one token cannot lift the mean of a short response.
LARGEST: difference of a single token, as a multiple of the mean, that counts as much as the mean."""
REWARD_ROUNDING, MAX_SCORING = 1e-6, 1000
END_S = 5.0
"""Longest wait at the end of a run for the thread that scores rewards again."""


def distance(own: np.ndarray, claimed: np.ndarray) -> float:
    """Return the distance of claimed log-probs of a response from the trainer's, nats.

    It is the mean difference over its tokens and SLACK_TOKENS more. If 1/LARGEST of the largest difference is more, it
    is that.
    """
    differences = np.abs(own.astype(np.float64) - claimed)
    return float(
        max(differences.sum() / (len(differences) + SLACK_TOKENS), differences.max() / LARGEST)
    )


def allowed_distance(config: Config, dtype: torch.dtype) -> float:
    """Return the largest `distance` of an honest response, nats, if the trainer computes in `dtype`.

    The limits are from runs of the default job with async_ratio 0, in float32 on a CPU. Each response was scored again:
    51,000 responses of 3 seeds of 40 steps and one of 80, and 7,700 of guess_number. The largest distance was 8e-7, and
    the largest difference of a token 1.3e-5. 1e-3 leaves 1,200 times that. It finds this share of responses with a lie
    (in brackets: at 0.1): weights 10 steps older 88% (4%), 2 steps 70% (0.2%), log-probs times 0.9 62% (0.04%), plus
    0.01 99% (0%), shuffled 96% (27%), two tokens exchanged 100% (99.8%).

    With the same weights in bfloat16 the largest distance was 0.019 (10,000 responses, on a CPU). 0.1 leaves 5 times
    that for larger models and GPUs. It also holds if top_p, top_k or min_p cut. Rounding can then move a token in or
    out, and a log-prob by up to log 2. Honest responses are beyond it far less often than once in 10,000. So one
    response beyond it is enough.
    """
    return (
        1e-3
        if dtype == torch.float32 and (config.top_p, config.top_k, config.min_p) == (1, 0, 0)
        else 0.1
    )


class Verifier:
    """Checks a share of the responses of joined hosts. Every trainer rank has one; leaders' get the responses."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        tokenizer=None,
        *,
        stop_tokens: Collection[int] = (),
        key: bytes = b"",
    ):
        """`key` decides which responses are checked. It is random by default, because hosts know the run's seed.

        Leaders have the tokenizer and stop tokens of the run's model.
        """
        self.config, self.cluster, self.tokenizer = config, cluster, tokenizer
        self.stop_tokens = stop_tokens
        self.counts = Counter(
            verified=0, too_late=0, verify_failed=0, rewards_verified=0, rewards_unverified=0
        )
        self.largest, self._key = 0.0, key or secrets.token_bytes(16)
        self._pool: RewardPool | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rewards verifier", daemon=True
        )
        self._score_by = config.task, config.reward
        self._can_score = not (config.is_multi_turn or load_scorer(*self._score_by).is_async)
        self._scoring: list[tuple[Trajectory, Future]] = []

    def verify(
        self, answered: list[tuple[Ticket, Trajectory]], policy: Policy, version: int
    ) -> list[tuple[int, str]]:
        """Check a share of the responses of hosts since the last call; collective.

        `answered` is of leaders, without mistakes (trust.py); `version` is that of the weights now. Return, on leaders,
        the worker of each lie and a description. False rewards are returned by a later call.
        """
        drawn_pairs = [(ticket, t) for ticket, t in answered if self.chooses(t)]
        in_time = [t for _, t in drawn_pairs if (t.policy_versions[t.loss_mask] == version).all()]
        self.counts.update(verified=len(in_time), too_late=len(drawn_pairs) - len(in_time))
        lies = [*self._false_rewards()]
        self._begin_to_score(drawn_pairs)
        allowed = allowed_distance(self.config, compute_dtype(self.config, policy.device))
        for i, far in distances(in_time, policy, self.cluster).items():
            self.largest = max(self.largest, far)
            if not far <= allowed:  # or NaN
                what = f"log-probs of ticket {in_time[i].ticket_id} are {far:.3g} nats from the trainer's at version"
                lies.append((in_time[i].worker, f"{what} {version}, {allowed:g} are allowed"))
        self.counts.update(verify_failed=len(lies))
        return lies

    def chooses(self, t: Trajectory) -> bool:
        """Return whether a response is checked; only this process knows. vLLM's greedy log-probs are raw."""
        digest = hashlib.blake2b(
            f"{t.ticket_id} {t.member}".encode(), key=self._key, digest_size=8
        ).digest()
        is_sampled = t.finish_reason in ("stop", "length") and t.group_id != GREEDY_GROUP
        return is_sampled and int.from_bytes(digest) < self.config.swarm.verify_share * 2**64

    def _begin_to_score(self, pairs: list[tuple[Ticket, Trajectory]]) -> None:
        """Begin to score responses in the background, in a process that starts at first use."""
        if not self._can_score or len(self._scoring) > MAX_SCORING:
            self.counts.update(rewards_unverified=len(pairs))
            return
        for ticket, t in pairs:
            if self._pool is None:
                self._pool = RewardPool(
                    *self._score_by, self.config.env_timeout_s, title="rewards verifier"
                )
                self._thread.start()
            tokens = t.tokens[t.loss_mask].tolist()
            # A host may lie about its end, so the finish reason is not asked.
            text = self.tokenizer.decode(tokens[:-1] if tokens[-1] in self.stop_tokens else tokens)
            scoring = asyncio.run_coroutine_threadsafe(
                self._pool.score(ticket.answer, text), self._loop
            )
            self._scoring.append((t, scoring))

    def _false_rewards(self) -> Iterator[tuple[int, str]]:
        under_way, self._scoring = self._scoring, []
        for t, scoring in under_way:
            if not scoring.done():
                self._scoring.append((t, scoring))
                continue
            failed = scoring.cancelled() or scoring.exception() is not None
            self.counts.update(["rewards_unverified" if failed else "rewards_verified"])
            if not failed and abs(scoring.result()[0] - t.reward) > REWARD_ROUNDING * max(
                1.0, abs(t.reward)
            ):
                yield (
                    t.worker,
                    f"the reward of ticket {t.ticket_id} is {scoring.result()[0]:g}, not {t.reward:g}",
                )

    def metrics(self) -> Measured:
        """Return the metrics `swarm/*` of checks since the start, on a leader."""
        counts = {f"swarm/{name}": count for name, count in self.counts.items()}
        return counts | {"swarm/verify_diff_max": Max(self.largest)}

    def close(self) -> None:
        """End the scoring at once."""
        if self._pool:
            self._pool.close()
            self._loop.call_soon_threadsafe(self._end_loop)
            self._thread.join(END_S)

    def _end_loop(self) -> None:
        """End all tasks of the loop, then the loop: asyncio would report a pending task on the terminal."""
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)


def distances(trajectories: list[Trajectory], policy: Policy, cluster: Cluster) -> dict[int, float]:
    """Return the `distance` of each of a leader's trajectories by its index, on leaders; all ranks score a part.

    A trajectory of several segments has their largest distance. Collective.
    """
    policy.clock.enter("gather")
    sequences = []
    for number, t in enumerate(trajectories):
        for segment in t.segments:
            arrays = t.tokens[segment], t.loss_mask[segment]
            columns = slice_columns(t, segment)
            sequences.append(TrainSequence(*arrays, group_id=number, **columns))
    num_ranks, max_tokens = len(cluster.local_ranks), policy.config.max_tokens_per_microbatch
    layout = policy.module.layout
    shares = distribute([sequences], num_ranks, max_tokens, layout=layout)
    (bundles,) = cluster.scatter_on_node(shares)
    policy.clock.enter("forward_backward")
    parts = [[bundle.sequences[0] for bundle in microbatch] for microbatch in bundles]
    distances_here = []
    for part, scores in zip(parts, policy.logprobs_of(parts), strict=True):
        for s, own in zip(part, scores.split([s.num_trained for s in part]), strict=True):
            far = distance(own.numpy(), s.behavior_logprobs[s.loss_mask])
            distances_here.append((s.group_id, far))
    distances_of_ranks = gather_from_ranks(distances_here, cluster.node_group)
    largest: dict[int, float] = {}
    for number, far in chain(*distances_of_ranks) if cluster.is_leader else ():
        # NaN stays NaN
        largest[number] = float(np.maximum(far, largest.get(number, 0.0)))
    return largest

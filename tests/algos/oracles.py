"""The formula of every loss, as a loop over the tokens of one sequence in Python's float64.

An oracle returns one row per token: its loss, and the stats that the loss reports. Options and defaults are the loss's.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    """One trained token; log-probs in nats."""

    logprob: float
    held: float
    """The same number, for where the formula stops the gradient: finite differences leave it alone."""
    behavior: float
    proximal: float
    advantage: float
    reward: float

    @property
    def ratio(self) -> float:
        return math.exp(self.logprob - self.behavior)

    @property
    def held_ratio(self) -> float:
        return math.exp(self.held - self.behavior)

    @property
    def proximal_ratio(self) -> float:
        return math.exp(self.logprob - self.proximal)

    @property
    def stale(self) -> float:
        return math.exp(self.proximal - self.behavior)


def clip(value, low, high):
    return min(max(value, low), high)


def geometric_mean(ratios):
    return math.prod(ratios) ** (1 / len(ratios))


def is_past(moved, advantage, low, high):
    """Whether a good token is above `high`, or a bad one below `low`."""
    return moved > high if advantage > 0 else advantage < 0 and moved < low


def clipped_objective(ratio, advantage, clip_low, clip_high, dual_clip=None):
    """PPO's objective, and whether the clip, or the dual clip, cuts its gradient."""
    low, high = 1 - clip_low, 1 + clip_high
    objective = min(ratio * advantage, clip(ratio, low, high) * advantage)
    clipped = is_past(ratio, advantage, low, high)
    if dual_clip is not None and advantage < 0:
        objective = max(objective, dual_clip * advantage)
        clipped = clipped or ratio > dual_clip
    return objective, clipped


def weighted(token, weight, ratio, clipped=None):
    """The row of policy gradient with a weight; without `clipped` that is where the weight is not the ratio."""
    row = {"loss": -weight * token.advantage * token.logprob, "ratio": ratio, "weight": weight}
    return row | {"clipped": weight != ratio if clipped is None else clipped}


def around_proximal(token, weight, weight_is_cut, *clips):
    """The row of a weight times PPO's clip against the proximal policy."""
    moved = token.proximal_ratio
    objective, clipped = clipped_objective(moved, token.advantage, *clips)
    row = {"loss": -weight * objective, "ratio": token.ratio, "proximal_ratio": moved}
    return row | {"weight": weight, "clipped": clipped or weight_is_cut}


def reinforce(tokens):
    return [{"loss": -token.advantage * token.logprob, "ratio": token.ratio} for token in tokens]


def grpo(tokens, clip_low=0.2, clip_high=0.2, dual_clip=None):
    rows = []
    for token in tokens:
        clips = clip_low, clip_high, dual_clip
        objective, clipped = clipped_objective(token.ratio, token.advantage, *clips)
        rows.append({"loss": -objective, "ratio": token.ratio, "clipped": clipped})
    return rows


def decoupled_ppo(tokens, clip_low=0.2, clip_high=0.2, behavior_weight_cap=5.0, action="mask"):
    rows = []
    for token in tokens:
        weight = token.stale
        is_cut = weight > behavior_weight_cap
        if is_cut:
            weight = 0.0 if action == "mask" else behavior_weight_cap
        rows.append(around_proximal(token, weight, is_cut, clip_low, clip_high))
    return rows


def tis_ppo(tokens, clip_low=0.2, clip_high=0.2, dual_clip=None, cap=2.0, level="token"):
    clips = clip_low, clip_high, dual_clip
    whole = math.prod([token.stale for token in tokens])
    rows = []
    for token in tokens:
        stale = whole if level == "sequence" else token.stale
        rows.append(around_proximal(token, min(stale, cap), stale > cap, *clips))
    return rows


def icepop(tokens, clip_low=0.2, clip_high=0.2, low=0.5, high=5.0, level="token", weighs=True):
    mean = geometric_mean([token.stale for token in tokens])
    rows = []
    for token in tokens:
        stale = mean if level == "sequence" else token.stale
        is_inside = low <= stale <= high
        weight = (stale if weighs else 1.0) if is_inside else 0.0
        rows.append(around_proximal(token, weight, not is_inside, clip_low, clip_high))
    return rows


def tis(tokens, clip_low=0.0, clip_high=1.0):
    return [weighted(t, clip(t.held_ratio, clip_low, clip_high), t.held_ratio) for t in tokens]


def aipo(tokens, cap=5.0):
    return [weighted(t, min(t.held_ratio, cap), t.held_ratio) for t in tokens]


def cispo(tokens, clip_low=0.1, clip_high=0.1, unified_mask=False):
    low, high = 1 - clip_low, 1 + clip_high
    rows = []
    for token in tokens:
        weight = clip(token.held_ratio, low, high)
        if unified_mask and is_past(token.held_ratio, token.advantage, low, high):
            weight = 0.0
        rows.append(weighted(token, weight, token.held_ratio))
    return rows


def topr(tokens):
    return weighted_topr(tokens)


def weighted_topr(tokens, positive_weight=1.0, negative_weight=1.0):
    rows = []
    for token in tokens:
        ratio = token.held_ratio
        is_good = token.reward > 0
        weight = positive_weight if is_good else negative_weight * min(ratio, 1)
        rows.append(weighted(token, weight, ratio, clipped=not is_good and ratio > 1))
    return rows


def gspo(tokens, clip_low=3e-4, clip_high=4e-4):
    ratio = geometric_mean([token.ratio for token in tokens])
    rows = []
    for token in tokens:
        objective, clipped = clipped_objective(ratio, token.advantage, clip_low, clip_high)
        rows.append({"loss": -objective, "ratio": ratio, "clipped": clipped})
    return rows


def gmpo(tokens, log_clip_low=0.4, log_clip_high=0.4):
    low, high = math.exp(-log_clip_low), math.exp(log_clip_high)
    clipped = [is_past(token.held_ratio, token.advantage, low, high) for token in tokens]
    cut = zip(tokens, clipped, strict=True)
    mean = geometric_mean([clip(t.held_ratio, low, high) if c else t.ratio for t, c in cut])
    rows = []
    for token, is_clipped in zip(tokens, clipped, strict=True):
        row = {"loss": -mean * token.advantage, "ratio": token.held_ratio, "clipped": is_clipped}
        rows.append(row | {"weight": 0.0 if is_clipped else mean})
    return rows


def kimi(tokens, tau=0.1):
    rows = []
    for token in tokens:
        pull = tau / 2 * (token.logprob - token.behavior) ** 2
        rows.append({"loss": pull - token.advantage * token.logprob, "ratio": token.ratio})
    return rows


def m2po(tokens, update, m2_threshold=0.04):
    """Algorithm 1 over all tokens of the update: leave out the furthest until the mean of those left is small."""
    moments = sorted((t.held - t.behavior) ** 2 for t in update if _goes_on(t))
    least_left_out = math.inf
    while moments and sum(moments) / len(moments) > m2_threshold:
        least_left_out = moments.pop()
    rows = []
    for token in tokens:
        is_out = _goes_on(token) and (token.held - token.behavior) ** 2 >= least_left_out
        loss = 0.0 if is_out else -token.ratio * token.advantage
        rows.append({"loss": loss, "ratio": token.ratio, "clipped": is_out})
    return rows


def _goes_on(token):
    return token.advantage * (token.held - token.behavior) > 0


def dppo(
    tokens, divergence="tv", delta_low=None, delta_high=None, cap=20.0, sides="away", squared=0.0
):
    default = 0.15 if divergence == "tv" else 0.05
    low = default if delta_low is None else delta_low
    high = default if delta_high is None else delta_high
    rows = []
    for token in tokens:
        p, b = math.exp(token.held), math.exp(token.behavior)
        distance = abs(p - b) if divergence == "tv" else _binary_kl(b, p)
        is_out = is_past(math.copysign(distance, p - b), token.advantage, -low, high)
        if sides == "both":
            is_out = distance > (high if p > b else low)
        row = weighted(token, 0.0 if is_out else min(p / b, cap), p / b)
        pull = squared * (token.logprob - token.behavior) ** 2
        rows.append(row | {"loss": row["loss"] + pull})
    return rows


def _binary_kl(b, p):
    return b * math.log(b / p) + (1 - b) * math.log((1 - b) / (1 - p))


def sapo(tokens, tau_positive=1.0, tau_negative=1.05):
    rows = []
    for token in tokens:
        tau = tau_positive if token.advantage > 0 else tau_negative
        gate = 1 / (1 + math.exp(-tau * (token.ratio - 1)))
        row = {"loss": -4 / tau * gate * token.advantage, "ratio": token.ratio}
        rows.append(row | {"weight": 4 * gate * (1 - gate) * token.ratio})
    return rows


def opsm(tokens, clip_low=0.2, clip_high=0.2, delta=0.5):
    moved = sum(token.behavior - token.held for token in tokens) / len(tokens)
    rows = []
    for token in tokens:
        objective, clipped = clipped_objective(token.ratio, token.advantage, clip_low, clip_high)
        row = {"loss": -objective, "ratio": token.ratio, "weight": token.ratio, "clipped": clipped}
        if token.advantage < 0 and moved > delta:
            row |= {"loss": 0.0, "weight": 0.0, "clipped": True}
        rows.append(row)
    return rows


def mis(tokens, low=0.5, high=2.0, level="token", cap=math.inf):
    ratios = [token.held_ratio for token in tokens]
    rows = []
    for token, ratio in zip(tokens, ratios, strict=True):
        judged = {
            "token": ratio,
            "sequence": math.prod(ratios),
            "geometric": geometric_mean(ratios),
        }
        weight = math.prod(ratios) if level == "sequence" else ratio
        is_inside = low <= judged[level] <= high
        is_cut = not is_inside or weight > cap
        weight = min(weight, cap) if is_inside else 0.0
        rows.append(weighted(token, weight, ratio, clipped=is_cut))
    return rows


def vespo(tokens, k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0):
    ratio = math.prod([token.held_ratio for token in tokens])
    rows = []
    for token in tokens:
        is_good = token.advantage >= 0
        k, rate = (k_positive, lambda_positive) if is_good else (k_negative, lambda_negative)
        weight = math.exp(rate) * ratio**k * math.exp(-rate * ratio)
        loss = -weight * token.advantage * token.logprob
        rows.append({"loss": loss, "ratio": ratio, "weight": weight})
    return rows


def sequence_is(tokens, cap=math.inf):
    ratio = math.prod([token.held_ratio for token in tokens])
    return [weighted(token, min(ratio, cap), ratio) for token in tokens]

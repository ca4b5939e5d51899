"""The formula of every loss and penalty, of one token and its sequence in Python's float64.

An oracle returns the row of the token: its loss, and the stats that the loss reports. Options and defaults are those of
the loss.
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
    row = {"loss": -weight * token.advantage * token.logprob, "weight": weight}
    return row | {"clipped": weight != ratio if clipped is None else clipped}


def around_proximal(token, weight, weight_is_cut, *clips):
    """The row of a weight times PPO's clip against the proximal policy."""
    moved = token.proximal_ratio
    objective, clipped = clipped_objective(moved, token.advantage, *clips)
    row = {"loss": -weight * objective, "proximal_ratio": moved}
    return row | {"weight": weight, "clipped": clipped or weight_is_cut}


def reinforce(token, sequence):
    return {"loss": -token.advantage * token.logprob}


def grpo(token, sequence, clip_low=0.2, clip_high=0.2, dual_clip=None):
    clips = clip_low, clip_high, dual_clip
    objective, clipped = clipped_objective(token.ratio, token.advantage, *clips)
    return {"loss": -objective, "clipped": clipped}


def decoupled_ppo(
    token, sequence, clip_low=0.2, clip_high=0.2, behavior_weight_cap=5.0, action="mask"
):
    weight = token.stale
    is_cut = weight > behavior_weight_cap
    if is_cut:
        weight = 0.0 if action == "mask" else behavior_weight_cap
    return around_proximal(token, weight, is_cut, clip_low, clip_high)


def tis_ppo(token, sequence, clip_low=0.2, clip_high=0.2, dual_clip=None, cap=2.0, level="token"):
    stale = token.stale
    if level == "sequence":
        stale = math.prod(t.stale for t in sequence)
    return around_proximal(token, min(stale, cap), stale > cap, clip_low, clip_high, dual_clip)


def icepop(
    token, sequence, clip_low=0.2, clip_high=0.2, low=0.5, high=5.0, level="token", weighs=True
):
    stale = token.stale
    if level == "sequence":
        stale = geometric_mean([t.stale for t in sequence])
    is_inside = low <= stale <= high
    weight = (stale if weighs else 1.0) if is_inside else 0.0
    return around_proximal(token, weight, not is_inside, clip_low, clip_high)


def tis(token, sequence, clip_low=0.0, clip_high=1.0):
    return weighted(token, clip(token.held_ratio, clip_low, clip_high), token.held_ratio)


def aipo(token, sequence, cap=5.0):
    return weighted(token, min(token.held_ratio, cap), token.held_ratio)


def cispo(token, sequence, clip_low=0.1, clip_high=0.1, unified_mask=False):
    low, high = 1 - clip_low, 1 + clip_high
    weight = clip(token.held_ratio, low, high)
    if unified_mask and is_past(token.held_ratio, token.advantage, low, high):
        weight = 0.0
    return weighted(token, weight, token.held_ratio)


def topr(token, sequence):
    return weighted_topr(token, sequence)


def weighted_topr(token, sequence, positive_weight=1.0, negative_weight=1.0):
    ratio = token.held_ratio
    is_good = token.reward > 0
    weight = positive_weight if is_good else negative_weight * min(ratio, 1)
    return weighted(token, weight, ratio, clipped=not is_good and ratio > 1)


def gspo(token, sequence, clip_low=3e-4, clip_high=4e-4):
    ratio = geometric_mean([t.ratio for t in sequence])
    objective, clipped = clipped_objective(ratio, token.advantage, clip_low, clip_high)
    return {"loss": -objective, "weight": ratio, "clipped": clipped}


def gmpo(token, sequence, log_clip_low=0.4, log_clip_high=0.4):
    low, high = math.exp(-log_clip_low), math.exp(log_clip_high)
    clipped = [is_past(t.held_ratio, t.advantage, low, high) for t in sequence]
    cut = zip(sequence, clipped, strict=True)
    mean = geometric_mean([clip(t.held_ratio, low, high) if c else t.ratio for t, c in cut])
    is_clipped = is_past(token.held_ratio, token.advantage, low, high)
    row = {"loss": -mean * token.advantage, "clipped": is_clipped}
    return row | {"weight": 0.0 if is_clipped else mean}


def kimi(token, sequence, tau=0.1):
    pull = tau / 2 * (token.logprob - token.behavior) ** 2
    return {"loss": pull - token.advantage * token.logprob}


def m2po(token, sequence, update, m2_threshold=0.04):
    """Algorithm 1 over all tokens of the update: leave out the furthest until the mean of those left is small."""
    moments = sorted((t.held - t.behavior) ** 2 for t in update if _goes_on(t))
    least_left_out = math.inf
    while moments and sum(moments) / len(moments) > m2_threshold:
        least_left_out = moments.pop()
    is_out = _goes_on(token) and (token.held - token.behavior) ** 2 >= least_left_out
    loss = 0.0 if is_out else -token.ratio * token.advantage
    return {"loss": loss, "clipped": is_out}


def _goes_on(token):
    return token.advantage * (token.held - token.behavior) > 0


def dppo(
    token,
    sequence,
    divergence="tv",
    delta_low=None,
    delta_high=None,
    cap=20.0,
    sides="away",
    squared=0.0,
):
    default = {"tv": 0.15, "kl": 0.05, "kl_max": 0.1}[divergence]
    low = default if delta_low is None else delta_low
    high = default if delta_high is None else delta_high
    p, b = math.exp(token.held), math.exp(token.behavior)
    kls = _binary_kl(b, p), _binary_kl(p, b)
    distance = {"tv": abs(p - b), "kl": kls[0], "kl_max": max(kls)}[divergence]
    is_out = is_past(math.copysign(distance, p - b), token.advantage, -low, high)
    if sides == "both":
        is_out = distance > (high if p > b else low)
    row = weighted(token, 0.0 if is_out else min(p / b, cap), p / b)
    pull = squared * (token.logprob - token.behavior) ** 2
    return row | {"loss": row["loss"] + pull}


def _binary_kl(b, p):
    return b * math.log(b / p) + (1 - b) * math.log((1 - b) / (1 - p))


def sapo(token, sequence, tau_positive=1.0, tau_negative=1.05):
    tau = tau_positive if token.advantage > 0 else tau_negative
    gate = 1 / (1 + math.exp(-tau * (token.ratio - 1)))
    row = {"loss": -4 / tau * gate * token.advantage}
    return row | {"weight": 4 * gate * (1 - gate) * token.ratio}


def opsm(token, sequence, clip_low=0.2, clip_high=0.2, delta=0.5):
    moved = sum(t.behavior - t.held for t in sequence) / len(sequence)
    row = grpo(token, sequence, clip_low, clip_high) | {"weight": token.ratio}
    if token.advantage < 0 and moved > delta:
        row |= {"loss": 0.0, "weight": 0.0, "clipped": True}
    return row


def mis(token, sequence, low=0.5, high=2.0, level="token", cap=math.inf):
    ratios = [t.held_ratio for t in sequence]
    ratio = token.held_ratio
    judged = {"token": ratio, "sequence": math.prod(ratios), "geometric": geometric_mean(ratios)}
    weight = math.prod(ratios) if level == "sequence" else ratio
    is_inside = low <= judged[level] <= high
    is_cut = not is_inside or weight > cap
    weight = min(weight, cap) if is_inside else 0.0
    return weighted(token, weight, ratio, clipped=is_cut)


def vespo(
    token, sequence, k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0
):
    ratio = math.prod(t.held_ratio for t in sequence)
    is_good = token.advantage >= 0
    k, rate = (k_positive, lambda_positive) if is_good else (k_negative, lambda_negative)
    weight = math.exp(rate) * ratio**k * math.exp(-rate * ratio)
    loss = -weight * token.advantage * token.logprob
    return {"loss": loss, "weight": weight}


def sequence_is(token, sequence, cap=math.inf):
    ratio = math.prod(t.held_ratio for t in sequence)
    return weighted(token, min(ratio, cap), ratio)


def cppo(token, sequence, delta=0.15, budget=0.02, adaptive=True, weight_floor=0.8, cap=20.0):
    distances = [abs(math.exp(t.held) - math.exp(t.behavior)) for t in sequence]
    if adaptive:
        budget = clip(quantile(distances, 0.9), budget, 2 * budget)
    sum_spent = sum_weights = 0.0
    for place, (other, distance) in enumerate(zip(sequence, distances, strict=True)):
        weight = 1 - (1 - weight_floor) * place / max(len(sequence) - 1, 1)
        left = min(delta, delta + budget * sum_weights - sum_spent)
        if other is token:
            break
        sum_spent += weight * distance
        sum_weights += weight
    is_out = token.advantage * (token.held_ratio - 1) > 0 and weight * distance > left
    return weighted(token, 0.0 if is_out else min(token.held_ratio, cap), token.held_ratio)


def quantile(values, share):
    """The quantile between the two nearest values."""
    values = sorted(values)
    place = share * (len(values) - 1)
    low, high = values[math.floor(place)], values[math.ceil(place)]
    return low + (place - math.floor(place)) * (high - low)


def drpo(token, sequence, delta=12.5):
    b = math.exp(token.behavior)
    pull = abs(token.advantage) * b * (token.ratio - 1) ** 2 / (2 * delta)
    sign = math.copysign(1, token.advantage) if token.advantage else 0.0
    fading = 1 - sign * (math.exp(token.logprob) - b) / delta
    row = {"loss": pull - token.advantage * token.ratio}
    return row | {"weight": token.ratio * fading}


def pnpo(token, sequence, log_low=0.2, log_high=0.2):
    count = index_of(token, sequence) + 1
    mean = geometric_mean([t.held_ratio for t in sequence[:count]])
    wider = math.sqrt(len(sequence) / count)
    is_out = not math.exp(-log_low * wider) <= mean <= math.exp(log_high * wider)
    return weighted(token, 0.0 if is_out else mean, token.held_ratio, clipped=is_out)


def minpro(token, sequence, clip_low=0.2, clip_high=0.28):
    earlier = sequence[: index_of(token, sequence)]
    product = token.held_ratio * min((t.held_ratio for t in earlier), default=1.0)
    weight = clip(product, 1 - clip_low, 1 + clip_high)
    return weighted(token, weight, token.held_ratio, clipped=weight != product)


def index_of(token, sequence):
    """The place of a token, from 0; two tokens may be equal."""
    return next(place for place, other in enumerate(sequence) if other is token)


def k1(token, sequence):
    return {"loss": token.logprob - token.proximal}


def k2(token, sequence):
    return {"loss": (token.logprob - token.proximal) ** 2 / 2}


def k3(token, sequence):
    log_ratio = token.proximal - token.logprob
    return {"loss": math.exp(log_ratio) - 1 - log_ratio}


def unbiased(token, sequence):
    return {"loss": token.ratio * k3(token, sequence)["loss"]}

"""Inputs of the planner: data sheets, cluster.toml, lengths, and a run as scripts/runs.py reads it."""

import dataclasses
import math
import tomllib
from pathlib import Path

import msgspec

from asyncrl.config import Config, nearest
from extras.planning import planner
from extras.planning.advice import config_of
from extras.planning.planner import Cluster, Job, Lengths, Pool
from extras.planning.shape import read_shape


def read_cluster(path: Path) -> tuple[Cluster, list[str]]:
    """Return the cluster of a file, and notes on assumed values. Raises ValueError, in one line, for a mistake."""
    try:
        file = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return make_cluster(file, path)


def make_cluster(file: dict, path: Path) -> tuple[Cluster, list[str]]:
    """Return the cluster of a parsed file, and notes. Raises ValueError as `read_cluster`."""
    sheets, pools, links = planner.read_sheets(), [], file.get("links", {})
    if not isinstance(file.get("machines"), list):
        raise ValueError(
            f"{path} lists no [[machines]]; give gpu, gpus, count and price_per_hour of each kind"
        )
    for machines in file["machines"]:
        gpu = machines.get("gpu")
        if gpu not in sheets:
            raise ValueError(
                f"{path}: gpu {gpu!r} is none of {', '.join(sheets)}{nearest(str(gpu), sheets)}"
            )
        taken = sum(pool.gpu == gpu for pool in pools)
        name = f"{gpu} ({taken + 1})" if taken else gpu
        numbers = {"count": 1, "price_per_hour": 0.0} | sheets[gpu] | machines
        pools.append(_checked(Pool, f"{path}: {gpu}", {**numbers, "name": name}))
    cluster = _checked(Cluster, f"{path}: [links]", links | {"pools": tuple(pools)})
    notes = [
        f"[links] {name} is missing; {getattr(cluster, name)} GB/s assumed, Ethernet of 10 Gbit/s"
        for name in ("same_kind", "across_kinds")
        if name not in links
    ]
    return cluster, notes


def _checked(kind: type, where: str, values: dict):
    """Return a record of `kind`. Raises ValueError, in one line, for a wrong field."""
    fields = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        if name not in fields:
            raise ValueError(
                f"{where}: {name} is none of {', '.join(fields)}{nearest(name, fields)}"
            )
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None


def lengths_of(run, config: Config, prompt_tokens: float | None) -> Lengths:
    """Return the lengths of a run's responses, and of its prompts unless they are given."""
    responses, metrics, options = run.events["trajectory"], run.metrics, run.info["config"]
    if "tokens" not in responses or not (tokens := responses["tokens"]).gt(0).any():
        raise ValueError(
            f"{run.path}/events.jsonl has no response; give a run that has trained, or --lengths"
        )
    if prompt_tokens is None:
        all_tokens = metrics["tokens/forward"] / (1 - metrics.get("tokens/saved_share", 0))
        prompts = options["groups_per_step"] * options["group_size"]
        prompt_tokens = (all_tokens - metrics["tokens/trained"]).mean() / prompts
    clipped = tokens[tokens > 0].astype(float).clip(upper=config.max_response_tokens)
    prompt = min(prompt_tokens, config.max_prompt_tokens)
    return Lengths.of(prompt, clipped, config.groups_per_step * config.group_size)


def with_rates(cluster: Cluster, run) -> tuple[Cluster, str]:
    """Return the cluster with the mfu and hbm_efficiency that the run measured of its GPUs, and a note on them."""
    gpus = run.info["hardware"]["gpus"]
    measured = [pool for pool in cluster.pools if pool.called in gpus]
    where = ", ".join(dict.fromkeys(gpus)) or "a CPU"
    if run.info["config"].get("listen"):
        where, measured = "machines that joined it, too", []
    if not measured:
        return (
            cluster,
            f"{run.path} ran on {where}: its lengths are taken, its rates say nothing of this cluster",
        )
    config = config_of(run)
    job = Job(config, read_shape(config.model), lengths_of(run, config, None))
    # the pipeline fills first
    steps, responses = run.metrics[len(run.metrics) // 4 :], run.events["trajectory"]
    engines = len(responses[["node", "worker"]].drop_duplicates())
    decoding_s = engines * (run.metrics["time/step_s"] * run.metrics["worker_time/decoding"])
    passes_s = steps["time/train_s"] - steps["trainer_time/optimizer"] * steps["time/step_s"]
    generated = (steps["rollout/tokens_per_s"] * steps["time/step_s"]).sum()
    requests = (responses["ended_at"] - responses["started_at"]).sum() / decoding_s.sum()
    rates = {
        "trained_tokens_per_s": steps["tokens/trained"].sum()
        / passes_s.sum()
        / run.info["world_size"],
        "sampled_tokens_per_s": generated / decoding_s[steps.index].sum() / config.rollout_tp,
    }
    calibrated = {
        p: planner.calibrated(job, dataclasses.replace(p, **rates), requests) for p in measured
    }
    rates_text = "; ".join(
        f"{p.name} has mfu {p.mfu:.3g} and hbm_efficiency {p.hbm_efficiency:.3g}"
        for p in calibrated.values()
    )
    return dataclasses.replace(
        cluster, pools=tuple(calibrated.get(p, p) for p in cluster.pools)
    ), f"by {run.path} {rates_text}"


def read_lengths(law: str | None, config: Config, prompt_tokens: float | None) -> Lengths:
    """Return the lengths of a law, by default lognormal around a quarter of the limit."""
    name, _, numbers = (law or f"lognormal:{config.max_response_tokens / 4:g},0.8").partition(":")
    try:
        median, sigma = map(float, numbers.split(","))
    except ValueError:
        median = sigma = -1.0
    if name != "lognormal" or not 0 < median < math.inf or not 0 <= sigma < 10:
        raise ValueError(
            f"--lengths takes lognormal:MEDIAN,SIGMA, as lognormal:2000,0.8, got {law}"
        )
    return Lengths.lognormal(
        prompt_tokens or config.max_prompt_tokens,
        median,
        sigma,
        limit=config.max_response_tokens,
        num=config.groups_per_step * config.group_size,
    )

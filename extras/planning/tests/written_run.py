"""A run as asyncrl/runlog writes it, whose times are chosen."""

from collections import Counter

from qwen3_models import folder_of

from asyncrl.config import Config
from asyncrl.runlog.metrics import time_metrics
from asyncrl.runlog.run_directory import RunDirectory
from scripts.runs import Run, load


def usual_spans(step):
    return [(0, 0.0, 0.1), (0, 1.0, 1.5 + 0.1 * (step % 2))]


def write_run(folder, num_steps=8, spans=usual_spans, **options) -> Run:
    """A run whose steps are twice as slow in its first half as in the second.

    A step trains 0.4 s, of which AdamW takes 0.1 s, on 200 tokens with 400 of their prompts. Each engine decodes for
    0.6 s of it. Weights take 0.6 and 0.8 s to the workers. `spans(step)` are worker, start and end of the responses of
    a step.
    """
    usual = {"async_ratio": 1.0, "groups_per_step": 2, "group_size": 2}
    usual |= {"max_prompt_tokens": 128, "max_response_tokens": 2048}
    usual |= {"model": folder_of("1.7b"), "runs_dir": str(folder), "run_name": "one"}
    directory = RunDirectory(Config(**usual | options), num_ranks=1)
    now = 0.0
    for step in range(1, num_steps + 1):
        step_s = 2.0 if step <= num_steps / 2 else 1.0
        now += step_s
        directory.record_event("step", time=now, step=step, groups=[step])
        for worker, start, end in spans(step):
            span = {"worker": worker, "started_at": start, "ended_at": end}
            span["finish_reason"] = "stop"
            directory.record_event("trajectory", time=now, group=step, tokens=50, **span)
        for seconds in (0.6, 0.8):
            directory.record_event("update", time=now + 0.01, broadcast_s=seconds)
        metrics = {
            "step": step,
            "tokens/trained": 200.0,
            "tokens/forward": 600.0,
            "rollout/tokens_per_s": 100 / step_s,
            "worker_time/decoding": 0.6 / step_s,
            "staleness/mean": 0.1 * step,
        }
        waited = int((step_s - 0.4) * 1e9)
        spent = Counter(wait=waited, forward_backward=3 * 10**8, optimizer=10**8)
        directory.log_metrics(metrics | time_metrics(spent))
    directory.close()
    return load(directory.path)

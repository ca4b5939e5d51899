"""Whole jobs on a model and a task from outside; test_several_nodes.py has several turns."""

import pytest
from real_job import assert_ledger_balances, run_job

from scripts.lines import read

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_any_causal_lm_trains_on_a_reasoning_gym_task_through_its_chat_template(tmp_path):
    from tiny_policy import save_byte_llama

    job = run_job(
        tmp_path,
        model=save_byte_llama(str(tmp_path / "model")),
        task="reasoning_gym:basic_arithmetic",
        steps=3,
        on_update="recompute",
        stale_policy="drop",
        algo="tis",
        advantage="gae",
        temperature=0.8,
        top_p=0.95,
        max_prompt_tokens=400,
        max_response_tokens=16,
        eval_every=2,
        lora_rank=4,
    )
    for name in ("adapter/adapter_model.safetensors", "value_head/value_head.safetensors"):
        assert (job.run_path / "checkpoints" / "step_3" / name).exists()
    metrics = job.metrics()
    assert max(job.values("mismatch/abs_max")) < 1e-4
    assert max(line["drift/k3"] for line in metrics if line["staleness/max"] == 0) < 1e-6
    sample, *_ = read(job.run_path / "samples.jsonl")
    assert sample["prompt"].startswith("user: ") and sample["prompt"].endswith("assistant: ")
    assert_ledger_balances(metrics)

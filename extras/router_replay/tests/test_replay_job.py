"""A whole job with several turns, whose experts go from the engine to the trainer's gates."""

import pytest
from real_job import run_job
from tiny_families import tiny_config, tiny_model

from asyncrl.weights.models import TINY_MODELS, load_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize(("dtype", "most_drift"), [("float32", 1e-6), ("float16", 1e-4)])
def test_a_job_of_several_turns_replays_what_its_engine_chose(dtype, most_drift, tmp_path):
    tokenizer = load_tokenizer(str(TINY_MODELS / "guess_number"))
    config = tiny_config(
        "qwen3_moe",
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = tmp_path / "model"
    tiny_model(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    job = run_job(
        tmp_path,
        model=str(model),
        task="guess_number",
        dtype=dtype,
        router_replay=True,
        record=True,  # experts also go to a file
        async_ratio=0.0,
        max_prompt_tokens=100,
        steps=2,
    )
    metrics = job.metrics()
    assert max(line["drift/k3"] for line in metrics) < most_drift
    assert max(line["response/turns_mean"] for line in metrics) > 1
    for line in metrics:
        assert line["experts/rerouted"] < 0.01
        assert 0 < line["experts/recorded_mib"] < 1

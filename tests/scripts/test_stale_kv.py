"""scripts/stale_kv.py on a run written by hand, whose mixture of versions transformers' own cache makes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policy import VOCAB, save_tiny_model
from transformers import AutoModelForCausalLM

from data.records import Group, Trajectory
from records.batches import batch_path, write_batch

ROOT = Path(__file__).resolve().parents[2]
PROMPT, BEFORE, AFTER = 6, 5, 7
"""Tokens of the prompt, then written under version 0, then under version 1."""


@torch.no_grad()
def mixture(old, new, tokens, keep):
    """[T] nats: the first tokens under `old`, the last AFTER under `new`, which reads the cache of `old` if `keep`."""
    ids, cut = torch.tensor(tokens)[None], PROMPT + BEFORE
    first = old(ids[:, :cut], use_cache=True)
    if keep:
        # The token before the cut was only sampled under the old weights; the new ones are the first to read it.
        cache = old(ids[:, : cut - 1], use_cache=True).past_key_values
        rest = new(ids[:, cut - 1 :], past_key_values=cache).logits[0]
    else:
        rest = new(ids).logits[0, cut - 1 :]
    logits = torch.cat([first.logits[0, : cut - 1], rest[:-1]])
    scores = torch.log_softmax(logits.double(), -1).gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], scores.numpy()]).astype(np.float32)


def write_run(path, keep, **config):
    """A run directory of two steps and one trajectory that lived through an update."""
    first = Path(save_tiny_model(str(path / "model")))
    old = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    new = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.0 + 0.2 * (torch.rand_like(parameter) - 0.5))
    new.save_pretrained(path / "checkpoints" / "step_1")
    tokens = np.random.default_rng(0).integers(3, VOCAB, PROMPT + BEFORE + AFTER)
    trajectory = Trajectory(
        ticket_id=0,
        group_id=0,
        member=0,
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) >= PROMPT,
        behavior_logprobs=mixture(old, new, tokens, keep),
        policy_versions=np.repeat([-1, 0, 1], [PROMPT, BEFORE, AFTER]).astype(np.int32),
        reward=0.0,
        finish_reason="stop",
        failure="",
        num_turns=1,
        started_at=0.0,
        ended_at=1.0,
        worker=0,
    )
    write_batch(batch_path(path, 1), 1, [Group(0, (trajectory,))])
    recorded = {"model": str(first), "task": "addition", "record": True, "save_every": 1, "top_p": 1.0}
    options = recorded | {"temperature": 1.0, "on_update": "keep" if keep else "recompute"} | config
    header = {"config": options, "command": ["by hand"], "git_commit": "none", "hardware": {}}
    (path / "run.json").write_text(json.dumps(header))
    return path


def run(*arguments):
    command = [sys.executable, "scripts/stale_kv.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_tokens_after_an_update_differ_under_keep_only_and_those_before_it_never(tmp_path):
    runs = [write_run(tmp_path / name, keep=name == "keep") for name in ("keep", "recompute")]
    done = run(*runs, "--out", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    records = [json.loads(line) for line in (tmp_path / "stale_kv.jsonl").read_text().splitlines()]
    found = {(r["on_update"], r["updates"]): r for r in records}
    assert {key: r["tokens"] for key, r in found.items()} == {
        (mode, updates): tokens for mode in ("keep", "recompute") for updates, tokens in ((0, BEFORE), (1, AFTER))
    }
    assert found["keep", 1]["gap_abs_mean"] > 1e-3
    for control in (("keep", 0), ("recompute", 0), ("recompute", 1)):
        assert found[control]["gap_abs_max"] < 1e-5
    assert found["keep", 1]["step_abs_mean"] == found["recompute", 1]["step_abs_mean"] > 1e-3
    assert found["keep", 0]["step_abs_mean"] is None, "version 0 has none before it"
    assert len((tmp_path / "table.md").read_text().splitlines()) == 2 + len(records)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"record": False}, r"make the run with --record --save-every 1"),
        ({"save_every": 0}, r"make the run with --record --save-every 1"),
        ({"top_p": 0.9}, r"was sampled with --top-p 0\.9; make the run with --top-p 1"),
    ],
)
def test_a_run_that_does_not_tell_is_refused_in_one_line(tmp_path, config, error):
    done = run(write_run(tmp_path, keep=True, **config), "--out", tmp_path)
    assert done.returncode == 2 and re.search(error, done.stderr.splitlines()[-1])

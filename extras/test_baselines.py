"""Random walks of the controller of a baseline; see tests/random_walk.py."""

import os

import pytest
from random_walk import CHOICES, Walk, run_walks

NUM_WALKS = int(os.environ.get("WALKS", 1250)) // 2
NUM_CHUNKS = 10


class BaselineWalk(Walk):
    """A run whose rollout is one that the papers compare with."""

    choices = CHOICES | {
        "scheduling": ["queue", "batch", "lockstep"],
        "replicate_prompts": [True, False],
    }


@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, NUM_CHUNKS))]
)
def test_in_any_order_of_events_the_promises_of_a_baseline_hold(chunk):
    run_walks(BaselineWalk, range(chunk, NUM_WALKS, NUM_CHUNKS))

"""Random walks of the controller of a baseline; see tests/random_walk.py."""

from random_walk import CHOICES, IN_CHUNKS, NUM_WALKS, Walk, run_walks


class BaselineWalk(Walk):
    """A run whose rollout is one that the papers compare with."""

    choices = CHOICES | {
        "scheduling": ["queue", "batch", "lockstep"],
        "replicate_prompts": [True, False],
    }


@IN_CHUNKS
def test_in_any_order_of_events_the_promises_of_a_baseline_hold(chunk):
    run_walks(BaselineWalk, NUM_WALKS // 2, chunk)

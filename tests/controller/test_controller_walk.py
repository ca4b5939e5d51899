"""Random walks of the controller without any optional system; see tests/random_walk.py.

WALKS in the environment sets how many walks there are. A tenth of them are not slow. The rarest of the faults that were
once planted showed in 5 walks of 1,000.
"""

import os

import pytest
from random_walk import Walk, run_walks

NUM_WALKS = int(os.environ.get("WALKS", 1250))
NUM_CHUNKS = 10


@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, NUM_CHUNKS))]
)
def test_in_any_order_of_events_and_with_any_options_the_promises_hold(chunk):
    run_walks(Walk, range(chunk, NUM_WALKS, NUM_CHUNKS))

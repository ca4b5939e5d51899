"""Random walks of the controller without any optional system; see tests/random_walk.py."""

from random_walk import IN_CHUNKS, NUM_WALKS, Walk, run_walks


@IN_CHUNKS
def test_in_any_order_of_events_and_with_any_options_the_promises_hold(chunk):
    run_walks(Walk, NUM_WALKS, chunk)

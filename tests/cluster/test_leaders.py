import datetime
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.leaders import Leaders
from asyncrl.cluster.node_watch import NodeWatch


def two_leaders(timeout_s):
    """Those of two nodes, in two threads of this process, over real gloo."""
    store, made = dist.HashStore(), {}

    def meet(node):
        made[node] = Leaders(store, node, 2, datetime.timedelta(seconds=timeout_s))

    other = threading.Thread(target=meet, args=(1,))
    other.start()
    meet(0)
    other.join()
    return made[0], made[1]


def test_all_gather_values_of_any_size_in_the_order_of_nodes():
    one, two = two_leaders(30)
    found = []
    other = threading.Thread(target=lambda: found.append(two.gather("x" * 1000)))
    other.start()
    assert one.gather(1) == [1, "x" * 1000]
    other.join()
    assert found == [[1, "x" * 1000]]


def test_a_wait_that_takes_too_long_names_the_option_and_ends_with_stacks():
    one, _ = two_leaders(0.5)
    with pytest.raises(
        RuntimeError, match=r"waited 0\.5 s for all other nodes; .* raise --timeout-s"
    ) as caught:
        one.gather("mine")
    explained = NodeWatch(Cluster(), lambda: "stacks are in FILE").explain(caught.value)
    assert str(explained).endswith("of which this is twice; stacks are in FILE")


def test_a_signal_is_acted_on_while_a_leader_waits():
    one, two = two_leaders(30)

    def interrupt(number, frame):
        raise InterruptedError("stopped")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        with pytest.raises(InterruptedError):
            one.gather("mine")
        assert time.monotonic() - start < 5
    finally:
        signal.signal(signal.SIGALRM, before)
        # what one began; else gloo waits for its timeout when both go
        two._gather_tensors(torch.tensor([0]))

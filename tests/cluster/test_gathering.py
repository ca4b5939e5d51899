import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.gathering import Gathering
from asyncrl.cluster.node_watch import NodeWatch


def two_leaders(timeout_s):
    """Return what the leaders of two nodes gather by, over a real store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port)
    return Gathering(server, 0, 2, timeout_s), Gathering(client, 1, 2, timeout_s)


def test_all_gather_values_of_any_size_in_the_order_of_nodes():
    one, two = two_leaders(30)
    found, values = [], [b"x" * 1000, b"", os.urandom(20 << 20), b"2"]
    other = threading.Thread(target=lambda: found.extend(map(two.gather, values)))
    other.start()
    expected = [[b"%d" % number, value] for number, value in enumerate(values)]
    assert [one.gather(b"%d" % number) for number in range(4)] == expected
    other.join()
    assert found == expected


def test_a_wait_that_takes_too_long_names_the_option_and_ends_with_stacks():
    one, _ = two_leaders(0.5)
    with pytest.raises(
        RuntimeError,
        match=r"waited 0\.5 s, 2 × --timeout-s, for all other nodes; .* raise --timeout-s",
    ) as caught:
        Cluster(leaders=one).gather("mine")
    watch = NodeWatch(Cluster(), lambda: "stacks are in FILE")
    for error in (caught.value, RuntimeError("Timed out waiting 110000ms for send operation")):
        assert str(watch.explain(error)) == f"{error}; stacks are in FILE"


def test_a_signal_is_acted_on_while_a_leader_waits():
    one, _ = two_leaders(30)

    def interrupt(number, frame):
        raise InterruptedError("stopped")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        with pytest.raises(InterruptedError):
            one.gather(b"mine")
        assert time.monotonic() - start < 20
    finally:
        signal.signal(signal.SIGALRM, before)

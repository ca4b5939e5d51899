import datetime
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from cluster.leaders import Leaders


def two_leaders(timeout_s):
    """Those of nodes 3 and 5, in two threads of this process, over real gloo."""
    store, made = dist.HashStore(), {}

    def meet(node):
        made[node] = Leaders("test", store, node, (3, 5), datetime.timedelta(seconds=timeout_s))

    other = threading.Thread(target=meet, args=(5,))
    other.start()
    meet(3)
    other.join()
    return made[3], made[5]


def test_values_and_tensors_arrive_in_the_order_they_were_sent():
    one, two = two_leaders(30)
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    under_way = [*one.send({"a": [1, 2]}, 5), one.send_tensor(tensor, 5), *one.send("b" * 100_000, 5)]
    assert two.receive(3) == {"a": [1, 2]}
    assert torch.equal(two.receive_tensor(torch.empty(2, 3, dtype=torch.bfloat16), 3), tensor)
    assert two.receive(3) == "b" * 100_000
    for sending in under_way:
        sending.wait()


def test_all_gather_values_of_any_size_in_the_order_of_nodes():
    one, two = two_leaders(30)
    found = []
    other = threading.Thread(target=lambda: found.append(two.gather("x" * 1000)))
    other.start()
    assert one.gather(1) == [1, "x" * 1000]
    other.join()
    assert found == [[1, "x" * 1000]]


def test_a_wait_that_takes_too_long_names_the_node_and_the_option_and_dumps_stacks():
    one, _ = two_leaders(0.5)
    dumps = []
    one.dump_stacks = lambda: dumps.append(1)
    with pytest.raises(RuntimeError, match=r"waited 0\.5 s for node 5 to send; .* raise --timeout-s"):
        one.receive(5)
    assert dumps == [1]


def test_a_signal_is_acted_on_while_a_leader_waits():
    one, _ = two_leaders(30)

    def interrupt(number, frame):
        raise InterruptedError("stopped")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        with pytest.raises(InterruptedError):
            one.receive(5)
        assert time.monotonic() - start < 5
    finally:
        signal.signal(signal.SIGALRM, before)

"""End a node within seconds of another's end, whatever it is doing then.

Each two leaders have a connection. It carries one message, at the end. An empty message is a good end, and another one
is the reason of a bad end. If a node is killed, its kernel closes the connection. Without this, other nodes would
notice at their next collective. In a collective of NCCL they would notice only after its timeout.
"""

import contextlib
import datetime
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.node_watch import NodeWatch
from asyncrl.cluster.processes import EXPECTED

CONNECT_TIMEOUT = datetime.timedelta(seconds=180)
LONGEST_RUN = datetime.timedelta(days=365)
MESSAGE_BYTES = 1024
FINISH_TIMEOUT_S = 60.0
REPORT_TIMEOUT = datetime.timedelta(seconds=5)
NOTICE_S = 2.0
"""Seconds that a leader whose collective failed waits for the end of a node. That end is then the reason."""
GRACE_S = 30.0
"""Time for an orderly end, before the process ends at once; its workers and their engines then end by themselves."""


class LeaderWatch(NodeWatch):
    """One thread per other node on leaders. Other ranks have no thread."""

    def __init__(self, cluster: Cluster, dump_stacks: Callable[[], str]):
        """Connect the leaders and start to watch; collective.

        `dump_stacks()` is called when a node is lost or a wait takes too long, and returns where the stacks are.
        """
        super().__init__(cluster, dump_stacks)
        self._has_reason = threading.Event()
        self._lock = threading.Lock()
        self._is_ending = False
        self._unreported: list[int] = []
        self._threads: list[threading.Thread] = []
        if cluster.leaders is None:
            return
        store = dist.PrefixStore("watch", cluster.store)
        self._group = dist.ProcessGroupGloo(store, cluster.node, cluster.num_nodes, CONNECT_TIMEOUT)
        self._unreported = [node for node in range(cluster.num_nodes) if node != cluster.node]
        for node in self._unreported:
            thread = threading.Thread(
                target=self._watch, args=(node,), name=cluster.name(node), daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def finish(self) -> None:
        """Wait for the good end of other nodes, after that of this node. Raises RuntimeError if it takes too long."""
        self._report("")
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise RuntimeError(
                    f"this node has finished, and {thread.name} has not {FINISH_TIMEOUT_S:.0f} s later"
                )

    def explain(self, error: BaseException) -> BaseException:
        """Return the cause of this node's end: the earlier end of another, or `error`. Other nodes get a report.

        No signal comes from here any more.
        """
        error = super().explain(error)
        if isinstance(error, RuntimeError) and self._threads:
            self._has_reason.wait(NOTICE_S)
        with self._lock:  # waits for a dump of stacks that goes on
            self._is_ending = True
        if self.reason is None:
            self._report(str(error) if isinstance(error, EXPECTED) else repr(error))
            return error
        self._report(f"after {self.reason}")
        return RuntimeError(self.reason)

    def _report(self, reason: str) -> None:
        line = " ".join(reason.split()).encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
        message = torch.frombuffer(bytearray(line), dtype=torch.uint8)
        nodes, self._unreported = self._unreported, []
        for node in nodes:
            with contextlib.suppress(RuntimeError):  # it may be gone already
                self._group.send([message], node, 0).wait(REPORT_TIMEOUT)

    def _watch(self, node: int) -> None:
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        try:
            self._group.recv([message], node, 0).wait(LONGEST_RUN)
        except RuntimeError as error:
            # gloo begins with its source file
            how = re.sub(r"^\[.*?\] ", "", str(error)).split(". ")[0]
            self._end(
                f"{self.cluster.name(node)} is gone without a word, killed or cut off: {how}",
                lost=True,
            )
            return
        reason = bytes(message.tolist()).rstrip(b"\0").decode(errors="ignore")
        if reason:
            self._end(f"{self.cluster.name(node)} ended: {reason}", lost=False)

    def _end(self, reason: str, lost: bool) -> None:
        """End this process: its main thread by a signal, or everything if that thread is deep in a collective."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            if lost:
                self.reason = f"{reason}; {self.dump_stacks()}"
            self._has_reason.set()
            if not self._is_ending:
                os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        print(
            f"error: {reason}; no orderly end within {GRACE_S:.0f} s", file=sys.stderr, flush=True
        )
        os._exit(1)

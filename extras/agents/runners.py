"""Runs an agent: a coroutine of user code, or a program. Both get the endpoint, a key and a problem."""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import shlex
import shutil
import signal
import ssl
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from asyncrl.engine.rewards import Failed, brief, one_line
from extras.agents.endpoint import Endpoint, InProcessTransport

MAX_OUTPUT_BYTES = 1 << 20
"""Most that a program may print."""
LEFTOVER_S = 5.0
"""Longest wait for the last output of a program that has ended."""
BLOCKED_S = 5.0
"""Time after which an event loop that does not answer is left to the agent that blocks it."""
MAX_THREADS = 4096
"""Threads that coroutines may use at once by asyncio.to_thread; Python's own limit is below the number of agents."""


class Coroutines:
    """Agents that are coroutines, such as `async def run(client, problem)` of a file.

    They share an event loop in a separate thread. The worker's loop samples meanwhile, whatever they compute. An agent
    that blocks keeps other agents waiting. If it blocks for longer than its time limit, it keeps the thread. The other
    agents then get a new one.
    """

    def __init__(self, task: str, function: Callable[..., Awaitable]) -> None:
        """Run `function`; failures name `task`."""
        self._task = task
        self._function = function
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, endpoint: Endpoint, key: str, problem: dict) -> Any:
        """Await the coroutine in the agents' thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS, "agent"))
            threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
        loop = self._loop
        transport = InProcessTransport(endpoint, asyncio.get_running_loop())
        running = self._await(endpoint.url, transport, key, problem)
        future = asyncio.run_coroutine_threadsafe(running, loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
            asyncio.get_running_loop().call_later(BLOCKED_S, self._leave_blocked, loop, answer)
            raise

    def _leave_blocked(self, loop: asyncio.AbstractEventLoop, answer) -> None:
        if not answer.done() and self._loop is loop:
            self._loop = None

    async def _await(self, url: str, transport: InProcessTransport, key: str, problem: dict) -> Any:
        import openai

        # Its own, as an agent may close it. Whatever is sent elsewhere goes by the network.
        http_client = openai.DefaultAsyncHttpxClient(
            timeout=None,
            verify=_certificates(),
            trust_env=False,
            mounts={url.removesuffix("/v1"): transport},
        )
        client = openai.AsyncOpenAI(
            base_url=url, api_key=key, http_client=http_client, max_retries=0, timeout=None
        )
        try:
            return await self._function(client, problem)
        except (asyncio.CancelledError, Failed):
            raise
        except BaseException as error:  # foreign code may raise anything
            raise Failed(f"{self._place(error)}: {one_line(error)}") from None
        finally:
            await http_client.aclose()

    def _place(self, error: BaseException) -> str:
        """Return the task, and the line of its file that raised the error."""
        function = inspect.unwrap(getattr(self._function, "func", self._function))  # of a partial
        code = getattr(function, "__code__", None)
        file, place = code and code.co_filename, self._task
        for frame, line in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == file:
                place = f"{self._task}, line {line}"
        return place


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the certificates that this computer trusts. To read them takes longer than a call."""
    return ssl.create_default_context()


class Programs:
    """Agents that are programs. Each trajectory has a process. It reads the problem as JSON from stdin."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._words = shlex.split(command)
        if shutil.which("setpriv"):  # then the program ends with its worker, however that ends
            self._words = ["setpriv", "--pdeathsig", "KILL", *self._words]

    async def run(self, endpoint: Endpoint, key: str, problem: dict) -> str:
        """Run the program, and return what it printed. All that it started is gone when this returns or raises."""
        own = {"OPENAI_BASE_URL": endpoint.url, "OPENAI_API_KEY": key}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | own,
                process_group=0,
            )
        except (OSError, ValueError) as error:
            raise Failed(f"{self._command}: {one_line(error)}") from None
        output = bytearray()
        reading = asyncio.create_task(_read_limited(process, output))
        ending = asyncio.create_task(process.wait())
        try:
            with contextlib.suppress(ConnectionError):  # it need not read its problem
                process.stdin.write(json.dumps(problem).encode() + b"\n")
                process.stdin.close()
            await _wait_for_exit(process.pid)
        finally:
            _kill_group(process.pid)
            await asyncio.to_thread(_kill_all_with, f"OPENAI_API_KEY={key}")
            await asyncio.wait({reading, ending}, timeout=LEFTOVER_S)
            reading.cancel()
            ending.cancel()
        if len(output) > MAX_OUTPUT_BYTES:
            raise Failed(f"{self._command} printed more than {MAX_OUTPUT_BYTES} bytes")
        if process.returncode:
            reason = (
                f"ended with status {process.returncode}; the log of its worker has what it said"
            )
            raise Failed(f"{self._command} {reason}")
        return output.decode(errors="replace")


Agent = Coroutines | Programs
"""The agent of each trajectory. `run` returns a reward, its parts, or a text. It raises Failed."""


async def _read_limited(process: asyncio.subprocess.Process, output: bytearray) -> None:
    """Add what a program prints to `output`. One that prints too much is killed; a little more than it may is added."""
    while chunk := await process.stdout.read(1 << 16):
        if len(output) <= MAX_OUTPUT_BYTES:
            output += chunk
        else:
            _kill_group(process.pid)


async def _wait_for_exit(pid: int) -> None:
    """Wait for the end of a child alone: Process.wait waits for all that hold its stdout open, too."""
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended already
        return
    except OSError as error:  # too many files are open
        raise Failed(f"its end cannot be watched: {one_line(error)}") from None
    loop.add_reader(descriptor, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _kill_all_with(variable: str) -> None:
    """Kill the processes that have a variable, `NAME=VALUE`, in their environment: any may leave its group."""
    deadline = time.monotonic() + LEFTOVER_S
    while (pids := _pids_with(variable.encode())) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _pids_with(variable: bytes) -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if variable in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


def text_of(returned: Any) -> str:
    """Return what an agent returned as a text. Raises Failed."""
    try:
        return str(returned)
    except Exception as error:  # foreign code can raise anything
        raise Failed(f"str() of what it returned: {one_line(error)}") from None


def last_line_as_reward(output: str) -> Any:
    """Return the number, or the dict of numbers, in the last line of what a program printed. Raises Failed."""
    lines = output.strip().splitlines()
    try:
        return json.loads(lines[-1] if lines else "")
    except (ValueError, RecursionError):
        last = brief(lines[-1]) if lines else "missing"
        raise Failed(
            f"the last line of its output is {last}, expected the reward as a number or a JSON object of numbers"
        ) from None

"""`python rollout.py --join`: what it refuses at once, and how it ends."""

import signal
import sys

import pytest

import rollout


class StoppedHost:
    """Is told to stop while it samples, and twice again while it ends its engines."""

    def __init__(self, *_):
        pass

    def serve(self):
        signal.raise_signal(signal.SIGTERM)
        return "it was not stopped"

    def close(self):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        print("all engines have ended")


@pytest.fixture
def join(monkeypatch):
    """Runs the command; handlers of signals are what they were when it has ended."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rollout.py", *arguments])
        rollout.main()

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_host_that_is_told_to_stop_again_while_it_stops_ends_its_engines_all_the_same(
    join, monkeypatch, capsys
):
    monkeypatch.setattr("extras.swarm.join.JoinedHost", StoppedHost)
    join("--join", "127.0.0.1:7733", "--key", "none")
    assert capsys.readouterr().out == "all engines have ended\nleft: stopped here\n"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:7733", "host:port", "host:7733 "])
def test_an_address_that_is_no_host_and_port_is_refused_at_once(join, address):
    with pytest.raises(
        SystemExit, match=r"error: --join must be HOST:PORT, as 127.0.0.1:7733, got"
    ):
        join("--join", address, "--key", "none")

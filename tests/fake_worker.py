"""A rollout worker without an engine, for tests of the controller: it answers as the ticket's answer tells it to."""

import os
import threading
import time

import numpy as np

from messages import Abort, Finished, Ready, Stop, Tickets, Update, Updated
from rollout import Completion, make_trajectory


def run_fake_worker(spec, connection):
    """Serve a controller: `ok`, `fail`, `hang` (until aborted), `die` (the first time), `die always`, `slow`."""
    os.setsid()
    if spec.model_path == "broken":
        with open(spec.log_path, "a") as log:
            log.write("RuntimeError: this model is broken\nand more\n")
        os._exit(7)
    version, hanging, lock = -1, {}, threading.Lock()

    def send(message):
        with lock:
            connection.send(message)

    send(Ready(0.0))
    while True:
        match connection.recv():
            case Update(version, _, _):
                died = os.path.exists(spec.log_path + ".died")
                if spec.model_path == "dies at version 2" and version == 2 and not died:
                    open(spec.log_path + ".died", "w").close()
                    os._exit(5)
                send(Updated(version, 0.001))
            case Tickets(tickets):
                for ticket in tickets:
                    if ticket.answer == "hang":
                        hanging[ticket.ticket_id] = ticket
                    elif ticket.answer == "slow":
                        threading.Timer(1.0, send, [Finished([answer(ticket, version, spec)])]).start()
                    else:
                        send(Finished([answer(ticket, version, spec)]))
            case Abort(ticket_ids):
                aborted = [hanging.pop(i) for i in ticket_ids if i in hanging]
                send(Finished([trajectory(t, version, spec, "aborted") for t in aborted]))
            case Stop():
                return


def answer(ticket, version, spec):
    if ticket.answer == "die always" or (ticket.answer == "die" and ticket.attempt == 0):
        os._exit(3)
    return trajectory(ticket, version, spec, "failed" if ticket.answer == "fail" else "stop")


def trajectory(ticket, version, spec, finish_reason):
    completion = Completion([5, 1], np.zeros(2, np.float32), np.full(2, version, np.int32), finish_reason)
    reward = 1.0 if finish_reason == "stop" else float("nan")
    failure = "ValueError: no good" if finish_reason == "failed" else ""
    return make_trajectory(ticket, completion, reward, finish_reason, failure, time.time(), spec.placement.worker)

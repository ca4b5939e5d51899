"""A joined host that lies: it halves its log-probs. `python lying_host.py --join HOST:PORT --key FILE`."""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import rollout
from asyncrl.messages import Finished
from extras.swarm.link import Link

send_honestly = Link.send


def send(link, message, *engine):
    if isinstance(message, Finished):
        lies = [
            dataclasses.replace(t, behavior_logprobs=t.behavior_logprobs * 0.5)
            for t in message.trajectories
        ]
        message = dataclasses.replace(message, trajectories=lies)
    send_honestly(link, message, *engine)


if __name__ == "__main__":
    Link.send = send
    rollout.main()

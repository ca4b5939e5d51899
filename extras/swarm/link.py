"""One end of the connection between a run and a host that samples for it; both ends use this class."""

import time
from collections import Counter
from collections.abc import Callable

from extras.swarm.wire import BEAT_S, HOST, SILENCE_S, Beat, decode, encode


class Link:
    """Sends and reads messages as frames, counts bytes, and knows when the other side was heard."""

    def __init__(self, received: tuple[type, ...], send_frames: Callable[[list[bytes]], None]):
        """`received` are the classes that may come from the other side; `send_frames(frames)` never waits."""
        self._received, self._send_frames = received, send_frames
        self.num_bytes: Counter[str] = Counter()
        """`sent` and `received`."""
        self.heard_at = self.sent_at = time.monotonic()

    def send(self, message: object, engine: int = HOST) -> None:
        """Send a message to or of an engine, or the host itself."""
        frames = [str(engine).encode(), *encode(message)]
        self.num_bytes["sent"] += sum(map(len, frames))
        self.sent_at = time.monotonic()
        self._send_frames(frames)

    def read(self, frames: list[bytes]) -> tuple[int, object]:
        """Return the engine, or HOST, and the message that came. Raises ValueError for a message that must not come."""
        self.heard_at = time.monotonic()
        self.num_bytes["received"] += sum(map(len, frames))
        if len(frames) != 3:
            raise ValueError(f"a message of {len(frames)} frames, not 3")
        return int(frames[0]), decode(*frames[1:], self._received)

    @property
    def silent_s(self) -> float:
        """Return the time since the other side was heard, seconds."""
        return time.monotonic() - self.heard_at

    @property
    def is_silent(self) -> bool:
        """Return whether the other side counts as gone."""
        return self.silent_s > SILENCE_S

    def beat(self) -> None:
        """Give a sign of life, unless a message was just sent; to be called every BEAT_S."""
        if time.monotonic() > self.sent_at + BEAT_S / 2:
            self.send(Beat())

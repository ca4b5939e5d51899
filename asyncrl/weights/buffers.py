"""What transports share that copy weights into buffers of the trainer, from which workers read them."""

from collections.abc import Sequence

from asyncrl.weights.transport import ParameterSpec, Transport, Weights


class Buffers(Transport):
    """A transport with one or two buffers. It never writes a buffer that a worker is reading.

    Of two buffers it does not write the announced one either. So with one worker the trainer does not wait, unless the
    worker is still loading the version before the announced one. A single buffer is written once all workers have
    loaded what is in it. A worker that starts meanwhile waits for the next announcement.
    """

    def __init__(self, num_buffers: int, specs: Sequence[ParameterSpec] = ()):
        super().__init__(specs)
        self.num_buffers, self.keeps_announced = num_buffers, num_buffers > 1

    def reserve(self) -> bool:
        """Return whether there is a buffer that may be written. From then on nobody begins to read it."""
        index = self._free_buffer()
        if index == self.announced:
            self.announced = -1
        return index is not None

    def _free_buffer(self) -> int | None:
        kept = self.announced if self.keeps_announced else None
        free = (i for i in range(self.num_buffers) if not self.readers[i] and i != kept)
        return next(free, None)

    def take_buffer(self) -> int:
        """Return the index of the buffer that is to be written. Raises RuntimeError if there is none."""
        if not self.reserve():
            raise RuntimeError(
                f"no weight buffer is free: readers {dict(self.readers)}, announced {self.announced}"
            )
        return self._free_buffer()


def copy_parameters(parameters: Weights, views: Weights) -> None:
    """Copy each parameter into its view, casting to the dtype that is sent.

    Raises RuntimeError if names or their order differ from those of the views, ValueError if their number does.
    """
    for (name, tensor), (expected, view) in zip(parameters, views, strict=True):
        if name != expected:
            raise RuntimeError(
                f"parameter {name!r} arrived where {expected!r} was expected: keep their order"
            )
        view.copy_(tensor)

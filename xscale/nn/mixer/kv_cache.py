"""Keys and values that attention keeps during generation, in buffers that grow."""

from torch import Tensor


class KvCache:
    """Keys and values of one attention mixer during generation."""

    def __init__(self) -> None:
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, G, T, K] and return views of everything cached, [B, G, S, K]."""
        start, count = self._length, k.shape[2]
        self._k, self._v = grow_buffer(self._k, k, start), grow_buffer(self._v, v, start)
        self._k.narrow(2, start, count).copy_(k)
        self._v.narrow(2, start, count).copy_(v)
        self._length = end = start + count
        return self._k.narrow(2, 0, end), self._v.narrow(2, 0, end)


def grow_buffer(buffer: Tensor | None, new: Tensor, length: int) -> Tensor:
    """Return a buffer with room for `new` after the first `length` tokens."""
    end = length + new.shape[2]
    if buffer is not None and buffer.shape[2] >= end:
        return buffer
    larger = new.new_empty(*new.shape[:2], max(64, 2 * end), new.shape[3])
    if buffer is not None:
        larger[:, :, :length] = buffer[:, :, :length]
    return larger

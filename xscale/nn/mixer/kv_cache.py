"""Keys and values that attention keeps during generation, in buffers that grow or of a fixed capacity."""

from typing import Any

from torch import Tensor

from xscale.nn.tokens import Tokens

CAPACITY = "capacity"
"""Key of a forward's cache: the tokens for which attention has room. Without it the buffers grow."""


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


class StaticKvCache:
    """Keys and values of one attention mixer in buffers whose shape and place in memory never change.

    A token is written at its position, so that the samples of a batch may have prompts of different lengths: what the
    padding behind a shorter one has written is overwritten by the tokens that follow it, and no query sees it before.
    """

    def __init__(self, k: Tensor, v: Tensor, capacity: int) -> None:
        """Make room for `capacity` tokens with keys and values like [B, G, T, K]. Zeros: what is hidden is finite."""
        self.k = k.new_zeros(*k.shape[:2], capacity, k.shape[3])
        self.v = v.new_zeros(*v.shape[:2], capacity, v.shape[3])

    def begin(self, k: Tensor, v: Tensor) -> None:
        """Write the first tokens, [B, G, T, K]."""
        self.k.narrow(2, 0, k.shape[2]).copy_(k)
        self.v.narrow(2, 0, v.shape[2]).copy_(v)

    def write(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token of each sample [B, G, 1, K] at its position [B, 1]; return the buffers [B, G, S, K]."""
        for buffer, new in ((self.k, k), (self.v, v)):
            buffer.scatter_(2, positions[:, None, :, None].expand_as(new), new)
        return self.k, self.v


def with_cached(tokens: Tokens, path: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Append keys and values [B, G, T, K] to the cache of the mixer at `path`, if there is one.

    Return those that the tokens may see, [B, G, S, K].
    """
    cache = tokens.forward.cache
    if cache is None:
        return k, v
    if CAPACITY not in cache:
        growing: KvCache = cache.setdefault(path, KvCache())
        return growing.append(k, v)
    if path not in cache:
        cache[path] = StaticKvCache(k, v, cache[CAPACITY])
    static: StaticKvCache = cache[path]
    if k.shape[2] == 1:
        return static.write(k, v, tokens.positions)
    # A prompt, behind which what is left of an earlier generation is hidden.
    static.begin(k, v)
    return k, v


def last_keys(tokens: Tokens, keys: int) -> Tensor | None:
    """Return the index [B, T] of the last key that each query sees, of a static cache of which it sees all `keys`.

    None: the keys are those of the tokens so far.
    """
    cache: dict[str, Any] = tokens.forward.cache or {}
    is_step = tokens.ids.shape[1] == 1 and keys == cache.get(CAPACITY)
    return tokens.positions if is_step else None


def grow_buffer(buffer: Tensor | None, new: Tensor, length: int) -> Tensor:
    """Return a buffer with room for `new` after the first `length` tokens."""
    end = length + new.shape[2]
    if buffer is not None and buffer.shape[2] >= end:
        return buffer
    larger = new.new_empty(*new.shape[:2], max(64, 2 * end), new.shape[3])
    if buffer is not None:
        larger[:, :, :length] = buffer[:, :, :length]
    return larger

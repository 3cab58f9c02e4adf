"""Activation offload: the inputs of recomputed blocks wait for their backward in CPU memory.

Rajbhandari et al. 2021 (ZeRO-Infinity) offload activation checkpoints so. On a GPU a copy to pinned memory follows the
block's forward on a stream of its own, and the copy back of a block's input begins when the backward of the next block
does, so that both overlap with computation. On a CPU the copies save nothing; they are made all the same, so that a run
on a CPU tests what one on GPUs does.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xscale.mesh.torch_private import tree_leaves, tree_map_only


class HostCopy:
    """A tensor in CPU memory, and the one that was copied before it."""

    def __init__(self, tensor: Tensor, before: "HostCopy | None") -> None:
        self.tensor = tensor
        self.source: weakref.ref[Tensor] | None = None
        """The tensor on the device, for other blocks that read it; it is not kept for that."""
        self.requires_grad = False
        """Whether that tensor has a gradient."""
        self.before: Callable[[], HostCopy | None] = (
            (lambda: None) if before is None else weakref.ref(before)
        )
        self.returning: Tensor | None = None
        """The copy on its way back to the device; None: it has not begun."""


class ActivationOffload:
    """Copies of the inputs of a model's recomputed blocks in CPU memory, until their backward."""

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of the copies that there are."""
        self.peak_bytes = 0
        """The most bytes of the copies that there were."""
        self._latest: weakref.ref[HostCopy] | None = None
        self._copies = weakref.WeakValueDictionary[int, HostCopy]()
        self._stream: Any = None

    def run(
        self,
        checkpointed: Callable[..., Any],
        forward: Callable[..., Any],
        stream: Any,
        *inputs: Any,
    ) -> Any:
        """Return forward(stream, *inputs), with the residual stream, a tensor or several, kept for its recomputation in
        CPU memory.

        `checkpointed(function, *inputs)` is torch's checkpoint, which keeps the inputs that it is given: so it is given
        an empty tensor in place of the stream, which tells it the device.
        """
        first, empty = [stream], tree_leaves(stream)[0].new_empty(0)
        copies = tree_map_only(Tensor, self.copy_of, stream)

        def back(copy: HostCopy) -> Tensor:
            return self.copy_back(copy).requires_grad_(copy.requires_grad)

        def run(_: Tensor, *inputs: Any) -> Any:
            return forward(first.pop() if first else tree_map_only(HostCopy, back, copies), *inputs)

        return checkpointed(run, empty, *inputs)

    def copy_of(self, x: Tensor) -> HostCopy:
        """Return the copy of a tensor in CPU memory, one for all blocks whose stream it is in."""
        copy = self._copies.get(id(x))
        # A tensor that is gone may have had the same id.
        if copy is None or copy.source is None or copy.source() is not x:
            copy = self._copies[id(x)] = self.copy_out(x.detach())
            copy.source, copy.requires_grad = weakref.ref(x), x.requires_grad
        return copy

    @torch.no_grad()
    def copy_out(self, x: Tensor) -> HostCopy:
        """Copy a tensor to CPU memory; on a GPU the copy may still be under way."""
        if x.is_cuda:
            stream = self._side_stream(x.device)
            stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(stream):
                tensor = torch.empty_like(x, device="cpu", pin_memory=True)
                tensor.copy_(x, non_blocking=True)
            # Its memory is not given to others before it is copied.
            x.record_stream(stream)
        else:
            tensor = x.clone()
        copy = HostCopy(tensor, None if self._latest is None else self._latest())
        self._latest = weakref.ref(copy)
        self.count(copy, tensor.numel() * tensor.element_size())
        return copy

    def count(self, copy: HostCopy, size: int) -> None:
        """Count `size` bytes of CPU memory as long as the copy is there."""
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(copy, self._released, size)

    @torch.no_grad()
    def copy_back(self, copy: HostCopy) -> Tensor:
        """Return a tensor from CPU memory, and begin to fetch the one that backward needs next."""
        device = torch.device("cpu") if self._stream is None else self._stream.device
        self._begin_return(copy, device)
        x, copy.returning = copy.returning, None
        assert x is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(device)
            current.wait_stream(self._stream)
            x.record_stream(current)
            if (before := copy.before()) is not None:
                self._begin_return(before, device)
        return x

    def _begin_return(self, copy: HostCopy, device: torch.device) -> None:
        if copy.returning is not None:
            return
        if self._stream is None:
            copy.returning = copy.tensor.clone()
            return
        with torch.cuda.stream(self._stream):
            copy.returning = copy.tensor.to(device, non_blocking=True)

    def _released(self, size: int) -> None:
        self.bytes -= size

    def _side_stream(self, device: torch.device) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream

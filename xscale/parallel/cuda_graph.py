"""A call whose kernels are captured once and replayed as a CUDA graph: one launch in place of one for each kernel.

By `torch.cuda.graph` and not by the mode reduce-overhead of torch.compile. Its graph trees leave out a graph whose
inputs are written to, as a KV cache and gradients are, copy inputs that do not stay where they are, and take over the
memory of earlier outputs; and they are of compiled code alone. Here the caller says what stays in place, an eager call
is captured too, and a call that cannot be captured raises an error where torch.compile would go on without a graph.
"""

from collections.abc import Callable

import torch

WARMUPS = 3
"""Calls before the capture, in which libraries make their handles and everything is compiled."""


class CudaGraph:
    """The replay of a call: it reads and writes the same memory each time, and its result is always the same object."""

    def __init__(self, call: Callable[[], object], warmups: int = WARMUPS) -> None:
        """Capture `call`, which runs `warmups` times before; its effects must be the same after several runs."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warmups):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = call()

    def replay(self) -> object:
        """Run the captured kernels; return the result of the captured call, which they have written anew."""
        self.graph.replay()
        return self.result

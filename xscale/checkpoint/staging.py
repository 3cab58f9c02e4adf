"""Staging of a save: copies of its boxes in one block of CPU memory, which the next save takes again.

Beside a GPU the block is page-locked as it is, by a thread. torch's allocator of pinned memory would round each box to
a power of two, and would lock pages while a step waits. Copies run on a stream of their own, beside the next step's
forward and backward; the update waits for them by `hold_update`.
"""

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from xscale.checkpoint.planner import Box, copy_box, view_of_item
from xscale.core.errors import NoticeWarning
from xscale.mesh.flat_shard import FlatShard

ALIGNMENT = 64
"""Bytes between the starts of boxes are multiples of it, so that each is a whole number of any type from its start."""
PORTABLE = 1
"""cudaHostRegisterPortable: locked for all GPUs of the process."""


@dataclass(frozen=True)
class SlabLayout:
    """Where each box lies in the block."""

    places: dict[MetadataIndex, tuple[int, torch.Size, torch.dtype]]
    """First byte, shape and type of each."""
    size: int
    """Bytes of the block."""

    @staticmethod
    def of(boxes: Mapping[MetadataIndex, Tensor]) -> "SlabLayout":
        """Lay out boxes one behind the other."""
        places, end = {}, 0
        for index, box in boxes.items():
            places[index] = (end, box.shape, box.dtype)
            end += -(-box.numel() * box.element_size() // ALIGNMENT) * ALIGNMENT
        return SlabLayout(places, end)


class Slab:
    """One block of CPU memory; `pin` page-locks it, in a thread that begins at once."""

    def __init__(self, layout: SlabLayout, pin: Callable[[Tensor], object] | None) -> None:
        self.layout = layout
        self.memory = torch.empty(layout.size, dtype=torch.uint8)
        self._fault: Exception | None = None
        self._thread: threading.Thread | None = None
        if pin is not None and layout.size:
            self._thread = threading.Thread(
                target=self._pin, args=(pin,), name="pinning", daemon=True
            )
            self._thread.start()

    def _pin(self, pin: Callable[[Tensor], object]) -> None:
        try:
            pin(self.memory)
        except Exception as error:
            self._fault = error

    def box(self, index: MetadataIndex) -> Tensor:
        """Return the place of a box, once the block is locked."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self._fault is not None:
                what = f"the memory of saves could not be page-locked ({self._fault}): each waits for its copy"
                warnings.warn(what, NoticeWarning, stacklevel=2)
        start, shape, dtype = self.layout.places[index]
        size = shape.numel() * dtype.itemsize
        return self.memory[start : start + size].view(dtype).view(shape)


class CopyStream(Protocol):
    """The queue of the copies from one device."""

    def begin(self) -> None:
        """Let the copies that follow wait for what the device has been told to compute so far."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy to CPU memory."""

    def hold_update(self) -> None:
        """Let what the device is told from here on wait for the copies. The host does not."""

    def wait(self) -> None:
        """Wait, on the host, for the copies."""


class CudaCopyStream:
    """A CUDA stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            # A tensor that is freed now is not given to others before it is copied.
            source.record_stream(self.stream)
            self.event.record(self.stream)

    def hold_update(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


def stream_of(device: torch.device) -> CopyStream | None:
    """Return a queue for copies from that device; None: from the CPU, at once."""
    return CudaCopyStream(device) if device.type == "cuda" else None


def pin_memory(memory: Tensor) -> None:
    """Page-lock memory that is there; RuntimeError where CUDA refuses. It stays locked until the process ends."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE)
    torch.cuda.check_error(int(error))


class Staging:
    """Copies of one save's boxes in CPU memory; the memory is reused by the next save."""

    def __init__(
        self,
        streams: Callable[[torch.device], CopyStream | None] = stream_of,
        pin: Callable[[Tensor], object] = pin_memory,
    ) -> None:
        self._streams, self._pin = streams, pin
        self._slab: Slab | None = None
        self._of_device: dict[torch.device, CopyStream | None] = {}

    def prepare(
        self, items: Sequence[WriteItem], shards: Mapping[str, Box | FlatShard]
    ) -> dict[MetadataIndex, Tensor]:
        """Get the memory of a save of these items, unless it is there; return what is copied, by box.

        Locking the pages of many gigabytes takes seconds: called early, this costs training none of them.
        """
        sources = {item.index: view_of_item(shards[item.index.fqn], item) for item in items}
        layout = SlabLayout.of(sources)
        for device in {source.device for source in sources.values()} - self._of_device.keys():
            self._of_device[device] = self._streams(device)
        if self._slab is None or self._slab.layout != layout:
            beside_gpu = any(
                self._of_device[source.device] is not None for source in sources.values()
            )
            self._slab = Slab(layout, self._pin if beside_gpu else None)
        return sources

    def copy(
        self, items: Sequence[WriteItem], shards: Mapping[str, Box | FlatShard]
    ) -> Callable[[WriteItem], Tensor]:
        """Copy each item's box and return a function that looks up the copies.

        Copies from a GPU are queued behind the step that computed the numbers. Call `hold_update` before what changes
        them is queued, and `wait` before reading the copies.
        """
        sources, slab = self.prepare(items, shards), self._slab
        assert slab is not None, "prepared"
        for stream in self._of_device.values():
            if stream is not None:
                stream.begin()
        for index, source in sources.items():
            stream, target = self._of_device[source.device], slab.box(index)
            if stream is None:
                copy_box(target, source)
            else:
                stream.copy(target, source)
        return lambda item: slab.box(item.index)

    def hold_update(self) -> None:
        """Let the devices finish queued copies before what they are told from here on."""
        for stream in self._of_device.values():
            if stream is not None:
                stream.hold_update()

    def wait(self) -> None:
        """Wait for queued copies."""
        for stream in self._of_device.values():
            if stream is not None:
                stream.wait()

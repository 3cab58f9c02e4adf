"""P2P communication between the ranks of pp: tensors of known shapes, in an order that both ends know."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xscale.mesh.mesh import Mesh


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class PendingMessage:
    """A message of the pipeline that this rank waits for, in words for a diagnosis."""

    direction: Literal["send", "receive"]
    peer: int
    """The rank at the other end, of all ranks."""
    key: Hashable
    """(F or B, receiving stage, micro-batch), (E, receiving stage) or (S, parameter, ...)."""

    def __str__(self) -> str:
        kind, subject, *numbers = self.key if isinstance(self.key, tuple) else (self.key, "")
        contents = {
            "F": f"activations of micro-batch {numbers[0] if numbers else ''} for stage {subject}",
            "B": f"gradients of micro-batch {numbers[0] if numbers else ''} for stage {subject}",
            "E": f"activations of a batch of the evaluation for stage {subject}",
            "S": f"gradient of {subject}, which several stages have",
        }.get(str(kind), str(self.key))
        end = f"to rank {self.peer}" if self.direction == "send" else f"from rank {self.peer}"
        return f"{self.direction} of the {contents} {end}"


class P2PChannel:
    """Sends and receives of this rank with the other ranks of pp."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        """`dtype` is that of hidden states."""
        assert mesh.pp_forward is not None, "a single stage has no P2P channel"
        assert mesh.pp_backward is not None
        self.rank = mesh.pp_forward.rank()
        self.count = mesh.pp_forward.size()
        self.device = mesh.device
        self.dtype = dtype
        self._forward, self._backward = mesh.pp_forward, mesh.pp_backward
        self._announced: dict[int, deque[tuple[Hashable, list[TensorSpec]]]] = {}
        self._receiving: dict[Hashable, list[tuple[dist.Work, Tensor]]] = {}
        self._local: dict[Hashable, list[Tensor]] = {}
        self._sending: deque[tuple[dist.Work, Tensor, PendingMessage]] = deque()
        self.on_wait: Callable[[PendingMessage | None], object] = lambda message: None
        """Called with the message before this rank waits for it, and with None afterwards."""

    def connect(self, peers: Iterable[tuple[int, int]]) -> None:
        """Create the communicators of the pairs of pp ranks that will speak, of both directions. Collective over pp.

        On NCCL the first message between two ranks blocks the host until both are there. In a schedule's first step one
        of them may wait for the other in something else; here all ranks go through the pairs in one order.
        """
        element = torch.zeros(1, dtype=self.dtype, device=self.device)
        for low, high in sorted({(min(pair), max(pair)) for pair in peers}):
            for source, to in ((low, high), (high, low)):
                if low == high or self.rank not in (source, to):
                    continue
                operation, peer = (dist.isend, to) if self.rank == source else (dist.irecv, source)
                self._start(operation, element, peer, to).wait()

    def expect_recv(self, source: int, key: Hashable, tensors: list[TensorSpec]) -> None:
        """Announce the next message that rank `source` will send here, in the order of its sends."""
        self._announced.setdefault(source, deque()).append((key, tensors))

    def send(self, to: int, key: Hashable, tensors: list[Tensor]) -> None:
        """Start sending; the tensors must not change until `wait_sends`."""
        if to == self.rank:
            self._local[key] = tensors
            return
        for tensor in tensors:
            contiguous = tensor.contiguous()
            message = PendingMessage("send", self._global_rank(to), key)
            self._sending.append((self._start(dist.isend, contiguous, to, to), contiguous, message))

    def post_recv(self, source: int, key: Hashable) -> None:
        """Post receives of every announced message from `source` up to `key`."""
        if source == self.rank or key in self._receiving:
            return
        announced = self._announced[source]
        while key not in self._receiving:
            assert announced, f"message {key} from rank {source} was never announced"
            next_key, tensors = announced.popleft()
            buffers = [
                torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in tensors
            ]
            self._receiving[next_key] = [
                (self._start(dist.irecv, buffer, source, self.rank), buffer) for buffer in buffers
            ]

    def recv(self, source: int, key: Hashable) -> list[Tensor]:
        """Wait for the message `key` and return its tensors."""
        if source == self.rank:
            return self._local.pop(key)
        self.post_recv(source, key)
        received = []
        self.on_wait(PendingMessage("receive", self._global_rank(source), key))
        for work, buffer in self._receiving.pop(key):
            work.wait()
            received.append(buffer)
        self.on_wait(None)
        return received

    def wait_sends(self, keep: int = 0) -> None:
        """Wait until all but the newest `keep` sends have completed."""
        while len(self._sending) > keep:
            work, _, message = self._sending.popleft()
            self.on_wait(message)
            work.wait()
        self.on_wait(None)

    def is_drained(self) -> bool:
        """Return whether every announced message was received."""
        return not self._receiving and not self._local and not any(self._announced.values())

    def _start(
        self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int, to: int
    ) -> dist.Work:
        source = self.rank if to == peer else peer
        group = self._forward if source < to else self._backward
        work = operation(tensor, self._global_rank(peer), group=group)
        assert work is not None
        return work

    def _global_rank(self, peer: int) -> int:
        return dist.get_global_rank(self._forward, peer)

"""In-memory checkpoints: the last state in the memory of this machine and of the next, where it outlives processes.

Each rank keeps its shards as they are in files on a file system in memory (/dev/shm): two slots in turn, so that one is
complete while the other is written. With several machines a rank also keeps a copy of its partner's shards, the rank at
the same place on the previous machine. Such a checkpoint can only be loaded by the same number of ranks with the same
layout; otherwise a run resumes from disk.
"""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xscale.checkpoint.disk import HASH, hash_file, new_hash
from xscale.checkpoint.planner import Box, copy_box, local_shards, outline
from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.file_safety import (
    check_private_folder,
    decode_json,
    make_private_folder,
    remove_file,
    remove_folder,
)
from xscale.core.files.run_files import open_run_file, read_run_file
from xscale.mesh.consensus import Consensus
from xscale.mesh.flat_shard import FlatShard

ALIGNMENT = 64
CHUNK_BYTES = 64 << 20
"""Size of the messages between machines."""


@dataclass(frozen=True)
class ShardHeader:
    """Description of the file with one rank's shards; written after the file, so that only a complete file has one."""

    owner: int
    step: int
    world: int
    size: int
    hash: str
    """Hash of the content, by the function disk.HASH."""
    outline: str
    """Hash of names, shapes, offsets and dtypes: identifies the owner's layout."""
    state: dict[str, Any]


@dataclass(frozen=True)
class InMemoryState:
    """Trainer state of an in-memory checkpoint that was loaded."""

    step: int
    state: dict[str, Any]


class InMemoryCheckpoint:
    """This rank's files. Every method but `copy` and `clear` is collective over `ranks`."""

    def __init__(self, folder: Path, ranks: Consensus, local_world: int) -> None:
        """`folder`: of this run on this machine. `local_world`: consecutive ranks on each machine."""
        self.folder, self.ranks = folder, ranks
        self._partner_distance = local_world if ranks.world > local_world else 0
        self._slot = 0
        self._buffers: dict[Path, Tensor] = {}
        self._registered: set[Path] = set()
        """Files whose buffers' pages are locked for the GPU."""
        self._copy_events: list[torch.cuda.Event] = []

    def copy(self, tensors: Mapping[str, Tensor | Box | FlatShard]) -> None:
        """Copy this rank's shards to the current slot; the tensors may change afterwards. OSError: memory is full.

        Copies from a GPU are queued on the current stream, before the step that changes the tensors.
        """
        shards, file = local_shards(tensors), self._file(self.ranks.rank)
        buffer = self._buffer(file, _size(shards))
        offsets = _offsets(shards)
        devices = {local.device for local, _ in offsets if local.is_cuda}
        if devices:
            self._register(file, buffer)
        for local, offset in offsets:
            target = buffer[offset : offset + local.nbytes].view(local.dtype).view(local.shape)
            if local.is_cuda:
                target.copy_(local, non_blocking=True)
            else:
                copy_box(target, local)
        self._copy_events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def commit(
        self, step: int, tensors: Mapping[str, Tensor | Box | FlatShard], state: dict[str, Any]
    ) -> Path:
        """Hash what `copy` copied, send it to the partner, and make it the newest checkpoint; may run in a thread.

        CheckpointError on every rank when one fails; the previous checkpoint stays valid then.
        """
        shards, rank = local_shards(tensors), self.ranks.rank
        file = self._file(rank)

        def seal() -> None:
            for event in self._copy_events:
                event.synchronize()
            buffer = self._buffers[file]
            header = ShardHeader(
                rank, step, self.ranks.world, buffer.numel(), _hash(buffer), _outline(shards), state
            )
            headers = [(file, header)]
            if self._partner_distance:
                headers.append(self._swap_with_partners(header, buffer))
            for path, described in headers:
                write_atomically(path.with_suffix(".json"), json.dumps(asdict(described)))

        self.ranks.on_all(self.folder, seal)
        self._slot = 1 - self._slot
        return self.folder

    def restore(
        self, tensors: Mapping[str, Tensor | FlatShard], newer_than: int
    ) -> tuple[InMemoryState | None, list[str]]:
        """Fill `tensors` from the newest checkpoint with all ranks' shards, if it is newer than step `newer_than`.

        Also returns messages on checkpoints that could not be used.
        """
        shards, rank = local_shards(tensors), self.ranks.rank
        offers = self.ranks.on_all(self.folder, self._headers)
        outlines = self.ranks.on_all(self.folder, lambda: _outline(shards))
        if not (newest := _newest_common_step(offers, outlines, newer_than)):
            stale = max(
                (
                    header.step
                    for headers in offers
                    for header in headers
                    if header.step > newer_than
                ),
                default=None,
            )
            if stale is None:
                return None, []
            return None, [
                f"{self.folder}: the in-memory checkpoint of step {stale} is incomplete or of another layout"
            ]
        step, holders = newest
        for owner, holder in enumerate(holders):
            if owner != holder and rank in (owner, holder):
                self._hand_over(step, owner, holder)
        intact = self.ranks.on_all(self.folder, lambda: self._is_intact(step))
        if not all(intact):
            bad = ", ".join(str(rank) for rank, is_intact in enumerate(intact) if not is_intact)
            return None, [
                f"{self.folder}: the in-memory shards of rank {bad} are damaged (their hash differs)"
            ]
        file, header = self._own_file(step)
        buffer = _memory_map(file, header.size)
        for local, offset in _offsets(shards):
            local.copy_(buffer[offset : offset + local.nbytes].view(local.dtype).view(local.shape))
        # The other slot is written next; the one just read stays until that one is complete.
        self._slot = 1 - int(file.name.split(".")[1])
        return InMemoryState(step, header.state), []

    def clear(self) -> None:
        """Delete this machine's files, for a run whose state is on disk."""
        for file in list(self._buffers):
            self._release(file)
        remove_folder(self.folder.parent, self.folder.name)

    def _file(self, owner: int) -> Path:
        """The file of the current slot; a partner's has another name, lest machines that share a folder collide."""
        whose = "rank" if owner == self.ranks.rank else "next"
        return self.folder / f"{whose}-{owner:05d}.{self._slot}.bytes"

    def _buffer(self, file: Path, size: int) -> Tensor:
        """Map the file, grown to `size` bytes; its header is deleted, which makes it invalid until it is sealed."""
        make_private_folder(self.folder)
        remove_file(file.parent, file.with_suffix(".json").name)
        if (buffer := self._buffers.get(file)) is not None and buffer.numel() == size:
            return buffer
        self._release(file)
        # A symbolic link here would overwrite what it points to.
        handle = os.open(
            file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
        )
        try:
            os.ftruncate(handle, size)
            if size:
                # Missing memory would otherwise be a signal (SIGBUS), not an error.
                os.posix_fallocate(handle, 0, size)
        finally:
            os.close(handle)
        self._buffers[file] = _memory_map(file, size)
        return self._buffers[file]

    def _register(self, file: Path, buffer: Tensor) -> None:
        """Lock the pages of a buffer, once: otherwise the host waits for each copy from a GPU."""
        if file in self._registered:
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if status := int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)):
            raise OSError(
                errno.ENOMEM, f"its pages cannot be locked (CUDA error {status})", str(file)
            )
        self._registered.add(file)

    def _release(self, file: Path) -> None:
        """Forget the buffer of a file, if there is one."""
        buffer = self._buffers.pop(file, None)
        if buffer is not None and file in self._registered:
            self._registered.discard(file)
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]

    def _swap_with_partners(self, header: ShardHeader, buffer: Tensor) -> tuple[Path, ShardHeader]:
        """Send this rank's shards to the next machine; receive those of the previous one: their file and header."""
        world, rank = self.ranks.world, self.ranks.rank
        target, source = (
            (rank + self._partner_distance) % world,
            (rank - self._partner_distance) % world,
        )
        text = json.dumps(asdict(header)).encode()
        sizes = torch.tensor([len(text), buffer.numel()])
        incoming = torch.zeros_like(sizes)
        self._send_receive(sizes, target, incoming, source)
        incoming_text = torch.zeros(int(incoming[0]), dtype=torch.uint8)
        self._send_receive(
            torch.frombuffer(bytearray(text), dtype=torch.uint8), target, incoming_text, source
        )
        file = self._file(source)
        incoming_buffer = self._buffer(file, int(incoming[1]))
        self._send_receive(buffer, target, incoming_buffer, source)
        return file, _decode_header(bytes(incoming_text.tolist()))

    def _send_receive(self, sent: Tensor, target: int, received: Tensor, source: int) -> None:
        works = []
        stride = CHUNK_BYTES if sent.dtype == torch.uint8 else sent.numel()
        for start in range(0, max(sent.numel(), received.numel()), stride):
            if start < sent.numel():
                works.append(
                    dist.isend(
                        sent[start : start + CHUNK_BYTES], group=self.ranks.group, group_dst=target
                    )
                )
            if start < received.numel():
                chunk = received[start : start + CHUNK_BYTES]
                works.append(dist.irecv(chunk, group=self.ranks.group, group_src=source))
        for work in works:
            assert work is not None
            work.wait()

    def _hand_over(self, step: int, owner: int, holder: int) -> None:
        """Send the shards of `owner`, which lost them, from `holder`, which has a copy."""
        group = self.ranks.group
        if self.ranks.rank == holder:
            file, header = next(
                item for item in self._files() if (item[1].owner, item[1].step) == (owner, step)
            )
            text = json.dumps(asdict(header)).encode()
            dist.send(torch.tensor([header.size, len(text)]), group=group, group_dst=owner)
            dist.send(
                torch.frombuffer(bytearray(text), dtype=torch.uint8), group=group, group_dst=owner
            )
            for chunk in _chunks(_memory_map(file, header.size)):
                dist.send(chunk, group=group, group_dst=owner)
            return
        sizes = torch.zeros(2, dtype=torch.long)
        dist.recv(sizes, group=group, group_src=holder)
        incoming_text = torch.zeros(int(sizes[1]), dtype=torch.uint8)
        dist.recv(incoming_text, group=group, group_src=holder)
        file = self._file(owner)
        for chunk in _chunks(self._buffer(file, int(sizes[0]))):
            dist.recv(chunk, group=group, group_src=holder)
        write_atomically(file.with_suffix(".json"), bytes(incoming_text.tolist()))

    def _files(self) -> list[tuple[Path, ShardHeader]]:
        """List the complete files on this machine, of any rank."""
        files = []
        try:
            check_private_folder(self.folder)
        except OSError:
            # Somebody else may have put another state there: treated as missing, and refused by the next save.
            return []
        for path in sorted(self.folder.glob("*.json")):
            file = path.with_suffix(".bytes")
            try:
                header = _decode_header(read_run_file(path))
                with open_run_file(file) as stream:
                    size = os.fstat(stream.fileno()).st_size
            except (OSError, ValueError):
                # Written by another version, or incomplete: treated as missing.
                continue
            if size == header.size:
                files.append((file, header))
        return files

    def _headers(self) -> list[ShardHeader]:
        return [header for _, header in self._files()]

    def _own_file(self, step: int) -> tuple[Path, ShardHeader]:
        rank = self.ranks.rank
        files = [item for item in self._files() if (item[1].owner, item[1].step) == (rank, step)]
        return max(files, key=lambda item: item[0].name)

    def _is_intact(self, step: int) -> bool:
        file, header = self._own_file(step)
        return hash_file(file).value == header.hash


def _decode_header(content: bytes) -> ShardHeader:
    """Decode the header of a file; ValueError when it is none."""
    data = decode_json(content, unique=True)
    try:
        header = ShardHeader(**data)
    except TypeError:
        raise ValueError("it has other fields") from None
    counts = (header.owner, header.step, header.world, header.size)
    texts = (header.hash, header.outline)
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts) or not isinstance(
        header.state, dict
    ):
        raise ValueError("its counts are none")
    if not all(isinstance(text, str) for text in texts) or header.owner >= header.world:
        raise ValueError("it has no owner or no hash")
    if header.state.get("step", header.step) != header.step:
        raise ValueError("its state is of another step")
    return header


def _newest_common_step(
    offers: list[list[ShardHeader]], outlines: list[str], newer_than: int
) -> tuple[int, list[int]] | None:
    """The newest step with every rank's shards, and for each rank the rank that has them: itself where possible."""
    world = len(offers)
    holders: dict[int, dict[int, list[int]]] = {}
    for rank, headers in enumerate(offers):
        for header in headers:
            if (
                header.world == world
                and header.step > newer_than
                and header.outline == outlines[header.owner]
            ):
                holders.setdefault(header.step, {}).setdefault(header.owner, []).append(rank)
    complete = [step for step, by_owner in holders.items() if len(by_owner) == world]
    if not complete:
        return None
    by_owner = holders[max(complete)]
    return max(complete), [
        owner if owner in by_owner[owner] else by_owner[owner][0] for owner in range(world)
    ]


def _offsets(shards: Mapping[str, Box | FlatShard]) -> list[tuple[Tensor, int]]:
    """Each local tensor and its offset in the file."""
    offsets, offset = [], 0
    for name in sorted(shards):
        offsets.append((shards[name].local, offset))
        offset += -(-shards[name].local.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets


def _size(shards: Mapping[str, Box | FlatShard]) -> int:
    return (
        sum(-(-shard.local.nbytes // ALIGNMENT) * ALIGNMENT for shard in shards.values())
        + ALIGNMENT
    )


def _hash(buffer: Tensor) -> str:
    hashing = new_hash(HASH)
    for chunk in _chunks(buffer):
        hashing.update(chunk.numpy().data)
    return hashing.hexdigest()


def _outline(shards: Mapping[str, Box | FlatShard]) -> str:
    return hashlib.sha256(repr(sorted(outline(shards).items())).encode()).hexdigest()


def _chunks(buffer: Tensor) -> list[Tensor]:
    return [buffer[start : start + CHUNK_BYTES] for start in range(0, buffer.numel(), CHUNK_BYTES)]


def _memory_map(file: Path, size: int) -> Tensor:
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)

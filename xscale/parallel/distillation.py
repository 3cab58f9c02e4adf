"""Distillation over ranks: the states that stages and shards of a student are compared in, and a teacher's peers.

A teacher may have more tensor parallelism than its student. The ranks of one of its tp groups then read different
samples, and it runs on the micro-batch of each of them in turn, so that tokens meet those of their micro-batch alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from xscale.mesh.axes import Degrees
from xscale.mesh.collectives import all_gather
from xscale.mesh.mesh import Mesh
from xscale.nn.attention.ops.dense import grouped_matmul, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.head.distillation import attention_scores
from xscale.nn.tokens import Tokens
from xscale.parallel.config import ParallelConfig
from xscale.parallel.context.mask import ShardedAttentionMask
from xscale.parallel.shard.region import TensorRegion
from xscale.parallel.shard.sharding import dense_mesh
from xscale.parallel.tensor.sequence import GatherSequence


def sequence_gather(
    mesh: Mesh, config: ParallelConfig
) -> Callable[[Tensor, Tokens], Tensor] | None:
    """Return what gathers states between the blocks, [B, T/R, D] -> [B, T, D]; None without sequence parallelism."""
    if mesh.degrees.tp == 1 or not config.tensor.sequence:
        return None
    return GatherSequence(TensorRegion(dense_mesh(mesh, config)["tp"].get_group(), sequence=True))


def scores_of_shard(q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
    """Return the scores [B, H, P, T] of a rank's queries [B, H, P, K] and all keys, whose shards are [B, G, P, K].

    `xscale.nn.head.distillation.attention_scores` of a sequence that is sharded over cp.
    """
    if not isinstance(mask, ShardedAttentionMask):
        return attention_scores(q, k, mask)
    keys = _gather(k, mask)  # [B, G, T, K]
    if mask.pairs is not None:
        # The terms of the position are of distances between indices, which are those of the full sequence.
        full = attention_scores(
            _gather(q, mask), keys, mask.full(0, q.shape[1], lambda position, plain: False)
        )
        return mask.sharding.shard(full.transpose(1, 2)).transpose(1, 2)  # [B, H, P, T]
    scores: Tensor = upcast(grouped_matmul(q, keys.mT)) * q.shape[-1] ** -0.5
    bias = mask.bias_of(mask.query_shard.positions, mask.key_shard.full.positions)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    allowed = mask.allowed_of_shard()
    return scores if allowed is None else scores.masked_fill(~allowed.to(q.device), 0.0)


def _gather(x: Tensor, mask: ShardedAttentionMask) -> Tensor:
    """Gather queries or keys [B, H, P, K] of a sequence with itself to [B, H, T, K]."""
    length = mask.key_shard.length
    gathered = mask.sharding.gather(x.transpose(1, 2).flatten(2), length)  # [B, T, H * K]
    return gathered.view(len(x), length, x.shape[1], x.shape[3]).transpose(1, 2)


@dataclass(frozen=True)
class TeacherRanks:
    """The ranks of this rank's tp group of the teacher, and the micro-batches that they read."""

    group: dist.ProcessGroup | None = None
    """The group; None: this rank alone."""
    readers: tuple[int, ...] = (0,)
    """For each micro-batch that is read in the group, the first rank of the group that reads it."""
    turn: int = 0
    """This rank's micro-batch among these."""
    heads: tuple[int, int] | None = None
    """Index and number of this rank's shards of the student's heads, which are not those that it has of the teacher;
    None: they are."""

    def micro_batches(self, tokens: Tokens) -> list[Tokens]:
        """Return the tokens of each micro-batch of the group, which are of equal shapes. Collective over the group."""
        if self.group is None or len(self.readers) == 1:
            return [tokens]
        group = self.group
        gathered = tokens.map_tensors(lambda tensor: all_gather(tensor[None], 0, group))

        def of(reader: int) -> Tokens:
            return gathered.map_tensors(lambda tensor: tensor[reader])

        return [
            replace(of(reader), shared_values=type(tokens.shared_values)())
            for reader in self.readers
        ]

    def own_heads(self, scores: Tensor) -> Tensor:
        """Attention scores [B, H/R, T, T] of the teacher's heads -> those of the student's heads on this rank."""
        if self.heads is None:
            return scores
        full = scores if self.group is None else all_gather(scores, 1, self.group)  # [B, H, T, T]
        return full.chunk(self.heads[1], 1)[self.heads[0]]


def teacher_ranks(mesh: Mesh, of_teacher: Mesh) -> TeacherRanks:
    """Return the ranks that run the teacher together with this one. `mesh` is that of the student."""
    rank, student = mesh.rank_info.rank, mesh.degrees
    together = _tp_group(of_teacher.degrees, rank)
    same_heads = together == _tp_group(student, rank)
    readers = readers_of(student, together)
    heads = None if same_heads else (student.coordinate(rank, "tp"), student.tp)
    if len(together) == 1:
        return TeacherRanks(heads=heads)
    assert of_teacher.dense is not None
    turn = list(readers).index(student.data_rank(rank))
    return TeacherRanks(of_teacher.dense["tp"].get_group(), tuple(readers.values()), turn, heads)


def readers_of(student: Degrees, group: Sequence[int]) -> dict[int, int]:
    """Return the micro-batches on which a tp group of the teacher runs: data rank of the student -> index in the group
    of the first rank that reads it."""
    readers: dict[int, int] = {}
    for index, rank in enumerate(group):
        readers.setdefault(student.data_rank(rank), index)
    return readers


def _tp_group(degrees: Degrees, rank: int) -> list[int]:
    return next(group for group in degrees.groups_along("tp") if rank in group)


def runs_in_one_stage(student: Degrees, of_teacher: Degrees, *, sharded: bool) -> bool:
    """Whether the ranks that run a teacher together are always of one pipeline stage of the student, and so run it at
    the same time. `sharded`: whether its parameters are sharded over dp_shard."""
    groups = of_teacher.groups_along("tp") + (
        of_teacher.groups_along("dp_shard") if sharded else []
    )
    return all(len({student.coordinate(rank, "pp") for rank in group}) == 1 for group in groups)


def runs_equally_often(student: Degrees, of_teacher: Degrees) -> bool:
    """Whether all tp groups of a teacher run it on equally many micro-batches."""
    return len({len(readers_of(student, group)) for group in of_teacher.groups_along("tp")}) == 1

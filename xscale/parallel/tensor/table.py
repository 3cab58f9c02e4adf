"""Table `TENSOR`: what tensor parallelism does at a seam, by its role, and the substitutes that it puts there.

In a region each rank has some of the heads, or of the hidden units, of every token. So what is a function of one head
needs nothing; a sum over heads is all-reduced, a norm over the channels of all heads gathers them, and what depends on
the index of a head is told the first one of this rank. Outside regions every rank has all channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from xscale.mesh.differentiable_collectives import copy_in, gather_in, gather_out, sum_out
from xscale.nn.head.head import Head
from xscale.nn.linear import Embedding, Linear
from xscale.nn.module import substitute
from xscale.nn.norm.norm import Norm
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens
from xscale.parallel.expert import SplitRowsOverTp
from xscale.parallel.layout_invariant_random import HiddenOverTensor, draw_for_all_heads
from xscale.parallel.roles import RoleTable, wrap_by
from xscale.parallel.shard.region import TensorRegion, all_reduce_replicated_grads, wrap_region
from xscale.parallel.shard.sharding import holds_experts, shard_dim
from xscale.parallel.tensor.vocabulary import (
    ShardTokenRows,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)


@dataclass(frozen=True)
class NormOverHeads:
    """Norm over the channels of all heads, or all hidden ones, which are sharded over tp: gathers them, and takes this
    rank's back."""

    norm: Callable[[Norm, Tensor], Tensor]
    """Normalises all channels."""
    region: TensorRegion

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        """[B, T, H/R * K] -> the same shape."""
        local = x.shape[-1]
        full = gather_in(x.mT, local * self.region.count, self.region.group).mT  # [B, T, H * K]
        return self.norm(norm, full).narrow(-1, self.region.rank * local, local)


@dataclass(frozen=True)
class SumOverHeads:
    """Sum over all heads, which are sharded over tp: each rank has the whole sum, and uses it in its own way."""

    sum_local_heads: Callable[[Tensor], Tensor]
    region: TensorRegion

    def __call__(self, terms: Tensor) -> Tensor:
        """Terms of this rank's heads -> their sum over the heads of all ranks."""
        return copy_in(sum_out(self.sum_local_heads(terms), self.region.group), self.region.group)


def _wrap_region(module: Any, seam: str, region: TensorRegion) -> None:
    """All-gather or copy its input in, all-reduce or reduce-scatter its output; sum replicated weights' gradients."""
    part = getattr(module, seam)
    wrap_region(part, region, regather=region.regathers(module.path))
    all_reduce_replicated_grads(part, region)


def _in_region(module: nn.Module, seam: str, region: TensorRegion) -> None:
    """All-reduce the gradients of the submodule at `seam`, of which each rank computes a part; None: there is none."""
    part = getattr(module, seam)
    if part is not None:
        all_reduce_replicated_grads(part, region)


def _first_head(mixer: Any, seam: str, region: TensorRegion) -> None:
    """Tell it the index of this rank's first head, and draw for all heads what it draws for its own."""
    substitute(mixer, seam, region.first_of(mixer.heads))
    draw_for_all_heads(mixer)


def _first_hidden(module: Any, seam: str, region: TensorRegion) -> None:
    """Tell it the index of this rank's first hidden unit, and draw for all units what it draws for its own."""
    if holds_experts(module) and region.experts_replicated:
        return
    first, hidden = region.first_of(module.hidden_units), module.hidden_units
    substitute(module, seam, first)
    substitute(module, "random", HiddenOverTensor(module.random, first, hidden))


def _kv_projection(attention: Any, seam: str, region: TensorRegion) -> None:
    """With fewer kv_heads than ranks the projection is replicated, and a rank uses the rows of one head."""
    if attention.kv_heads < region.count:
        head = region.first_of(attention.kv_heads)
        _use_rows(getattr(attention, seam), head * attention.head_width, attention.head_width)


def _use_rows(linear: Linear, first: int, rows: int) -> None:
    """Use only some rows of a replicated projection."""
    inner = linear.param_hook
    assert inner is not None
    substitute(linear, "param_hook", lambda parameter: inner(parameter).narrow(0, first, rows))


def _head_bias(attention: Any, seam: str, region: TensorRegion) -> None:
    """A position with parameters has those of this rank's heads; one without knows the bias of all heads alone."""
    position = getattr(attention, seam)
    if position is None or not position.adds_bias or any(True for _ in position.parameters()):
        return
    full_bias, first, count = (
        position.bias,
        region.first_of(attention.heads),
        attention.heads // region.count,
    )

    def bias(queries: Tensor, keys: Tensor) -> Tensor | None:
        value = full_bias(queries, keys)
        return None if value is None else value[:, first : first + count]

    substitute(position, "bias", bias)


def _loss_fraction(module: nn.Module, seam: str, region: TensorRegion) -> None:
    """Each rank computes the full loss, and the gradients that leave the region are summed."""
    substitute(module, seam, getattr(module, seam) / region.count)


def _dispatch(mixture: nn.Module, seam: str, region: TensorRegion) -> None:
    """Each rank dispatches a slice of the rows, which all have, unless tp shards the experts."""
    if region.experts_replicated:
        substitute(mixture, seam, SplitRowsOverTp(getattr(mixture, seam), region.group))


def _first_row(table: Tensor, region: TensorRegion) -> int:
    """Return the token id of this rank's first row of a vocabulary-parallel table."""
    assert shard_dim(table, "tp") == 0
    return region.rank * -(-table.shape[0] // region.count)


def _lookup(embedding: Embedding, seam: str, region: TensorRegion) -> None:
    """Each rank looks up the ids of its rows of the table, and the sum over ranks has all."""
    substitute(
        embedding, seam, VocabParallelEmbedding(region, _first_row(embedding.weight, region))
    )


def _unpadded(head: Head) -> int:
    return head.weight.shape[0] if head.unpadded_vocabulary is None else head.unpadded_vocabulary


def _vocabulary_rows(head: Head, seam: str, region: TensorRegion) -> None:
    """Each rank leaves out the padding among its rows of the vocabulary."""
    substitute(head, seam, ShardTokenRows(_first_row(head.weight, region), _unpadded(head)))


def _vocabulary_loss(head: Head, seam: str, region: TensorRegion) -> None:
    """Make the head a region, whose logits each rank has of its rows of the vocabulary."""
    vocabulary = head.weight.shape[0]
    kernel = head.kernel_choices.get("vocab_cross_entropy")
    first = _first_row(head.weight, region)
    unpadded = _unpadded(head)
    substitute(
        head, seam, VocabParallelCrossEntropy(region, first, unpadded, kernel, head.soft_cap)
    )

    def enter(_: nn.Module, inputs: tuple[Tensor, Tensor | None, Tokens]) -> tuple[Any, ...]:
        x, targets, tokens = inputs
        assert tokens is not None, "a vocabulary-parallel head needs its tokens"
        return region.enter(x, tokens), targets, tokens

    def leave(_: nn.Module, inputs: tuple[Tensor, Tensor | None, Tokens], out: Tensor) -> Tensor:
        return gather_out(out, vocabulary, region.group) if inputs[1] is None else out

    head.register_forward_pre_hook(enter)
    head.register_forward_hook(leave)


TENSOR: RoleTable = {
    Role.REGION: _wrap_region,
    Role.IN_REGION: _in_region,
    Role.FIRST_HEAD: _first_head,
    Role.FIRST_HIDDEN: _first_hidden,
    Role.KV_PROJECTION: _kv_projection,
    Role.HEAD_BIAS: _head_bias,
    Role.NORM_OVER_HEADS: wrap_by(NormOverHeads),
    Role.SUM_OVER_HEADS: wrap_by(SumOverHeads),
    Role.LOSS_FRACTION: _loss_fraction,
    Role.DISPATCH: _dispatch,
    Role.VOCABULARY_LOOKUP: _lookup,
    Role.VOCABULARY_LOSS: _vocabulary_loss,
    Role.VOCABULARY_ROWS: _vocabulary_rows,
}
"""Role -> what is done at a seam with it, called as (module, seam, region)."""

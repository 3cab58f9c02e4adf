"""Sequence parallelism (Korthikanti et al. 2022): activations between tp's regions are sharded along the sequence.

Norms, dropout and the residual stream work on the shard. Dropout masks are drawn for the full sequence and sliced, so
they equal those of a single process. A sequence that tp does not divide is padded at its end; regions never see the
padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from xscale.core.errors import Problem
from xscale.core.requirements import change, instead, take
from xscale.mesh.differentiable_collectives import gather_out, slice_in
from xscale.nn.blocks.stack import Stack
from xscale.nn.module import Module, substitute
from xscale.nn.norm.norm import NORMS
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens
from xscale.parallel.layout_invariant_random import TokensOverTensor
from xscale.parallel.roles import RoleTable, norms_between_regions, wrap_by
from xscale.parallel.shard.region import TensorRegion, all_reduce_replicated_grads


def check(model: nn.Module, path: str) -> list[Problem]:
    """Return what reads all tokens of the sequence between regions."""
    problems = {}
    for stack in [module for module in model.modules() if isinstance(module, Stack)]:
        keys = [key for part in stack.passes() if (key := part.reads_full_sequence()) is not None]
        if keys:
            named = " and ".join(f"stack.{key}" for key in keys)
            reads = "reads" if len(keys) == 1 else "read"
            what = f"{named} {reads} the tokens between the blocks, of which each rank would have a shard"
            choices = take(False)
            for without in (None, False):
                choices += change(*[(f"model.stack.{key}", without) for key in keys])
            problems[named] = Problem(path, what, choices=choices)
    for module in model.modules():
        if isinstance(module, Module):
            problems |= {problem.what: problem for problem in module.sp_problems(path)}
    for norm in norms_between_regions(model):
        kind = norm.Config.kind
        assert kind is not None
        traits = NORMS.get(kind).traits
        if traits.batch_statistics or not traits.per_token:
            what = f"norm '{kind}' reads all tokens of the batch, and each rank would have a shard of the sequence"
            choices = take(False) + instead(
                "norm", kind, NORMS.able(per_token=True, batch_statistics=False)
            )
            problems[kind] = Problem(path, what, choices=choices)
    return list(problems.values())


def _between_regions(module: nn.Module, seam: str, region: TensorRegion) -> None:
    """All-reduce the gradients of a submodule that each rank uses for its own tokens; None: there is none."""
    part = getattr(module, seam)
    if part is not None:
        all_reduce_replicated_grads(part, region)


def _parameters_between_regions(module: nn.Module, seam: str, region: TensorRegion) -> None:
    """All-reduce the gradients of the parameters, which each rank uses for its own tokens."""
    all_reduce_replicated_grads(module, region)


def _block_position(block: nn.Module, seam: str, region: TensorRegion) -> None:
    """Adds the encodings of this rank's tokens; the gradients of its parameters are all-reduced."""
    position = getattr(block, seam)
    if position is not None:
        substitute(position, "embed", EmbedOwnTokens(position.embed, region))
        all_reduce_replicated_grads(position, region)


def _shard_of_tokens(module: nn.Module, seam: str, region: TensorRegion) -> None:
    """Cuts this rank's shard out of values that all ranks have of all tokens."""
    substitute(module, seam, region.shard)


def _replicated_input(module: nn.Module, seam: str, region: TensorRegion) -> None:
    """Gathers the hidden states of all tokens, of which each rank has a shard."""
    substitute(module, seam, GatherSequence(region))


@dataclass(frozen=True)
class EmbedOwnTokens:
    """Adds a block's position encodings to the tokens of this rank's shard."""

    inner: Callable[[Tensor, Tokens], Tensor]
    """Adds those of all tokens, by their positions alone."""
    region: TensorRegion

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [B, T/R, D], tokens of the full sequence -> [B, T/R, D]."""
        return self.inner(x, self.region.shard_tokens(tokens))


@dataclass(frozen=True)
class ShardEmbeddings:
    """Embeddings of the full sequence, of which each rank of tp keeps a shard."""

    inner: Callable[..., Tensor]
    """Looks up all of them."""
    region: TensorRegion

    def __call__(self, *inputs: Any) -> Tensor:
        """Embeddings [B, T, D] of `inputs` -> [B, T/R, D]."""
        return slice_in(self.inner(*inputs), self.region.group)


@dataclass(frozen=True)
class GatherSequence:
    """Hidden states of the full sequence, for a replicated head or loss; each rank has its own shard's gradient."""

    region: TensorRegion

    def __call__(self, x: Tensor, tokens: Tokens | None) -> Tensor:
        """[B, T/R, D] -> [B, T, D]."""
        assert tokens is not None, "a shard does not tell the length of its sequence"
        padded = x.shape[1] * self.region.count
        return gather_out(x.mT, padded, self.region.group).mT[:, : tokens.ids.shape[1]]


SEQUENCE: RoleTable = {
    Role.EMBEDDING: wrap_by(ShardEmbeddings),
    Role.EMBEDDING_OF_IDS: wrap_by(ShardEmbeddings),
    Role.DRAWS_BETWEEN_REGIONS: wrap_by(TokensOverTensor),
    Role.BETWEEN_REGIONS: _between_regions,
    Role.PARAMETERS_BETWEEN_REGIONS: _parameters_between_regions,
    Role.BLOCK_POSITION: _block_position,
    Role.REPLICATED_INPUT: _replicated_input,
    Role.SHARD_OF_TOKENS: _shard_of_tokens,
}
"""Role -> what is done at a seam with it beside `tensor.table.TENSOR`, called as (module, seam, region)."""

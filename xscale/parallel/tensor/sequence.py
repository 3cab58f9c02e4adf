"""Sequence parallelism (Korthikanti et al. 2022): activations between tp's regions are sharded along the sequence.

Norms, dropout and the residual stream work on the shard. Dropout masks are drawn for the full sequence and sliced, so
they equal those of a single process. A sequence that tp does not divide is padded at its end; regions never see the
padding.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from xscale.core.errors import Problem
from xscale.mesh.collectives import slice_in
from xscale.nn.block import Block, Sublayer
from xscale.nn.exits import Exit
from xscale.nn.layer_mix import LayerMix
from xscale.nn.model.disentangled import Disentangled
from xscale.nn.model.embed import Embed
from xscale.nn.module import substitute
from xscale.nn.multi_token import MtpModule, MultiToken
from xscale.nn.norm import NORMS, Norm
from xscale.nn.stack import Stack
from xscale.nn.tokens import Tokens
from xscale.parallel.layout_invariant_random import TokensOverTensor
from xscale.parallel.region import TensorRegion, all_reduce_replicated_grads


def check(model: nn.Module, path: str) -> list[Problem]:
    """Return norms that need the full sequence."""
    problems = {}
    for stack in [module for module in model.modules() if isinstance(module, Stack)]:
        decodes = any(block.decoder_steps for block in stack.blocks.values())
        reading = {
            "block.gates": stack.gates is not None,
            "halting": stack.halting is not None,
            "step_signal": stack.step_signal,
            "mask_decoder": decodes,
            "pooling": stack.pooling is not None,
            "exits.self_sampling": stack.exits is not None and stack.exits.config.self_sampling is not None,
        }
        key = next((key for key, is_set in reading.items() if is_set), None)
        if key is not None:
            what = f"stack.{key} reads the tokens between the blocks, of which each rank would have a shard"
            problems[key] = Problem(path, what, f"Take false, or a stack without {key}.")
    if isinstance(model, Disentangled):
        what = "the first queries are positions of the full sequence, of which each rank would have a shard"
        problems["disentangled"] = Problem(path, what, "Take false, or model.kind=encoder_decoder.")
    for norm in norms_between_regions(model):
        kind = norm.Config.kind
        assert kind is not None
        traits = NORMS.get(kind).traits
        if traits.batch_statistics or not traits.per_token:
            what = f"norm '{kind}' reads all tokens of the batch, and each rank would have a shard of the sequence"
            can = ", ".join(NORMS.able(per_token=True, batch_statistics=False))
            problems[kind] = Problem(path, what, f"Take false, or one of these norms: {can}.")
    return list(problems.values())


def norms_between_regions(model: nn.Module) -> list[Norm]:
    """Return the norms that are applied between regions."""
    norms: list[Norm | None] = []
    for module in model.modules():
        if isinstance(module, Sublayer):
            norms += [module.norm, module.after]
        if isinstance(module, Stack | Exit):
            norms.append(module.norm)
        if isinstance(module, MtpModule):
            norms += [module.hidden_norm, module.embedding_norm]
    return [norm for norm in norms if norm is not None]


def apply(model: nn.Module, region: TensorRegion) -> None:
    """Shard the sequence after the embeddings; the regions of the head and of the sublayers all-gather it."""
    for module in model.modules():
        if isinstance(module, Embed):
            module.register_forward_hook(lambda _, __, x: slice_in(x, region.group))
        if isinstance(module, Sublayer):
            substitute(module, "random", TokensOverTensor(module.random, region))
            for gain in (module.alpha, module.omega):
                if gain is not None:
                    all_reduce_replicated_grads(gain, region)
        if isinstance(module, Block) and module.position is not None:
            substitute(module.position, "embed", EmbedOwnTokens(module.position.embed, region))
            all_reduce_replicated_grads(module.position, region)
        if isinstance(module, Stack) and module.position_tables is not None:
            all_reduce_replicated_grads(module.position_tables, region)
        if isinstance(module, LayerMix):
            all_reduce_replicated_grads(module, region)
        if isinstance(module, MtpModule):
            all_reduce_replicated_grads(module.project, region)
        if isinstance(module, MultiToken):
            substitute(module, "embed_ahead", ShardAhead(module.embed_ahead, region))
    for norm in norms_between_regions(model):
        all_reduce_replicated_grads(norm, region)


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
class ShardAhead:
    """Embeddings of tokens ahead, of which each rank of tp has a shard of the sequence."""

    inner: Callable[[nn.Module, Tensor], Tensor]
    """Looks up all of them."""
    region: TensorRegion

    def __call__(self, table: nn.Module, ids: Tensor) -> Tensor:
        """ids [B, T] -> [B, T/R, D]."""
        return slice_in(self.inner(table, ids), self.region.group)

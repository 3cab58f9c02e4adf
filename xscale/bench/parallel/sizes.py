"""The work of both sides: a small decoder, its batch, and the slice of the batch of a rank."""

from dataclasses import dataclass

import torch
from torch import Tensor

from xscale.core.errors import Problem
from xscale.nn.blocks.block import BlockConfig
from xscale.nn.blocks.stack import StackConfig
from xscale.nn.ffn.ffn import Ffn, Gated
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.mixer.attention import Attention
from xscale.nn.model.decoder import Decoder
from xscale.nn.position.learned import Learned
from xscale.nn.tokens import Tokens

SEED = 11
RANKS = 2


@dataclass(frozen=True)
class BenchBatch:
    """Sequences and their targets."""

    tokens: Tokens
    targets: Tensor
    """[B, T]."""
    source: None = None


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the model and of one step."""

    width: int = 256
    depth: int = 4
    length: int = 256
    """Sequence length."""
    sequences: int = 8
    """Sequences of a step, over both ranks."""
    vocabulary: int = 4096
    hidden: int = 704
    heads: int = 4
    experts: int = 8
    top_k: int = 2

    def check(self) -> list[Problem]:
        """Problems of sizes that do not divide over the ranks."""
        problems = []
        for option, value, divisor in (
            ("--width", self.width, self.heads),
            ("--depth", self.depth, RANKS),
            ("--length", self.length, 2 * RANKS),
            ("--sequences", self.sequences, 2 * RANKS),
        ):
            if value < divisor or value % divisor:
                problems.append(
                    Problem(
                        option,
                        f"{value} is not a multiple of {divisor}",
                        f"Take {divisor * 2}, or more.",
                    )
                )
        return problems

    def model(self, *, experts: bool) -> Decoder.Config:
        """Config of a decoder; with `experts` every FFN is a dropless MoE layer."""
        dense = Gated.Config(hidden=self.hidden)
        ffn: Ffn.Config = dense
        if experts:
            # The experts of a token together are as wide as the dense layer.
            ffn = Moe.Config(
                experts=self.experts, expert=Gated.Config(hidden=self.hidden // self.top_k)
            )
        block = BlockConfig(mixer=Attention.Config(heads=self.heads), ffn=ffn)
        stack = StackConfig(depth=self.depth, block=block)
        return Decoder.Config(width=self.width, tied=False, position=Learned.Config(), stack=stack)

    def batch(self) -> BenchBatch:
        """Batch of a step over all ranks."""
        generator = torch.Generator().manual_seed(SEED)
        ids = torch.randint(self.vocabulary, (self.sequences, self.length + 1), generator=generator)
        return BenchBatch(Tokens.from_ids(ids[:, :-1].contiguous()), ids[:, 1:].contiguous())

    @property
    def targets(self) -> int:
        """Target tokens of a step: the divisor of the summed loss."""
        return self.sequences * self.length


def batch_slice(batch: BenchBatch, part: int, parts: int) -> BenchBatch:
    """Slice `part` of `parts` equal slices of a batch, along the sequences."""
    ids, targets = batch.tokens.ids.chunk(parts)[part], batch.targets.chunk(parts)[part]
    return BenchBatch(Tokens.from_ids(ids), targets)

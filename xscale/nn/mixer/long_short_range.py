"""Wu et al. 2020, Lite Transformer: long-short range attention (LSRA), two mixers on half of the channels each.

    y = [attention(x_1..D/2); convolution(x_D/2+1..D)]

Attention has the global view, and a lightweight or dynamic convolution of the other half the local one. The branches
have projections of their own, so that the feed-forward part is the first to mix the halves.
"""

from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import kinds, take
from xscale.nn.dims import Dims
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.lightweight_conv import LightweightConv
from xscale.nn.mixer.local_mixer import LocalMixer
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS, Mixer, MixerSlot
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "long_short_range",
    traits=CAUSAL_OR_BIDIRECTIONAL,
)
class LongShortRange(Mixer):
    class Config(Mixer.Config):
        long_range: MixerSlot = Field(default=Attention.Config())
        """The attention mixer of the first half of the channels."""
        short_range: MixerSlot = Field(default=LightweightConv.Config())
        """The local mixer of the second half of the channels, such as lightweight_conv."""

        @property
        def heads(self) -> int:
            """Heads of the attention, for tables that the layers share."""
            heads: int = self.long_range.heads  # type: ignore[attr-defined]
            return heads

    shards_sequence = True

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        half = replace(dims, width=dims.width // 2)
        self.long_range: Mixer = MIXERS.build(config.long_range, half)
        self.short_range: Mixer = MIXERS.build(config.short_range, half)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if dims.width % 2:
            what = f"width={dims.width} has no two halves"
            problems.append(Problem("model.width", what, choices=take(dims.width + 1)))
        half = replace(dims, width=dims.width // 2)
        for name, kind in (("long_range", Attention), ("short_range", LocalMixer)):
            part = MIXERS.of(getattr(config, name)).part
            if issubclass(part, kind):
                problems += part.check(getattr(config, name), half, f"{path}.{name}")
                continue
            able = [entry.name for entry in MIXERS if issubclass(entry.part, kind)]
            what = f"'{getattr(config, name).kind}' is no mixer of this range"
            problems.append(Problem(f"{path}.{name}", what, choices=kinds(able, f"{path}.{name}")))
        return problems

    @classmethod
    def layer_tables(cls, config: Config, dims: Dims) -> list[tuple[Any, ...]]:
        half = replace(dims, width=dims.width // 2)
        tables: list[tuple[Any, ...]] = MIXERS.of(config.long_range).part.layer_tables(
            config.long_range, half
        )
        return tables

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        long, short = x.chunk(2, -1)
        return torch.cat((self.long_range(long, tokens), self.short_range(short, tokens)), -1)

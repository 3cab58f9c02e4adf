"""Ainslie et al. 2020 (ETC), section 3: attention from and to global tokens, which are linked to sentences.

Long tokens attend to long tokens nearby (l2l) and to the global tokens (l2g), global tokens to all (g2g, g2l). Each of
the four pieces may have its own keys and values.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from xscale.core.config import NonNegativeInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.core import CoreSlot
from xscale.nn.attention.etc import Etc
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import ACTS_INSIDE, BIDIRECTIONAL, MIXERS, RefusedPositions
from xscale.nn.mixer.without_padding import without_padding
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "etc",
    traits=BIDIRECTIONAL,
    deviations=(
        "Each global token of the model is learned; in the paper those of all sentences have one embedding.",
        "Global and long tokens share the ffn, as in the authors' defaults.",
    ),
)
class EtcAttention(Attention):
    class Config(Attention.Config):
        core: CoreSlot = Etc.Config(labels="structure", segment_length=32)
        """The core `etc`, which has the radius, the labels and the masks."""
        projections: Literal["shared", "sides", "pieces"] = "shared"
        """shared: one projection of queries, keys and values, the authors' default; sides: global queries have one of
        their own, and so have the keys and values that they see; pieces: besides, keys and values are others for each
        of l2l, l2g, g2g and g2l."""
        separate_output: bool = True
        """Whether global tokens have an output projection of their own, the authors' default."""
        sentence_end: NonNegativeInt | None = None
        """Token id that ends a sentence: a long token is linked to the global token with its sentence's number; null:
        by the core's segment_length."""

    cores = ("etc",)
    shards_sequence = False
    core: Etc

    refused_positions = RefusedPositions(
        ACTS_INSIDE, "acts inside attention, where ETC has labels for distances"
    )

    def __init__(self, config: Config, dims: Dims) -> None:
        assert isinstance(config.core, Etc.Config)
        super().__init__(config, dims)
        self.global_tokens = config.core.global_tokens
        self.projections = config.projections
        self.sentence_end = config.sentence_end
        inner = config.heads * self.head_width

        def projection() -> Linear:
            return Linear.from_width(dims, inner, "heads", bias=config.bias)

        if config.projections != "shared":
            self.global_q = projection()
            self.global_k = projection()
            self.global_v = projection()
        if config.projections == "pieces":
            self.l2g_k, self.l2g_v, self.g2g_k, self.g2g_v = (projection() for _ in range(4))
        self.global_o: Linear | None = None
        if config.separate_output:
            bias = self.o.bias is not None
            self.global_o = Linear.to_width(dims, inner, "heads", bias=bias)

    @classmethod
    def example(cls) -> Any:
        core = Etc.example().model_copy(
            update={"labels": "structure", "segment_length": 40, "hard_g2l": True}
        )
        return cls.Config(core=core, projections="pieces")

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        changes: dict[str, Any] = {"position": None}
        if config.sentence_end is not None and isinstance(config.core, Etc.Config):
            changes["core"] = config.core.model_copy(update={"segment_length": 1})
        problems = super().check(
            config.model_copy(update=changes), replace(dims, position=None), path
        )
        problems += cls._check_position_acts(config, dims, path)
        if config.projections == "shared":
            return problems
        why = f"is not defined for the separate projections of '{config.projections}'"
        return problems + cls.check_projections(
            config, path, why, take("shared", key=f"{path}.projections")
        )

    forward = without_padding(Attention.forward)

    def attend_input(
        self, x: Tensor, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Attend from long tokens with `q`, `k`, `v`, and from global tokens with their own projections, if any."""
        of_long = of_global = (q, k, v)
        count = min(self.global_tokens, x.shape[1])
        if self.projections != "shared":
            global_q = self._heads(self.global_q(x[:, :count]))
            if self.query_factor is not None:
                global_q = global_q * self.query_factor
            of_global = (global_q, self._heads(self.global_k(x)), self._heads(self.global_v(x)))
        if self.projections == "pieces":
            first, long_slice = x[:, :count], slice(count, None)
            of_long = (
                q,
                torch.cat((self._heads(self.l2g_k(first)), k[:, :, long_slice]), 2),
                torch.cat((self._heads(self.l2g_v(first)), v[:, :, long_slice]), 2),
            )
            of_global = (
                of_global[0],
                torch.cat((self._heads(self.g2g_k(first)), of_global[1][:, :, long_slice]), 2),
                torch.cat((self._heads(self.g2g_v(first)), of_global[2][:, :, long_slice]), 2),
            )
        return self.core.attend(of_long, of_global, mask, self._segments(tokens, mask, count))

    def project_output(self, o: Tensor) -> Tensor:
        if self.global_o is None:
            return super().project_output(o)
        count, heads = min(self.global_tokens, o.shape[2]), o.transpose(1, 2).flatten(2)
        return torch.cat((self.global_o(heads[:, :count]), self.o(heads[:, count:])), 1)

    def multiply_adds(self, queries: int, keys: int) -> float:
        count = min(self.global_tokens, queries)
        # Weights are counted once for each token, and these multiply global tokens only, or long tokens only.
        of_global = [] if self.projections == "shared" else [self.global_q]
        if self.projections == "pieces":
            of_global += [self.l2g_k, self.l2g_v, self.g2g_k, self.g2g_v]
        unused = (queries - count) * sum(projection.weight.numel() for projection in of_global)
        if self.global_o is not None:
            unused += queries * self.o.weight.numel()
        return super().multiply_adds(queries, keys) - unused

    def _segments(self, tokens: Tokens, mask: AttentionMask, count: int) -> Tensor | None:
        """Return the global token that each token is linked to: [B or 1, T]; -1: a global token."""
        if self.sentence_end is None:
            return self.core.fixed_segments(mask.keys, tokens.ids.device)
        ends = (tokens.ids[:, count:] == self.sentence_end).long()
        # A sentence's end belongs to it.
        sentences = ends.cumsum(1) - ends
        return torch.cat((sentences.new_full((len(sentences), count), -1), sentences), 1)

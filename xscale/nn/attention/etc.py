"""Ainslie et al. 2020 (ETC): global tokens that see all and are seen by all, local attention, relative-position labels.

A key's score is q . (k + a) with the label's vector a. The global tokens are the first of the sequence, which are
learned if the model has `global_tokens`; the others are long tokens. Each long token may be linked to a global token,
that of its sentence: the labels and masks of a pair then say whether the two are linked. The mixer `etc` finds
sentences, and has separate weights for global and long tokens.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunks import split_chunks, with_neighbour_chunks
from xscale.nn.attention.ops.dense import masked_softmax, repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import Init


@CORES.register(
    "etc",
    traits=CoreTraits(
        causal=False,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="T * (6 * (radius + 1) + 4 * global_tokens + 2 * max_distance + 4) * K",
        context=("ulysses",),
        dropout=True,
    ),
    deviations=(
        "Hidden scores are left out of the softmax; the paper subtracts 10,000 from them.",
        "By default (labels: position) pairs with a global token have one label for each of the three kinds.",
    ),
)
class Etc(Core):
    labels: Parameter
    global_labels: Parameter

    class Config(Core.Config):
        renamed = {"tokens": "global_tokens", "clip": "max_distance"}

        global_tokens: PositiveInt = 64
        """Global tokens, the first of the sequence."""
        radius: NonNegativeInt = 84
        """Local radius: keys on each side that a long token sees."""
        max_distance: NonNegativeInt = 12
        """Maximum relative distance with a label of its own; larger distances share its label."""
        labels: Literal["position", "structure"] = "position"
        """structure, as in the paper: pairs of a long and a global token have one of two labels, linked or not, pairs
        of global tokens have labels by distance, and global queries have labels of their own. position: long-to-global,
        global-to-long and global-to-global pairs have one label each."""
        segment_length: PositiveInt | None = None
        """Long tokens that are linked to each global token, in order (the paper's fixed blocks); null: none, or those
        of the sentences that the mixer `etc` finds."""
        hard_g2l: bool = False
        """Whether a global token sees, of the long tokens, only those that are linked to it."""
        hard_l2g: bool = False
        """Whether a long token sees, of the global tokens, only the one that it is linked to."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.structural = config.labels == "structure"
        # After the distances: long to global, global to long, global to global; or not linked, linked.
        shape = (heads, 2 * config.max_distance + (3 if self.structural else 4), head_width)
        self.declare("labels", shape, ("heads", "state", "state"), Init(std=dims.std))
        if self.structural:
            self.declare("global_labels", shape, ("heads", "state", "state"), Init(std=dims.std))

    @classmethod
    def example(cls) -> "Etc.Config":
        """Config for sequences of a few hundred tokens."""
        return cls.Config(global_tokens=6, radius=15, max_distance=4)

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        linked = {
            "labels": config.labels == "structure",
            "hard_g2l": config.hard_g2l,
            "hard_l2g": config.hard_l2g,
        }
        fix = "Or give segment_length, or take the mixer etc with sentence_end."
        problems = super().check(config, dims, path)
        return problems + [
            Problem(
                f"{path}.{key}",
                "needs long tokens that are linked to global tokens",
                fix,
                choices=take("position" if key == "labels" else False),
            )
            for key, needed in linked.items()
            if needed and config.segment_length is None
        ]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return self.attend((q, k, v), (q, k, v), mask, self.fixed_segments(mask.keys, q.device))

    def fixed_segments(self, length: int, device: torch.device) -> Tensor | None:
        """Return the global token that each token is linked to by `segment_length`: [1, T]; -1: a global token."""
        if self.config.segment_length is None:
            return None
        count = min(self.config.global_tokens, length)
        segments = torch.arange(length - count, device=device) // self.config.segment_length
        return F.pad(segments, (count, 0), value=-1)[None]

    def attend(
        self,
        of_long: tuple[Tensor, Tensor, Tensor],
        of_global: tuple[Tensor, Tensor, Tensor],
        mask: AttentionMask,
        segments: Tensor | None,
    ) -> Tensor:
        """Attend from long and from global tokens: [B, H, T, K].

        `of_long` and `of_global` are the queries, keys and values of all T tokens, [B, H, T, K] and [B, G, T, K] twice,
        for the queries of long and of global tokens. `segments` [B or 1, T] is the index of the global token that each
        long token is linked to; other values: to none.
        """
        assert not mask.causal
        assert mask.queries == mask.keys
        count = min(self.config.global_tokens, mask.keys)
        q, k, v = _upcast(*of_long)
        labelled = q @ self.use(self.labels).to(q.dtype).mT  # [B, H, T, labels]
        global_q, global_k, global_v = (
            (q, k, v) if of_global[0] is of_long[0] else _upcast(*of_global)
        )
        global_q = global_q[:, :, :count]
        if self.structural:
            global_labelled = global_q @ self.use(self.global_labels).to(q.dtype).mT
        elif of_global[0] is of_long[0]:
            global_labelled = labelled[:, :, :count]
        else:
            global_labelled = global_q @ self.use(self.labels).to(q.dtype).mT
        linked = None
        if segments is not None:
            linked = (
                segments[:, None] == torch.arange(count, device=q.device)[:, None]
            )  # [B or 1, count, T]
        out = torch.cat(
            (
                self._global(global_q, global_k, global_v, global_labelled, linked, mask),
                self._long(q, k, v, labelled, count, linked, mask),
            ),
            2,
        )
        return out.to(of_long[2].dtype)

    def _global(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        labelled: Tensor,
        linked: Tensor | None,
        mask: AttentionMask,
    ) -> Tensor:
        """Output of the global tokens [B, H, count, K]."""
        count, clip = q.shape[2], self.config.max_distance
        key = torch.arange(k.shape[2], device=q.device)
        is_global = key < count
        if self.structural:
            assert linked is not None
            distance = (key - key[:count, None]).clamp(-clip, clip) + clip  # [count, T]
            label = torch.where(is_global, distance, 2 * clip + 1 + linked.long())
            scores = q @ k.mT + labelled.gather(-1, label[:, None].expand(*q.shape[:2], -1, -1))
        else:
            scores = q @ k.mT + torch.where(is_global, labelled[..., -1:], labelled[..., -2:-1])
        hidden = None
        if self.config.hard_g2l:
            assert linked is not None
            hidden = ~(linked | is_global)[:, None]
        return self.drop_weights(masked_softmax(scores, hidden), mask) @ v

    def _long(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        labelled: Tensor,
        count: int,
        linked: Tensor | None,
        mask: AttentionMask,
    ) -> Tensor:
        """Output of the long tokens [B, H, T - count, K]."""
        size = self.config.radius + 1
        length = k.shape[2]
        clip = self.config.max_distance
        rows = split_chunks(q, 2, size)  # [B, H, N, C, K]
        local_k, local_v = (
            with_neighbour_chunks(split_chunks(x, 2, size), 2, True) for x in (k, v)
        )
        query = torch.arange(rows.shape[2] * size, device=q.device).view(-1, size, 1)
        key = (query[:, :1] // size - 1) * size + torch.arange(
            3 * size, device=q.device
        )  # [N, 1, W]
        label = (key - query)[0].clamp(-clip, clip) + clip  # [C, W], the same in every chunk
        by_label = split_chunks(labelled, 2, size)
        local_scores = rows @ local_k.mT + by_label.gather(
            -1, label.expand(*rows.shape[:3], -1, -1)
        )
        hidden = (key < count) | (key >= length) | ((key - query).abs() >= size)
        links = (
            None if linked is None else split_chunks(linked.mT, 1, size)[:, None]
        )  # [B or 1, 1, N, C, count]
        if self.structural:
            assert links is not None
            global_label = (2 * clip + 1 + links.long()).expand(*rows.shape[:4], -1)
            global_scores = rows @ k[:, :, None, :count].mT + by_label.gather(-1, global_label)
        else:
            global_scores = rows @ k[:, :, None, :count].mT + by_label[..., -3, None]
        if self.config.hard_l2g:
            assert links is not None
            hidden = torch.cat((hidden.expand(*links.shape[:4], -1), ~links), -1)
        else:
            hidden = F.pad(hidden, (0, count))
        weights = masked_softmax(torch.cat((local_scores, global_scores), -1), hidden)
        weights = self.drop_weights(weights, mask)
        out = weights[..., : 3 * size] @ local_v + weights[..., 3 * size :] @ v[:, :, None, :count]
        return out.flatten(2, 3)[:, :, count:length]

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        size, count = self.config.radius + 1, min(self.config.global_tokens, keys)
        padded = -(-queries // size) * size
        labels = queries * (2 * self.config.max_distance + 4)
        if self.structural:
            labels = (queries + count) * (2 * self.config.max_distance + 3)
        seen = 2 * padded * (3 * size + count) + 2 * count * keys + labels
        return float(heads * seen * head_width)


def _upcast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled queries, and keys and values of all heads, in float32 at least: [B, H, T, K] each."""
    heads = q.shape[1]
    return upcast(q) * q.shape[-1] ** -0.5, repeat_kv(upcast(k), heads), repeat_kv(upcast(v), heads)

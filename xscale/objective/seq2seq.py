"""Sequence to sequence (Sutskever et al. 2014; Vaswani et al. 2017): a model reads a source and writes its target."""

from typing import Any, Literal

import torch
from torch import Tensor

from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.tokens import Tokens
from xscale.objective.objective import OBJECTIVES, Batch, Objective, ObjectiveTraits


@OBJECTIVES.register(
    "seq2seq", traits=ObjectiveTraits(causal=True, source=True, random=False, samples="pairs")
)
class Seq2Seq(Objective):
    """Teacher forcing: each target token from the source and the earlier target tokens."""

    class Config(Objective.Config):
        begin: Literal["pad", "eos"] = "pad"
        """Token that the decoder reads before the target: padding, as in T5 and the objective `span`, or the end of a
        document, as in BART and the objective `denoising`."""

    @property
    def start(self) -> int:
        return self.specials.pad if self.config.begin == "pad" else self.specials.eos

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        assert documents is not None, "padding is told from text by its document"
        source, target = tokens[:, : self.length], tokens[:, self.length :]  # [B, S], [B, T]
        source_padding, target_padding = (
            documents[:, : self.length] != 0,
            documents[:, self.length :] != 0,
        )
        start = torch.full_like(target[:, :1], self.start)
        decoder_inputs = torch.cat((start, target[:, :-1]), 1)  # [B, T]
        # Padding of the source is a document that no text attends to. That of the target follows all of its text, which
        # a causal decoder keeps from reading it; in a document of its own it would have no source to attend to.
        return Batch(
            Tokens.from_ids(
                decoder_inputs, torch.zeros_like(target), padding=target_padding, **fields
            ),
            target.masked_fill(target_padding, IGNORE_INDEX),
            Tokens.from_ids(source, source_padding.long(), padding=source_padding, **fields),
        )

    def source_of(self, ids: list[int]) -> list[int]:
        return [*ids, self.specials.eos]

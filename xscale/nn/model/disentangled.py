"""Kasai et al. 2020 (DisCo): a decoder that predicts every token from any subset of the others, all in one forward.

    q_n = W_q h_n,  k_m = W_k (w_m + p_m),  v_m = W_v (w_m + p_m),  h_n = attention of q_n over the tokens m in Y_obs^n

Y_obs^n are the tokens that n observes, h_n begins as the position p_n, and w_m is the embedding of token m. In every
layer keys and values are of embeddings alone, so that a token that n does not observe reaches h_n by no detour over a
third token that observes it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import change, kinds, take
from xscale.nn.blocks.stack import StackConfig
from xscale.nn.depth.depth_pass import Prediction
from xscale.nn.depth.edges import CONTENT
from xscale.nn.head.length_head import LengthHead, LengthHeadConfig
from xscale.nn.mixer.attention import Attention
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.model.model import MODELS, ModelTraits, model_dims
from xscale.nn.module import Module, name_modules
from xscale.nn.norm.norm import NORMS, Norm
from xscale.nn.position.learned import Sinusoidal
from xscale.nn.position.position import POSITIONS, Position, PositionSlot
from xscale.nn.residual.residual_stream import RESIDUALS
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class PositionQueries(Module):
    """The positions [B, T, D] of tokens, without their embeddings, with a norm of their own if embeddings have one."""

    beside_stages = True

    def __init__(self, position: Position, norm: Norm | None) -> None:
        super().__init__()
        self.position, self.norm = position, norm

    def forward(self, content: Tensor, tokens: Tokens) -> Tensor:
        """`content` [B, T, D] are the embeddings, of which the shape and the dtype are read."""
        x: Tensor = self.position.embed(torch.zeros_like(content), tokens)
        return x if self.norm is None else self.norm(x)


@MODELS.register(
    "disentangled",
    traits=ModelTraits(causal=False, source=True, decode=False),
    deviations=(
        "The length of a target is predicted from the mean of the encoder's outputs, not from a token of its own.",
        "A position that observes no token gets 0 from self-attention.",
    ),
)
class Disentangled(EncoderDecoder):
    class Config(EncoderDecoder.Config):
        position: PositionSlot = Sinusoidal.Config()
        """The position encoding, which the first queries are; one that is added to embeddings."""
        length_head: LengthHeadConfig | None = None
        """Predicts the length of a target from its source, for decoding; null: nothing does."""

    causal = False
    decoder_predicts = False
    signals_of_decoder = (CONTENT,)
    seams = {"queries": Role.STACK_INPUT, "length": Role.ON_LAST_STAGE}

    def __init__(self, config: Config, vocabulary: int, length: int) -> None:
        super().__init__(config, vocabulary, length)
        assert self.target.position is not None, "see `check`"
        norm = config.embedding_norm
        self.queries = PositionQueries(
            self.target.position, None if norm is None else NORMS.build(norm, config.width)
        )
        for module in self.decoder.modules():
            if isinstance(module, Attention) and not module.cross:
                module.chooses_observed = True
        self.length: LengthHead | None = None
        if config.length_head is not None:
            self.length = LengthHead(
                config.length_head, model_dims(config, vocabulary, length, causal=False)
            )
        name_modules(self)

    @classmethod
    def check(cls, config: Any, dims: tuple[int, int], path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if POSITIONS.of(config.position).traits.where != "input":
            what = f"'{config.position.kind}' acts within attention, and the first queries are positions alone"
            choices = kinds(POSITIONS.able(where="input"), f"{path}.position")
            problems.append(Problem(f"{path}.position", what, choices=choices))
        if config.transparent:
            what = "the length of a target is predicted from one output of the encoder, not from those of all blocks"
            problems += [Problem(f"{path}.transparent", what, choices=take(False))] * (
                config.length_head is not None
            )
        return problems + list(_check_decoder(config.decoder, f"{path}.decoder"))

    def sp_problems(self, path: str) -> list[Problem]:
        what = "the first queries are positions of the full sequence, of which each rank would have a shard"
        return [Problem(path, what, choices=take(False) + kinds(["encoder_decoder"], "model"))]

    def forward(
        self, tokens: Tokens, targets: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        """In generation the cache keeps the encoder's output as `memory` and the logits [B, L] of the target's
        length as `lengths`."""
        assert source is not None, "an encoder-decoder needs a source"
        memory = self.memory(tokens, source)
        read = self.encoder.output_tokens(source)
        if (
            tokens.forward.cache is not None
            and self.length is not None
            and "lengths" not in tokens.forward.cache
        ):
            tokens.forward.cache["lengths"] = self.length(memory, read)
        content = self.target(tokens)  # [B, T, D]
        # Every iteration of decoding has other tokens, of which no keys are kept.
        about = tokens.with_forward(cache=None).with_signals({CONTENT: content})
        x = self.decoder(self.queries(content, tokens), about, memory, read)
        if self.length is not None and targets is not None:
            x = self.length.attach_loss(x, memory, read, tokens.further_loss_weight())
        return self.predict(self.decoder, x, tokens, Prediction(self.head, targets))


def _check_decoder(config: StackConfig, path: str) -> Iterator[Problem]:
    """List why the decoder's keys cannot be of embeddings while its queries are hidden states."""
    mixers: list[Any] = list({str(mixer): mixer for mixer in config.mixers()}.values())
    for mixer in mixers:
        kind = f"mixer '{mixer.kind}'"
        core: Any = getattr(mixer, "core", None)
        if mixer.kind == "attention" and core.kind == "softmax" and not mixer.shared_qk:
            continue
        if mixer.kind == "attention":
            kind = "attention with shared_qk" if mixer.shared_qk else f"core '{core.kind}'"
        what = (
            f"the queries of {kind} cannot each observe other tokens, whose keys are of embeddings"
        )
        yield Problem(f"{path}.block.mixer", what, choices=take({"kind": "attention"}))
    stream = RESIDUALS.of(config.block.residual)
    is_usual = stream.traits.hidden_states and not stream.part.joins_sublayers
    if not is_usual or config.halting is not None or config.pooling is not None:
        what = "every block reads the embeddings beside the one residual stream of all tokens"
        wanted = (("block.residual", "pre"), ("halting", None), ("pooling", None))
        yield Problem(
            path, what, choices=change(*[(f"{path}.{key}", value) for key, value in wanted])
        )

"""Vaswani et al. 2017; Raffel et al. 2020: an encoder reads the source, a causal decoder writes the target."""

from typing import ClassVar, Literal

from torch import Tensor

from xscale.core.errors import Problem
from xscale.nn.head import Head
from xscale.nn.model.embed import Embed
from xscale.nn.model.model import MODELS, Model, ModelTraits, check_position, model_dims
from xscale.nn.module import name_modules
from xscale.nn.stack import Stack, StackConfig
from xscale.nn.t_fixup import init_by_t_fixup
from xscale.nn.tokens import Tokens


@MODELS.register("encoder_decoder", traits=ModelTraits(causal=True, source=True, decode=True))
class EncoderDecoder(Model):
    class Config(Model.Config):
        encoder: StackConfig = StackConfig()
        """The blocks that read the source."""
        decoder: StackConfig = StackConfig()
        """The blocks that write the target; each also reads the encoder's output."""
        scale_head: bool = False
        """Whether the head's input is divided by sqrt(width), as T5 does, whose head is tied (Raffel et al. 2020)."""

        init: Literal["normal", "t_fixup"] = "normal"
        """Initial weights: normal with `init_std`; t_fixup scales embeddings and linear maps by width and depth, for
        placement no_norm without warm-up (Huang et al. 2020)."""

    seams: ClassVar[tuple[str, ...]] = ("source", "target", "encoder", "decoder", "head")

    def __init__(self, config: Config, vocabulary: int, length: int) -> None:
        super().__init__()
        reading = model_dims(config, vocabulary, length, causal=False)
        writing = model_dims(config, vocabulary, length, causal=True)
        self.source = Embed(config, reading)
        self.target = Embed(config, writing, self.source.table)
        self.encoder = Stack(config.encoder, reading)
        self.decoder = Stack(config.decoder, writing, cross=True)
        self.head = Head(
            writing,
            self.source.table if config.tied else None,
            soft_cap=config.logit_soft_cap,
            fix_norm=config.fix_norm,
            scale=config.width**-0.5 if config.scale_head else None,
        )
        if config.init == "t_fixup":
            init_by_t_fixup(self.source.table, self.encoder.blocks, self.decoder.blocks)
        name_modules(self)

    @classmethod
    def check(cls, config: Config, dims: tuple[int, int], path: str) -> list[Problem]:
        reading = model_dims(config, *dims, causal=False)
        writing = model_dims(config, *dims, causal=True)
        return [
            *dict.fromkeys(check_position(config, reading, path) + check_position(config, writing, path)),
            *Stack.check(config.encoder, reading, f"{path}.encoder"),
            *Stack.check(config.decoder, writing, f"{path}.decoder", cross=True),
        ]

    def encode(self, source: Tokens) -> Tensor:
        """Source tokens -> memory [B, S, D]."""
        out: Tensor = self.encoder(self.source(source), source)
        return out

    def forward(self, tokens: Tokens, targets: Tensor | None = None, source: Tokens | None = None) -> Tensor:
        assert source is not None, "an encoder-decoder needs a source"
        if tokens.cache is None:
            memory = self.encode(source)
        else:
            # During generation the source is encoded once.
            if "memory" not in tokens.cache:
                tokens.cache["memory"] = self.encode(source)
            memory = tokens.cache["memory"]
        out: Tensor = self.head(self.decoder(self.target(tokens), tokens, memory, source), targets, tokens)
        return out

"""Vaswani et al. 2017; Raffel et al. 2020: an encoder reads the source, a causal decoder writes the target."""

from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from xscale.core.config import FractionBelowOne
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.blocks.stack import Stack, StackConfig
from xscale.nn.depth.depth_pass import Prediction, StackUse
from xscale.nn.depth.layer_mix import LayerMix
from xscale.nn.head.head import Head
from xscale.nn.model.embed import Embed
from xscale.nn.model.model import MODELS, Model, ModelTraits, check_position, model_dims
from xscale.nn.model.t_fixup import check_mixers, init_by_t_fixup
from xscale.nn.module import name_modules
from xscale.nn.norm.norm import NormSlot
from xscale.nn.residual.residual_stream import RESIDUALS
from xscale.nn.roles import Role
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

        embedding_norm: NormSlot | None = None
        """Norm of the embeddings of each side, before their dropout (as in BART, Lewis et al. 2020); null: none."""
        transparent: bool = False
        """Whether each decoder block attends to a learned mix of the encoder's embeddings and of the outputs of all its
        blocks, in place of the last one's (Bapna et al. 2018); the encoder's final norm is applied to each."""
        transparent_dropout: FractionBelowOne = 0.0
        """Dropout probability of the weights of that mix."""
        init: Literal["normal", "t_fixup"] = "normal"
        """Initial weights: normal with `init_std`; t_fixup scales embeddings and linear maps by width and depth, for
        residual no_norm without warm-up (Huang et al. 2020)."""

    seams = {
        "source": Role.STACK_INPUT,
        "target": Role.STACK_INPUT,
        "encoder": Role.STACK,
        "decoder": Role.STACK,
        "head": Role.MODEL_OUTPUT,
    }
    computed_once = ("source", "encoder")
    causal: ClassVar[bool] = True
    """Whether the decoder is causal."""
    decoder_predicts: ClassVar[bool] = True
    """Whether the head reads the decoder's output alone, so that exits may predict as it does."""

    def __init__(self, config: Config, vocabulary: int, length: int) -> None:
        super().__init__()
        reading = model_dims(config, vocabulary, length, causal=False)
        writing = model_dims(config, vocabulary, length, causal=self.causal)
        self.source = Embed(config, reading, norm=config.embedding_norm)
        self.target = Embed(config, writing, self.source.table, norm=config.embedding_norm)
        mix = None
        if config.transparent:
            mix = LayerMix(
                config.encoder.depth + 1, config.decoder.depth, config.transparent_dropout
            )
        self.encoder = Stack(
            config.encoder,
            reading,
            StackUse(returns_states=config.transparent, repeats_windows=False),
        )
        make_head = partial(
            Head,
            writing,
            soft_cap=config.logit_soft_cap,
            fix_norm=config.fix_norm,
            scale=config.width**-0.5 if config.scale_head else None,
        )
        use = StackUse(
            cross=True, predicts=self.decoder_predicts, make_head=lambda: make_head(None), mix=mix
        )
        self.decoder = Stack(config.decoder, writing, use)
        self.head = make_head(self.source.table if config.tied else None)
        if config.init == "t_fixup":
            init_by_t_fixup(self.source.table, self.encoder.blocks, self.decoder.blocks)
        name_modules(self)

    @classmethod
    def check(cls, config: Config, dims: tuple[int, int], path: str) -> list[Problem]:
        reading = model_dims(config, *dims, causal=False)
        writing = model_dims(config, *dims, causal=cls.causal)
        problems = []
        encoder = config.encoder
        stream = RESIDUALS.of(encoder.block.residual)
        reads = "the decoder reads the outputs of all encoder blocks"
        refused = (
            (
                encoder.halting,
                "halting",
                None,
                "an encoder whose tokens halt has one output, not one of each block",
            ),
            (
                not stream.traits.hidden_states,
                "block.residual",
                stream.part.instead(encoder.block.residual),
                f"{reads}, and {stream.part.form}",
            ),
            (encoder.pooling, "pooling", None, f"{reads}, which have several lengths"),
        )
        for is_set, key, value, what in refused if config.transparent else ():
            if is_set:
                choices = take(False) + take(value, key=f"{path}.encoder.{key}")
                problems.append(Problem(f"{path}.transparent", what, choices=choices))
        if config.transparent_dropout and not config.transparent:
            what = "there are no weights of layers to drop"
            problems.append(
                Problem(
                    f"{path}.transparent_dropout",
                    what,
                    choices=take(0.0) + take(True, key=f"{path}.transparent"),
                )
            )
        if config.init == "t_fixup":
            problems += _check_t_fixup(config, path)
        return [
            *problems,
            *dict.fromkeys(
                check_position(config, reading, path) + check_position(config, writing, path)
            ),
            *Stack.check(config.encoder, reading, f"{path}.encoder"),
            *Stack.check(
                config.decoder,
                writing,
                f"{path}.decoder",
                StackUse(cross=True, predicts=cls.decoder_predicts),
            ),
        ]

    def encode(self, source: Tokens) -> Tensor:
        """Source tokens -> memory [B, S, D]; with `transparent` the states of all layers [N + 1, B, S, D]."""
        out: Tensor = self.encoder(self.source(source), source)
        return out

    def memory(self, tokens: Tokens, source: Tokens) -> Tensor:
        """Return `encode(source)`; during generation the source is encoded once."""
        if tokens.forward.cache is None:
            return self.encode(source)
        if "memory" not in tokens.forward.cache:
            tokens.forward.cache["memory"] = self.encode(source)
        memory: Tensor = tokens.forward.cache["memory"]
        return memory

    def forward(
        self, tokens: Tokens, targets: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        assert source is not None, "an encoder-decoder needs a source"
        memory = self.memory(tokens, source)
        # Where the encoder shortens the source, the memory has the documents of its windows.
        read = self.encoder.output_tokens(source)
        prediction = Prediction(self.head, targets)
        x = self.decoder(self.target(tokens), tokens, memory, read, prediction)
        return self.predict(self.decoder, x, tokens, prediction)


def _check_t_fixup(config: EncoderDecoder.Config, path: str) -> list[Problem]:
    """List what initial weights by depth and size cannot be."""
    problems = []
    for name in ("encoder", "decoder"):
        stack: StackConfig = getattr(config, name)
        if stack.share != "none":
            what = (
                "t_fixup scales the weights of each block by the depth, and the blocks share theirs"
            )
            problems.append(
                Problem(
                    f"{path}.{name}.share",
                    what,
                    choices=take("none") + take("normal", key=f"{path}.init"),
                )
            )
        if stack.linear_maps != "real":
            what = "t_fixup scales real matrices by their sizes, and quaternion maps have none"
            problems.append(
                Problem(
                    f"{path}.{name}.linear_maps",
                    what,
                    choices=take("real") + take("normal", key=f"{path}.init"),
                )
            )
        problems += check_mixers(stack, f"{path}.{name}")
    return problems

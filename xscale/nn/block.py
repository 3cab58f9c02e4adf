"""A Transformer layer: mixers and a feed-forward part on the residual stream, with pre-, post- or sandwich norm."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import Config, Slot
from xscale.core.errors import Problem
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS, Ffn, Gated
from xscale.nn.init import ZEROS
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import MIXERS, Mixer
from xscale.nn.module import Module
from xscale.nn.norm import NORMS, Norm, Rms
from xscale.nn.tokens import Tokens

NORMLESS = ("rezero", "none")
"""Placements without a norm."""


class BlockConfig(Config):
    mixer: Annotated[Mixer.Config, Slot(MIXERS)] = Attention.Config()
    """The mixer: self-attention or another map that moves information between tokens."""
    cross: Annotated[Mixer.Config, Slot(MIXERS)] | None = None
    """The cross-attention mixer in the decoder of an encoder-decoder; null: as `mixer`."""
    ffn: Annotated[Ffn.Config, Slot(FFNS)] = Gated.Config()
    """The position-wise feed-forward part."""
    norm: Annotated[Norm.Config, Slot(NORMS)] = Rms.Config()
    """The norm of each sublayer."""
    placement: Literal["pre", "post", "sandwich", "res_post", "rezero", "none"] = "pre"
    """pre: x + f(norm(x)) (Xiong et al. 2020); post: norm(x + f(x)) (Vaswani et al. 2017);
    sandwich: x + norm(f(norm(x))) (Ding et al. 2021); res_post: x + norm(f(x)) (Liu et al. 2022, Swin v2);
    rezero: x + alpha f(x), a learned scalar alpha that starts at 0 and no norm (Bachlechner et al. 2021);
    none: f(x), for mixers that are whole layers (Guo et al. 2019, Star-Transformer)."""
    residual: Literal["sequential", "parallel"] = "sequential"
    """sequential: the ffn reads what the mixer wrote; parallel: both read the block's input, and their outputs are
    added to it (Wang and Komatsuzaki 2021, GPT-J)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of each sublayer's output."""


class ResidualWeight(Module):
    """The factor alpha of a residual branch, one scalar that starts at 0 (Bachlechner et al. 2021, ReZero)."""

    weight: Parameter

    def __init__(self) -> None:
        super().__init__()
        self.declare("weight", (1,), ("state",), ZEROS, decays=False)

    def forward(self, y: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.use(self.weight).to(y.dtype) * y


class Sublayer(Module):
    """A mixer or feed-forward part with its norm, dropout and residual connection."""

    def __init__(self, config: BlockConfig, width: int, part: Mixer | Ffn) -> None:
        super().__init__()
        self.placement = config.placement
        self.dropout = config.dropout
        normalises = config.placement not in NORMLESS
        self.norm: Norm | None = NORMS.build(config.norm, width) if normalises else None
        self.after: Norm | None = NORMS.build(config.norm, width) if config.placement == "sandwich" else None
        self.alpha = ResidualWeight() if config.placement == "rezero" else None
        self.part = part

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]: the part's output for `x`, added to `residual` [B, T, D]; None: to `x`."""
        norm, part, after = self.norm, self.part, self.after
        inner = norm(x) if norm is not None and self.placement in ("pre", "sandwich") else x
        y: Tensor
        if isinstance(part, Mixer):
            y = part(inner, tokens, memory, source)
        else:
            y = part(inner, tokens)
        if after is not None:
            y = after(y)
        elif norm is not None and self.placement == "res_post":
            y = norm(y)
        elif self.alpha is not None:
            y = self.alpha(y)
        drops = self.training and tokens.rng_seed is not None
        if self.placement == "none":
            return self.random.dropout(y, self.dropout if drops else 0.0, ("batch", "tokens", "width"), tokens)
        kernel = self.kernel_choices.get("bias_dropout_residual")
        residual = x if residual is None else residual
        y = self.random.dropout_add(y, residual, self.dropout if drops else 0.0, tokens, kernel)
        return norm(y) if norm is not None and self.placement == "post" else y


class Block(Module):
    """[B, T, D] -> [B, T, D]."""

    def __init__(self, config: BlockConfig, dims: Dims, *, cross: bool = False) -> None:
        super().__init__()
        self.parallel = config.residual == "parallel"
        self.mixer = Sublayer(config, dims.width, MIXERS.build(config.mixer, dims))
        self.cross: Sublayer | None = None
        if cross:
            mixer = MIXERS.build(config.cross or config.mixer, cross_dims(dims))
            self.cross = Sublayer(config, dims.width, mixer)
        self.ffn: Sublayer | None = None
        if config.ffn.kind != "none":
            self.ffn = Sublayer(config, dims.width, FFNS.build(config.ffn, dims))

    @staticmethod
    def check(config: BlockConfig, dims: Dims, path: str, *, cross: bool = False) -> list[Problem]:
        """List the problems of the block and its parts."""
        problems = _check_mixer(config.mixer, dims, f"{path}.mixer")
        if config.residual == "parallel" and (cross or config.placement == "post"):
            what = "cross attention is a third sublayer" if cross else "placement 'post' normalises the sum"
            fix = "Take sequential." if cross else "Take sequential, or a placement other than post."
            problems.append(Problem(f"{path}.residual", f"'parallel' adds two sublayers to one input; {what}", fix))
        if config.residual == "parallel" and "none" in (config.placement, config.ffn.kind):
            what = "'parallel' adds a mixer and an ffn to one input, and this block has no sum of the two"
            problems.append(Problem(f"{path}.residual", what, "Take sequential."))
        if cross:
            problems += _check_mixer(config.cross or config.mixer, cross_dims(dims), f"{path}.cross")
        problems += FFNS.of(config.ffn).part.check(config.ffn, dims, f"{path}.ffn")
        problems += NORMS.of(config.norm).part.check(config.norm, dims, f"{path}.norm")
        return problems

    def forward(self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None) -> Tensor:
        if self.parallel:
            assert self.ffn is not None
            return self.ffn(x, tokens, residual=self.mixer(x, tokens))  # type: ignore[no-any-return]
        x = self.mixer(x, tokens)
        if self.cross is not None:
            x = self.cross(x, tokens, memory, source)
        return x if self.ffn is None else self.ffn(x, tokens)


def cross_dims(dims: Dims) -> Dims:
    """`dims` for a cross-attention part."""
    return replace(dims, cross=True)


def _check_mixer(config: Config, dims: Dims, path: str) -> list[Problem]:
    entry = MIXERS.of(config)
    problems = list(entry.part.check(config, dims, path))
    needed = "cross" if dims.cross else "causal" if dims.causal else "bidirectional"
    if not getattr(entry.traits, needed):
        what = {
            "cross": "cannot do cross attention",
            "causal": "is not causal, and this model is",
            "bidirectional": "is not bidirectional, and this model is",
        }[needed]
        can = ", ".join(MIXERS.able(**{needed: True}))
        problems.append(Problem(path, f"'{entry.name}' {what}", f"These can: {can}."))
    return problems

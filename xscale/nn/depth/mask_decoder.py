"""He et al. 2021 (DeBERTa), section 3.2 and appendix A.7: the enhanced mask decoder, the last block of the encoder.

    I_0 = H + P,  I_{n+1} = Block(queries and residual: I_n; keys and values: H),  the head reads I_N

H [B, T, D] is the output of the block before and P a table of absolute positions, which enter nowhere else. The N steps
have the same weights. The released models were trained with N = 2.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from xscale.core.choices import Choice
from xscale.core.config import Config, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import change, instead, kinds, part_paths, take
from xscale.nn.depth.depth_pass import DepthPass, StackUse
from xscale.nn.dims import Dims
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.position.learned import Learned
from xscale.nn.position.position import POSITIONS, PositionSlot
from xscale.nn.residual.residual_stream import RESIDUALS


class MaskDecoderConfig(Config):
    steps: PositiveInt = 2
    """N: how often the last block is applied, with the same weights."""
    position: PositionSlot = Learned.Config()
    """Absolute positions P, which are added to the first queries; `none`: nothing is."""


class MaskDecoder(DepthPass):
    """Has the last block decode: its mixers read its input as it came, and it is applied several times."""

    key = "mask_decoder"
    reads_hidden_states = "the decoder's queries are of one"

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        if config.mask_decoder is None:
            return []
        last = config.block_config(config.depth - 1)
        return check(config.mask_decoder, last, dims, f"{path}.mask_decoder", config)

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "MaskDecoder | None":
        if config.mask_decoder is None:
            return None
        last: Any = blocks[str(config.depth - 1)]
        last.rounds = config.mask_decoder.steps
        last.reads_own_input = True
        last.reads_memory |= last.mixers().keys()
        last.position = POSITIONS.build(config.mask_decoder.position, dims)
        return cls()

    def reads_full_sequence(self) -> str | None:
        return self.key


def check(
    config: MaskDecoderConfig, block: Any, dims: Dims, path: str, stack: Any
) -> list[Problem]:
    """List why the last block of `stack`, of config `block`, cannot decode; `path` is that of the mask decoder."""
    reasons: list[tuple[str, tuple[Choice, ...]]] = []
    if dims.causal:
        reasons.append(("it predicts masked tokens of an encoder, and this model is causal", ()))
    stream = RESIDUALS.of(block.residual).part
    if stream.placement(block.residual).before is not None:
        what = f"its keys are the output of the block before, and residual '{block.residual.kind}' reads a norm of it"
        able = [entry for entry in RESIDUALS if entry.traits.hidden_states]
        unread = [
            entry.name for entry in able if entry.part.placement(entry.part.Config()).before is None
        ]
        reasons.append((what, instead("residual", block.residual.kind, unread)))
    if stream.joins_sublayers:
        what = "its queries pass the sublayers in turn, and the block's residual is 'parallel'"
        usual = [stream.instead(block.residual)]
        reasons.append((what, instead("residual", block.residual.kind, usual)))
    where = path.rpartition(".")[0]
    if block.position is not None:
        what = "absolute positions enter its queries alone, and block.position adds some to the input of every block"
        reasons.append((what, take(None, key=f"{where}.block.position")))
    if stack.halting is not None:
        what = "the last block is its decoder, and with halting a token may leave before"
        reasons.append((what, take(None, key=f"{where}.halting")))
    for mixer in block.mixers():
        if mixer.kind != "attention" or mixer.shared_qk:
            what = "its queries are not of the tokens of its keys: it needs attention with a projection of each"
            reasons.append((what, _attention(stack, mixer, where)))
        elif MIXERS.of(mixer).part.score_heads(mixer) is not None:
            what = f"core '{mixer.core.kind}' hands on its scores, and each step would have its own"
            reasons.append((what, instead("core", mixer.core.kind, ["softmax"])))
    problems = [Problem(path, what, choices=take(None) + choices) for what, choices in reasons]
    position = POSITIONS.of(config.position)
    if position.traits.where not in ("input", "none"):
        what = f"position '{position.name}' acts within attention"
        able_positions = [*POSITIONS.able(where="input"), "none"]
        choices = kinds(able_positions, f"{path}.position")
        problems.append(Problem(f"{path}.position", what, choices=choices))
    return problems + list(position.part.check(config.position, dims, f"{path}.position"))


def _attention(stack: Any, mixer: Any, path: str) -> tuple[Choice, ...]:
    """Return the choices of attention with separate queries and keys, wherever the stack at `path` has this mixer."""
    if mixer.kind != "attention":
        return instead("mixer", mixer.kind, ["attention"])
    paths = part_paths(stack, "mixer", mixer.kind, path)
    return change(*[(f"{where}.shared_qk", False) for where in paths])

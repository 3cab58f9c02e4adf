"""Su et al. 2021 (RoFormer): rotates pairs of query and key channels by an angle proportional to the position.

`RopeScaling` changes the angles for texts longer than those of the pretraining.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.config import Config as Schema
from xscale.core.config import PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import change, take
from xscale.nn.dims import Dims
from xscale.nn.position.position import POSITIONS, Position, PositionTraits
from xscale.nn.tokens import Tokens
from xscale_kernels.rope.op import rope

SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": ("original_length",),
    "llama3": ("original_length", "low_frequency", "high_frequency"),
    "yarn": ("original_length", "beta_fast", "beta_slow", "truncate", "attention_factor"),
}
"""Method of scaling -> the keys that it reads, besides `factor`."""


class RopeScaling(Schema):
    """Scaling of RoPE's angular frequencies."""

    method: Literal["linear", "dynamic", "llama3", "yarn"]
    """linear: position interpolation, every frequency divided by the factor (Chen et al. 2023); dynamic: the base grows
    with the longest position of the batch once it exceeds the original length (bloc97 and emozilla 2023), in generation
    for new keys only, as in transformers; llama3: only long wavelengths are divided (Grattafiori et al. 2024); yarn: a
    ramp over the channels between divided and unchanged frequencies, and scores scaled up (Peng et al. 2024)."""
    factor: float = Field(ge=1)
    """Factor by which texts may be longer than the original length."""
    original_length: PositiveInt | None = None
    """Tokens of the longest text before scaling, which all methods but linear need."""
    low_frequency: PositiveFloat = 1.0
    """llama3: wavelengths above original_length / low_frequency are multiplied by the factor."""
    high_frequency: PositiveFloat = 4.0
    """llama3: wavelengths below original_length / high_frequency are unchanged; those between are interpolated."""
    beta_fast: PositiveFloat = 32.0
    """yarn: channels with more rotations than this in the original length are unchanged."""
    beta_slow: PositiveFloat = 1.0
    """yarn: frequencies of channels with fewer rotations than this in the original length are divided."""
    truncate: bool = True
    """yarn: whether the ramp begins and ends at whole channels."""
    attention_factor: PositiveFloat | None = None
    """yarn: factor of rotated queries and of rotated keys; null: 0.1 ln(factor) + 1."""


@POSITIONS.register(
    "rope",
    traits=PositionTraits(where="qk", relative=True, extrapolates=True, cost="T*H*K"),
    deviations=(
        "The ramp of `scaling.method: yarn` is linear in the channel's index, as in the code and the models of Peng et "
        "al.; their equation is linear in the number of rotations.",
    ),
)
class Rope(Position):
    class Config(Position.Config):
        base: PositiveFloat = 10000.0
        """Ratio of the longest to the shortest wavelength, which is 2 pi."""
        fraction: float = Field(default=1.0, gt=0, le=1)
        """Fraction of the head's channels that are rotated; the rest carry no position."""
        scaling: RopeScaling | None = None
        """Scaling of the frequencies for longer texts; null: none."""

    def __init__(self, config: Config, dims: Dims, heads: int = 0, head_width: int = 0) -> None:
        super().__init__()
        self.base = config.base
        self.scaling = config.scaling
        self.rotated_width = int(head_width * config.fraction) // 2 * 2
        self.rotation_key = f"rope/{self.base}/{self.rotated_width}/{self.scaling}"

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        return (
            []
            if config.scaling is None
            else _check_scaling(config.scaling, dims, f"{path}.scaling")
        )

    def rotate(self, x: Tensor, tokens: Tokens) -> Tensor:
        cos, sin = self._rotation(tokens, x.dtype)
        rotated = rope(
            x.transpose(1, 2), cos, sin, implementation=self.kernel_choices.get("rope")
        )  # [B, T, H, K]
        return rotated.transpose(1, 2)  # [B, H, T, K]

    def rotate_both(self, q: Tensor, k: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        if q.shape[2] > 1:
            return super().rotate_both(q, k, tokens)
        # One token, as in generation: a call costs more than a copy.
        rotated = self._rotate_token(torch.cat((q, k), 1), tokens)
        return rotated.narrow(1, 0, q.shape[1]), rotated.narrow(1, q.shape[1], k.shape[1])

    def _rotate_token(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Rotate the heads of one token, [B, N, 1, K]; on a CPU by the fewest calls of torch."""
        if not x.is_cpu or x.shape[3] != self.rotated_width or self.kernel_choices:
            return self.rotate(x, tokens)

        def compute() -> tuple[Tensor, Tensor]:
            cos, sin = (
                angles.unsqueeze(1) for angles in self._rotation(tokens, x.dtype)
            )  # [B, 1, 1, K / 2]
            return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

        cos, sin = tokens.shared_values.get_or_compute(f"{self.rotation_key}/token", compute)
        precise = x.to(cos.dtype)
        return torch.addcmul(precise * cos, precise.roll(self.rotated_width // 2, -1), sin).to(
            x.dtype
        )

    def _rotation(self, tokens: Tokens, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        def compute() -> tuple[Tensor, Tensor]:
            half = self.rotated_width // 2
            # Angles at position 100k need more than float32's 24 bits to be right to 1e-3, hence the double.
            steps = torch.arange(half, device=tokens.positions.device, dtype=torch.float64)
            positions = tokens.positions[..., None].double()  # [B, T, 1]
            at_least_float32 = torch.promote_types(dtype, torch.float32)
            if self.scaling is None:
                angles = positions * self.base ** (-steps / half)  # [B, T, K/2]
                return angles.cos().to(at_least_float32), angles.sin().to(at_least_float32)
            frequencies, gain = scaled_frequencies(self.scaling, self.base, steps, tokens.positions)
            angles = positions * frequencies
            return (gain * angles.cos()).to(at_least_float32), (gain * angles.sin()).to(
                at_least_float32
            )

        key = f"{self.rotation_key}/{dtype}"
        rotation: tuple[Tensor, Tensor] = tokens.shared_values.get_or_compute(key, compute)
        return rotation


def scaled_frequencies(
    scaling: RopeScaling, base: float, steps: Tensor, positions: Tensor
) -> tuple[Tensor, float]:
    """Return the angular frequencies [K/2] in radians a token, float64, and the factor of rotated vectors.

    `steps` are the indices [K/2] of the pairs of channels. `dynamic` reads the longest of `positions` [B, T].
    """
    make: Callable[[RopeScaling, float, Tensor, Tensor], Tensor] = {
        "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn
    }[scaling.method]  # fmt: skip
    gain = 1.0
    if scaling.method == "yarn":
        gain = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    return make(scaling, base, steps, positions), gain


def _linear(scaling: RopeScaling, base: float, steps: Tensor, positions: Tensor) -> Tensor:
    return base ** (-steps / len(steps)) / scaling.factor


def _dynamic(scaling: RopeScaling, base: float, steps: Tensor, positions: Tensor) -> Tensor:
    assert scaling.original_length is not None
    half = len(steps)
    length = (positions.max() + 1).clamp(min=scaling.original_length).double()
    growth = scaling.factor * length / scaling.original_length - (scaling.factor - 1)
    return (base * growth ** (half / (half - 1))) ** (-steps / half)


def _llama3(scaling: RopeScaling, base: float, steps: Tensor, positions: Tensor) -> Tensor:
    assert scaling.original_length is not None
    frequencies = base ** (-steps / len(steps))
    rotations = (
        scaling.original_length * frequencies / (2 * math.pi)
    )  # original length / wavelength
    ramp = (rotations - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    unchanged = ramp.clamp(0, 1)
    return frequencies * (unchanged + (1 - unchanged) / scaling.factor)


def _yarn(scaling: RopeScaling, base: float, steps: Tensor, positions: Tensor) -> Tensor:
    assert scaling.original_length is not None
    half = len(steps)

    def channel(rotations: float) -> float:
        """Index of the pair of channels that rotates so often in the original length."""
        assert scaling.original_length is not None
        return half * math.log(scaling.original_length / (rotations * 2 * math.pi)) / math.log(base)

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The last channel is that of the head, not of its pairs, as in the authors' code.
    low, high = max(low, 0), min(high, 2 * half - 1)
    divided = ((steps - low) / (high - low or 0.001)).clamp(0, 1)
    frequencies = base ** (-steps / half)
    return frequencies * (1 - divided) + frequencies / scaling.factor * divided


def _check_scaling(scaling: RopeScaling, dims: Dims, path: str) -> list[Problem]:
    problems = []
    keys = SCALING_KEYS[scaling.method]
    for name, field in RopeScaling.model_fields.items():
        if name not in ("method", "factor", *keys) and getattr(scaling, name) != field.default:
            readers = [method for method, read in SCALING_KEYS.items() if name in read]
            what = f"'{scaling.method}' does not read it"
            problems.append(
                Problem(
                    f"{path}.{name}",
                    what,
                    choices=take(field.default) + take(*readers, key=f"{path}.method"),
                )
            )
    if "original_length" in keys and scaling.original_length is None:
        what = f"'{scaling.method}' needs the longest text before scaling, in tokens"
        problems.append(
            Problem(
                f"{path}.original_length",
                what,
                "Or give it.",
                choices=take("linear", key=f"{path}.method"),
            )
        )
    if (
        scaling.method == "dynamic"
        and scaling.original_length is not None
        and dims.length > scaling.original_length
    ):
        what = f"the base would depend on each text's length, and texts of {dims.length} tokens are trained on"
        choices = take(dims.length) + take("linear", "llama3", "yarn", key=f"{path}.method")
        problems.append(Problem(f"{path}.original_length", what, choices=choices))
    if scaling.method == "llama3" and scaling.low_frequency >= scaling.high_frequency:
        what = f"must be < high_frequency={scaling.high_frequency}, got {scaling.low_frequency}"
        problems.append(
            Problem(
                f"{path}.low_frequency",
                what,
                choices=change(("", 1.0), (f"{path}.high_frequency", 4.0)),
            )
        )
    if scaling.method == "yarn" and scaling.beta_slow >= scaling.beta_fast:
        what = f"must be < beta_fast={scaling.beta_fast}, got {scaling.beta_slow}"
        problems.append(
            Problem(
                f"{path}.beta_slow", what, choices=change(("", 1.0), (f"{path}.beta_fast", 32.0))
            )
        )
    return problems

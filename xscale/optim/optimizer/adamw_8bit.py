"""Dettmers et al. 2022 (8-bit Optimizers via Block-wise Quantization): AdamW whose moments are 8-bit codes, by torchao.

A moment of the matrix of a linear map is a code of 8 bits for each element and a scale for each `block_size` elements
of a row. Blocks lie in rows, so that they are the same on every layout. All else, and matrices whose rows are no whole
blocks, is updated by AdamW with full moments.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.errors import ConfigError
from xscale.optim.optimizer.adamw import AdamW
from xscale.optim.optimizer.optimizer import OPTIMIZERS, LocalParameter, Optimizer, OptimizerTraits

MOMENTS = ("mean", "square")


@OPTIMIZERS.register(
    "adamw_8bit",
    traits=OptimizerTraits(states_per_parameter=2, elementwise=True),
    deviations=(
        "Blocks are parts of rows; in the paper a tensor is one row.",
        "The head and routers have full moments, as embeddings have in the paper, and no layer norm is put behind "
        "embeddings.",
    ),
)
class AdamW8bit(Optimizer):
    class Config(AdamW.Config):
        block_size: int = Field(default=128, ge=16)
        """Elements of a row with one scale; a matrix whose rows are no whole blocks has full moments."""

    requires = {"torchao": "pip install 'torchao>=0.18,<0.19'"}

    def __init__(self, config: Config, weights: list[LocalParameter]) -> None:
        super().__init__(config, weights)
        self.config: AdamW8bit.Config = config
        self.quantized = [
            index for index, weight in enumerate(weights) if _has_blocks(weight, config.block_size)
        ]
        self.others = [index for index in range(len(weights)) if index not in set(self.quantized)]
        full = AdamW.Config(**{name: getattr(config, name) for name in AdamW.Config.model_fields})
        self.adamw = AdamW(full, [weights[index] for index in self.others])
        self.codes: dict[str, dict[int, Tensor]] = {moment: {} for moment in MOMENTS}
        self.scales: dict[str, dict[int, Tensor]] = {moment: {} for moment in MOMENTS}
        for index in self.quantized:
            value = weights[index].value
            blocks = (*value.shape[:-1], value.shape[-1] // config.block_size)
            for moment in MOMENTS:
                self.codes[moment][index] = torch.zeros_like(value, dtype=torch.uint8)
                self.scales[moment][index] = value.new_zeros(blocks, dtype=torch.float32)

    @classmethod
    def mup_exponent(cls, config: Config, *, linear_map: bool) -> float | None:
        return 1.0

    @classmethod
    def describe(cls, config: Config, weights: list[LocalParameter]) -> list[str]:
        sizes = [
            (_has_blocks(weight, config.block_size), weight.value.numel()) for weight in weights
        ]
        quantized, full = (
            [size for blocked, size in sizes if blocked == wanted] for wanted in (True, False)
        )
        line = (
            f"optimizer adamw_8bit: {len(quantized)} tensors, {sum(quantized):,} parameters with 8-bit moments; "
            f"{len(full)} tensors, {sum(full):,} parameters with full ones"
        )
        return [line, *super().describe(config, weights)]

    def set_progress(self, progress: float) -> None:
        super().set_progress(progress)
        self.adamw.set_progress(progress)

    @torch.no_grad()
    def step(self, gradients: list[Tensor], lr: float) -> None:
        self.adamw.kernel_choices = self.kernel_choices
        self.adamw.step([gradients[index] for index in self.others], lr)
        for index in self.quantized:
            # A shard is empty where there are more ranks than rows.
            if self.weights[index].value.numel():
                self._quantized_step(index, gradients[index], lr)

    def _quantized_step(self, index: int, gradient: Tensor, lr: float) -> None:
        """Update a weight with 8-bit moments."""
        from torchao.optim.adam import single_param_adam

        config, weight = self.config, self.weights[index].value
        # Numbers as tensors, as torchao has them: a bias correction of Python numbers has no square root.
        single_param_adam(
            weight,
            gradient,
            torch.tensor(float(self.adamw.steps), device=weight.device),
            self._moment("mean", index),
            self._moment("square", index),
            None,
            torch.tensor(lr * self.lr_factors[index], device=weight.device),
            config.beta1,
            config.beta2,
            self.weight_decays[index],
            config.eps,
            IS_ADAMW=True,
            BF16_STOCHASTIC_ROUND=False,
        )

    def _moment(self, moment: str, index: int) -> Any:
        """Wrap codes and scales as torchao's tensor, which writes into them."""
        from torchao.optim.subclass_8bit import OptimState8bit

        codes, scales = self.codes[moment][index], self.scales[moment][index]
        signed = moment == "mean"
        qmap = self._qmaps[signed].to(codes.device)
        return OptimState8bit(codes, scales.view(-1), qmap, signed, dtype=torch.float32)

    @cached_property
    def _qmaps(self) -> dict[bool, Tensor]:
        """Whether values have signs -> the value of each code, [256]."""
        from torchao.optim.quant_utils import create_dynamic_map

        return {
            signed: torch.tensor(create_dynamic_map(signed), dtype=torch.float32)
            for signed in (True, False)
        }

    def states(self) -> Mapping[str, Sequence[Tensor | None]]:
        count = len(self.weights)
        states: dict[str, Sequence[Tensor | None]] = {}
        for name, values in self.adamw.states().items():
            by_index = dict(zip(self.others, values, strict=True))
            states[name] = [by_index.get(index) for index in range(count)]
        for moment in MOMENTS:
            states[f"{moment}_codes"] = [self.codes[moment].get(index) for index in range(count)]
            states[f"{moment}_scales"] = [self.scales[moment].get(index) for index in range(count)]
        return states

    def blocked_states(self) -> Mapping[str, int]:
        return {f"{moment}_scales": self.config.block_size for moment in MOMENTS}

    def counters(self) -> dict[str, int]:
        return self.adamw.counters()

    def set_counters(self, counters: dict[str, int]) -> None:
        self.adamw.set_counters(counters)


def _has_blocks(weight: LocalParameter, block_size: int) -> bool:
    """Whether the rows of the full weight are whole blocks. ConfigError where a shard cuts a block."""
    shape = weight.value.shape if weight.full_shape is None else weight.full_shape
    if not weight.linear_map or shape[-1] % block_size:
        return False
    width = weight.value.shape[-1]
    if width % block_size:
        what = f"the rows of {weight.name} have {width} elements on a rank, which {block_size} does not divide"
        fix = "Take a block_size that divides them, or fewer ranks of tp or dp_shard."
        raise ConfigError("optimizer.block_size", what, fix)
    return True

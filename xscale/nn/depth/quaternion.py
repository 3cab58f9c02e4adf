"""Tay et al. 2019 (Quaternion Transformer), section 3: linear maps by the Hamilton product, with 1/4 of the weights.

The channels of x are four quarters (r, i, j, k), the components of D/4 quaternions, and so are those of the output:

    W (x) x = [W_r r - W_i i - W_j j - W_k k;   W_i r + W_r i - W_k j + W_j k;
               W_j r + W_k i + W_r j - W_i k;   W_k r - W_j i + W_i j + W_r k]

The weight [outputs, inputs / 4] is W_r, W_i, W_j and W_k [outputs / 4, inputs / 4] below each other. Activations act on
each component by itself, and norms on the real channels.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from xscale.core.choices import Choice
from xscale.core.errors import Problem
from xscale.core.requirements import change, instead, multiples_near, part_paths, take
from xscale.nn.attention.hamilton import COMPONENTS, hamilton_rows
from xscale.nn.ffn.ffn import Ffn, gated_hidden
from xscale.nn.linear import Linear
from xscale.nn.mixer.attention import Attention

LinearMaps = Literal["real", "quaternion"]
MIXERS_WITH_QUATERNIONS, FFNS_WITH_QUATERNIONS = ("attention",), ("dense", "gated")


class QuaternionLinear(Linear):
    """A linear map of quaternions, y = W (x) x + b, in the place of a real one of the same sizes."""

    def __init__(self, real: Linear, output_heads: int = 1, input_heads: int = 1) -> None:
        """`real`: the map whose place it takes; each of the heads has its own quarter of each component."""
        outputs, inputs = real.weight.shape
        outer, inner = real.axes["weight"]
        super().__init__(
            inputs, outputs, (outer, inner), real.init["weight"], bias=real.bias is not None
        )
        self.declare(
            "weight", (outputs, inputs // COMPONENTS), ("state", "state"), real.init["weight"]
        )
        self.heads = output_heads, input_heads
        # An optimizer of matrices would make the four components orthogonal to each other.
        self.linear_maps.clear()

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        bias = None if self.bias is None else self.use(self.bias)
        return self.matmul(x, hamilton_matrix(self.use(self.weight), *self.heads), bias)

    def tp_problems(self, tp: int, path: str) -> list[Problem]:
        what = "a quaternion's components are quarters of the channels, so a rank's rows would not be whole quaternions"
        real = take("real", key="model.stack.linear_maps")
        stacks = [(f"model.{name}.linear_maps", "real") for name in ("encoder", "decoder")]
        return [Problem(path, what, choices=take(1) + real + change(*stacks))]


def hamilton_matrix(weight: Tensor, output_heads: int = 1, input_heads: int = 1) -> Tensor:
    """Return the real matrix [outputs, inputs] of the product with the quaternions `weight` [outputs, inputs / 4].

    The channels of each head stand together, in four quarters, which are heads of the components.
    """
    outputs, inputs = len(weight), COMPONENTS * weight.shape[1]
    # W_c . x, component c of the product, has a block of W_c for each component of x.
    blocks = torch.stack(hamilton_rows(weight, 0))  # [4, outputs, inputs / 4]
    by_head = blocks.view(
        COMPONENTS, COMPONENTS, output_heads, -1, input_heads, weight.shape[1] // input_heads
    )
    return by_head.permute(2, 0, 3, 4, 1, 5).reshape(outputs, inputs)


def use_quaternions(blocks: Iterable[Any]) -> None:
    """Replace the projections of attention and the maps of feed-forward parts by quaternion ones."""
    for block in blocks:
        for sublayer in block.sublayers().values():
            part = sublayer.part
            assert isinstance(part, Attention | Ffn)
            for name, module in list(part.named_children()):
                if isinstance(module, Linear):
                    heads = {}
                    if isinstance(part, Attention):
                        side, size = ("input_heads", 1) if name == "o" else ("output_heads", 0)
                        heads[side] = module.weight.shape[size] // part.head_width
                    setattr(part, name, QuaternionLinear(module, **heads))


def check(config: Any, width: int, path: str, *, cross: bool) -> list[Problem]:
    """List what of a stack of this config, at `path`, has no quaternion linear maps."""
    if config.linear_maps == "real":
        return []
    where, problems = f"{path}.linear_maps", dict[str, Problem]()
    for layer in range(config.depth):
        block = config.block_config(layer)
        for sublayer in block.listed(cross=cross):
            part: Any = block.config_of(sublayer)
            able = FFNS_WITH_QUATERNIONS if sublayer.part == "ffn" else MIXERS_WITH_QUATERNIONS
            if part.kind not in able:
                what = f"'{part.kind}' has no linear maps of quaternions"
                family = "ffn" if sublayer.part == "ffn" else "mixer"
                choices = take("real") + instead(family, part.kind, able)
                problems.setdefault(what, Problem(where, what, choices=choices))
                continue
            for key, size in _sizes(part, width).items():
                if size % COMPONENTS:
                    what = f"{COMPONENTS} does not divide {key}={size}, whose quarters are the components"
                    choices = take("real") + _multiples(config, part, key, size, path)
                    problems.setdefault(what, Problem(where, what, choices=choices))
    return list(problems.values())


def _multiples(config: Any, part: Any, key: str, size: int, path: str) -> tuple[Choice, ...]:
    """Return the choices of sizes near that of `key` which have four quarters, wherever there is such a part."""
    parts = part_paths(config, part.family, part.kind, path)
    keys = (
        [f"{path.rpartition('.')[0]}.width"]
        if key == "width"
        else [f"{where}.{key}" for where in parts]
    )
    return tuple(
        Choice(tuple((key, near) for key in keys)) for near in multiples_near(size, COMPONENTS)
    )


def _sizes(part: Any, width: int) -> dict[str, int]:
    """Return the sizes of the part's linear maps, by what a user would change."""
    if part.kind == "dense":
        return {"width": width, "hidden": part.hidden or COMPONENTS * width}
    if part.kind == "gated":
        return {"width": width, "hidden": gated_hidden(part.hidden, width)}
    return {"width": width, "head_width": part.head_width or width // part.heads}

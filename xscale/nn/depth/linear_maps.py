"""Linear maps of all blocks of a stack by the Hamilton product (Tay et al. 2019); see `xscale.nn.depth.quaternion`."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from xscale.core.errors import Problem
from xscale.nn.depth.depth_pass import DepthPass, StackUse
from xscale.nn.depth.quaternion import check, use_quaternions
from xscale.nn.dims import Dims


class QuaternionMaps(DepthPass):
    """Replaces the linear maps of the blocks when the stack is built, and does nothing in a forward."""

    key = "linear_maps"
    reads_hidden_states = ""

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        return check(config, dims.width, path, cross=use.cross)

    @classmethod
    def build(cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]) -> None:
        if config.linear_maps == "quaternion":
            use_quaternions(blocks.values())

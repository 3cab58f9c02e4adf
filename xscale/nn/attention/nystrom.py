"""Xiong et al. 2021 (Nystromformer): Nystrom approximation of softmax attention by landmarks, means of segments.

softmax(q k~^T) (softmax(q~ k~^T))^+ softmax(q~ k^T) v, computed from the right. The pseudo-inverse A^+ is iterated:
Z <- Z (13 - AZ (15 - AZ (7 - AZ))) / 4. `identity` is Chen et al. 2020 (CSALR): (A + 1)^-1, which always exists.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import Init


@CORES.register(
    "nystrom",
    traits=CoreTraits(
        normalised=False,
        causal=False,
        bidirectional=True,
        # Landmarks are means of all queries: a generated token would depend on later ones.
        cross=False,
        per_head=True,
        cost="2 * landmarks * (T + S) * K + 2 * landmarks**2 * K + 24 * landmarks**3",
        context=("ulysses",),
    ),
)
class Nystrom(Core):
    kernel: Parameter

    class Config(Core.Config):
        renamed = {"convolution": "conv_kernel_size"}

        landmarks: PositiveInt = 64
        """Segments whose means are the landmarks; at most the tokens of the shorter sequence."""
        inverse: Literal["pseudo", "identity"] = "pseudo"
        """pseudo: the pseudo-inverse by six iterations; identity: (A + 1)^-1."""
        conv_kernel_size: NonNegativeInt = 0
        """Kernel size of a depthwise convolution of the values, added to the output (the paper: 33); 0: none."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        if config.conv_kernel_size:
            start = Init(std=config.conv_kernel_size**-0.5)
            self.declare("kernel", (heads, config.conv_kernel_size), ("heads", "state"), start)

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if not config.conv_kernel_size:
            return problems
        if config.conv_kernel_size % 2 == 0:
            what = f"must be odd, got {config.conv_kernel_size}"
            problems.append(
                Problem(
                    f"{path}.conv_kernel_size", what, choices=take(config.conv_kernel_size + 1, 0)
                )
            )
        if dims.cross:
            what = "values of another sequence cannot be added to this one"
            problems.append(Problem(f"{path}.conv_kernel_size", what, choices=take(0)))
        return problems

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert not mask.causal
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        count = min(self.config.landmarks, q.shape[2], k.shape[2])
        q = upcast(q) * q.shape[-1] ** -0.5
        k = upcast(k)
        values = upcast(v)
        q_landmarks, k_landmarks = segment_means(q, count), segment_means(k, count)
        left = (q @ k_landmarks.mT).softmax(-1)  # [B, H, T, M]
        middle = (q_landmarks @ k_landmarks.mT).softmax(-1)  # [B, H, M, M]
        right = (q_landmarks @ k.mT).softmax(-1) @ values  # [B, H, M, K]
        if self.config.inverse == "pseudo":
            right = pseudo_inverse(middle) @ right
        else:
            right = torch.linalg.solve(
                middle + torch.eye(count, dtype=middle.dtype, device=q.device), right
            )
        out = left @ right
        if self.config.conv_kernel_size:
            out = out + self._convolve(values)
        return out.to(v.dtype)

    def _convolve(self, v: Tensor) -> Tensor:
        kernel = self.use(self.kernel).to(v.dtype)
        rows = v.permute(0, 3, 1, 2).flatten(0, 1)  # [B*K, H, T]
        out = F.conv1d(rows, kernel[:, None], padding=kernel.shape[1] // 2, groups=kernel.shape[0])
        return out.view(v.shape[0], v.shape[3], *out.shape[1:]).permute(0, 2, 3, 1)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        count = min(self.config.landmarks, queries, keys)
        inverse = (
            24 * count**3 + count * count * head_width if self.config.inverse == "pseudo" else 0
        )
        attention = 2 * count * (queries + keys) * head_width + count * count * head_width
        return float(
            heads * (attention + inverse + queries * self.config.conv_kernel_size * head_width)
        )


def segment_means(x: Tensor, count: int) -> Tensor:
    """Means of `count` segments of nearly equal length: [B, H, T, K] -> [B, H, count, K]."""
    length = x.shape[2]
    if length % count == 0:
        return x.view(*x.shape[:2], count, -1, x.shape[3]).mean(3)
    places = torch.arange(length, device=x.device) * count // length
    sizes = torch.bincount(places, minlength=count).to(x.dtype)
    sums = x.new_zeros(*x.shape[:2], count, x.shape[3]).index_add(2, places, x)
    return sums / sizes[:, None]


def pseudo_inverse(a: Tensor, steps: int = 6) -> Tensor:
    """Moore-Penrose inverse of square matrices [..., M, M], approximated by a third-order iteration."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    scale = a.abs().sum(-1).amax(-1) * a.abs().sum(-2).amax(-1)
    z = a.mT / scale[..., None, None]
    for _ in range(steps):
        az = a @ z
        z = 0.25 * z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az)))
    return z

"""Small mixtures for the tests, built from plain data as a recipe would."""

from typing import Any

import torch
from torch import Tensor, nn

from xscale.core.config import Config, decode
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.ffn.moe.router.router import ROUTERS, Router, RouterDims
from xscale.nn.materialize import materialize
from xscale.nn.module import Module, name_modules
from xscale.nn.post_step import WeightWriter
from xscale.nn.tokens import Tokens

D, V, LENGTH = 12, 50, 24


def dims(*, causal: bool = False, width: int = D) -> Dims:
    """A model of two layers; not causal, so that every router is allowed."""
    return Dims(width=width, depth=2, vocabulary=V, length=LENGTH, causal=causal, std=0.5)


def config_of(kind: str, **data: Any) -> Config:
    """The config of an ffn."""
    return decode(FFNS.get(kind).part.Config, data)


def mixture(*, seed: int = 0, width: int = D, dtype: torch.dtype = torch.float64, **data: Any) -> Moe:
    """A moe ffn in float64, in training mode."""
    data = {"experts": 4, "expert": {"kind": "gated", "hidden": 8}} | data
    moe = Moe(config_of("moe", **data), dims(width=width))  # type: ignore[arg-type]
    materialize(moe, seed, dtype=dtype)
    name_modules(moe)
    return moe


def router(kind: str, experts: int = 4, groups: int = 1, **data: Any) -> Router:
    """A router in float64, in training mode, with logits of some size."""
    entry = ROUTERS.get(kind)
    sizes = RouterDims(D, experts, V, groups, dims().init)
    config = decode(entry.part.Config, data)
    assert not entry.part.check(config, sizes, kind)
    part: Router = entry.part(config, sizes)
    materialize(part, 0, dtype=torch.float64)
    name_modules(part)
    return part


def sample(rows: int = 2, length: int = LENGTH, seed: int = 1, **others: Any) -> tuple[Tensor, Tokens]:
    """Hidden states [B, T, D] in float64 and their tokens; one unit of auxiliary loss weighs one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, D, generator=generator, dtype=torch.float64)
    ids = torch.randint(V, (rows, length), generator=generator)
    return x, Tokens.from_ids(ids, **{"aux_loss_weight": 1.0, **others})


def set_equal_counts(model: nn.Module, vocabulary: int) -> None:
    """Give parts that read the counts of the training data those of data with each id as often."""
    for module in model.modules():
        if isinstance(module, Module) and module.reads_token_counts:
            module.set_token_counts([1.0] * vocabulary, WeightWriter())

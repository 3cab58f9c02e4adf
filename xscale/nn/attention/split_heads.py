"""Roy et al. 2021 (Routing Transformer) and others: heads of several kinds in one layer, each kind with its own core.

Routing Transformer has half of its heads local and half routed. The order of heads does not matter to what can be
learned, so the cores take turns: with equal shares, the first of two cores has the heads 0, 2, 4 ... Then each rank of
tensor parallelism, and each group of heads that share keys, has heads of all cores. The registered traits are those of
the default config; those of another follow from its cores (`traits_of`).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from math import gcd
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from xscale.core.config import PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import kinds, multiples_near, take
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import CORES, SCORES, Core, CoreSlot, CoreTraits
from xscale.nn.attention.ops.dense import repeat_kv
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims
from xscale.nn.pattern.window import Window

ANY_CORE = ("position_dependent", "random", "running_stats")
"""Traits that hold if one of the cores has them; all others hold if every core has them."""


@CORES.register(
    "split_heads",
    traits=replace(
        SCORES,
        position_dependent=True,
        prefix=False,
        cross=False,
        static_decode=True,
        cost="2 * T * w * K",
    ),
)
class SplitHeads(Core):
    class Config(Core.Config):
        cores: tuple[CoreSlot, ...] = Field(
            default=(BlockSparse.Config(pattern=Window.Config()), Softmax.Config()), min_length=2
        )
        """The cores."""
        shares: tuple[PositiveInt, ...] | None = None
        """Share of the heads that each core has: (1, 3) gives the first a quarter; null: equal shares."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.shares = _shares(config)
        self.head_period = sum(self.shares)
        periods = heads // self.head_period
        cores: list[Core] = [
            CORES.build(core, dims, share * periods, head_width)
            for core, share in zip(config.cores, self.shares, strict=True)
        ]
        self.cores = nn.ModuleList(cores)
        self.widths = (head_width,) * len(cores)
        """Width of the queries and keys of each core's heads: a mixer with narrower ones, whose channels behind it are
        zeros, sets it."""
        self.uses_relative_bias = all(core.uses_relative_bias for core in cores)

    @classmethod
    def example(cls) -> Any:
        return cls.Config(
            cores=(BlockSparse.Config(pattern=Window.Config(), block=16), Softmax.Config())
        )

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        problems = [
            problem
            for index, core in enumerate(config.cores)
            for problem in CORES.of(core).part.check(core, dims, f"{path}.cores.{index}")
        ]
        for index, core in enumerate(config.cores):
            if CORES.of(core).part.traits_of(core).previous_scores:
                what = f"'{core.kind}' hands its scores to the same heads of the next block, and has some heads only"
                problems.append(
                    Problem(
                        f"{path}.cores.{index}",
                        what,
                        choices=kinds(["softmax"], f"{path}.cores.{index}"),
                    )
                )
        if config.shares is not None and len(config.shares) != len(config.cores):
            what = f"{len(config.shares)} shares for {len(config.cores)} cores"
            problems.append(Problem(f"{path}.shares", what, choices=take(None)))
        return problems

    @classmethod
    def check_heads(cls, config: Config, heads: int, path: str) -> list[Problem]:
        if config.shares is not None and len(config.shares) != len(config.cores):
            return []
        period = sum(_shares(config))
        if heads % period:
            what = f"heads={heads} cannot be shared as {' to '.join(map(str, _shares(config)))}"
            fitting = take(
                *multiples_near(heads, period), key=f"{path.removesuffix('.core')}.heads"
            )
            return [Problem(f"{path}.shares", what, choices=take(None) + fitting)]
        return [
            problem
            for index, (core, share) in enumerate(zip(config.cores, _shares(config), strict=True))
            for problem in CORES.of(core).part.check_heads(
                core, heads // period * share, f"{path}.cores.{index}"
            )
        ]

    @classmethod
    def parts(cls, config: Config, path: str) -> list[tuple[Any, str]]:
        return [
            part
            for index, core in enumerate(config.cores)
            for part in CORES.of(core).part.parts(core, f"{path}.cores.{index}")
        ]

    @classmethod
    def shares_qk(cls, config: Config) -> bool:
        return any(CORES.of(core).part.shares_qk(core) for core in config.cores)

    @property
    def counts_keys(self) -> bool:
        return any(core.counts_keys for core in self.cores if isinstance(core, Core))

    @property
    def traits(self) -> CoreTraits:
        return self.traits_of(self.config)

    @classmethod
    def traits_of(cls, config: Config) -> CoreTraits:
        traits: list[CoreTraits] = [CORES.of(core).part.traits_of(core) for core in config.cores]
        flags = {
            field.name: (any if field.name in ANY_CORE else all)(
                getattr(core_traits, field.name) for core_traits in traits
            )
            for field in fields(CoreTraits)
            if field.type is bool or field.type == "bool"
        }
        costs = [
            _with_values(core_traits.cost, core)
            for core_traits, core in zip(traits, config.cores, strict=True)
        ]
        shares = _shares(config)
        cost = " + ".join(f"{share} * ({cost})" for share, cost in zip(shares, costs, strict=True))
        # Heads can be spread over ranks whatever is done with them; the other styles are one core's own.
        ulysses = all("ulysses" in core_traits.context for core_traits in traits)
        return CoreTraits(
            **flags, cost=f"({cost}) / {sum(shares)}", context=("ulysses",) if ulysses else ()
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        # Keys stay grouped where each group of query heads has whole turns of the cores.
        if (q.shape[1] // k.shape[1]) % self.head_period:
            k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        outs, heads = [], torch.arange(q.shape[1], device=q.device)
        for (core, share, select), width in zip(self._turns(), self.widths, strict=True):
            core.first_head = self.first_head // self.head_period * share
            queries = select(q[..., :width], 1)
            keys, values = (
                select(x, 1) if x.shape[1] == q.shape[1] else x for x in (k[..., :width], v)
            )
            outs.append(
                core(queries, keys, values, _mask_of(mask, select, heads)).unflatten(1, (-1, share))
            )
        return torch.cat(outs, 2).flatten(1, 2)  # [B, H, T, K]

    def _turns(self) -> Iterator[tuple[Core, int, Callable[[Tensor, int], Tensor]]]:
        """Each core with its share, and a function that selects its heads from the dim `dim` of a tensor."""
        first = 0
        for core, share in zip(self.cores, self.shares, strict=True):
            assert isinstance(core, Core)

            def select(x: Tensor, dim: int, first: int = first, share: int = share) -> Tensor:
                turns = x.reshape(*x.shape[:dim], -1, self.head_period, *x.shape[dim + 1 :])
                return turns.narrow(dim + 1, first, share).flatten(dim, dim + 1)

            yield core, share, select
            first += share

    def tp_problems(self, tp: int, path: str) -> list[Problem]:
        """Nothing: the cores that compute list their own."""
        return []

    def head_cores(self, heads: int) -> list[tuple[Core, int]]:
        periods = heads // self.head_period
        return [
            pair for core, share, _ in self._turns() for pair in core.head_cores(periods * share)
        ]

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        periods = heads // self.head_period
        return sum(
            # Scores of narrow heads cost less than their weighted sums of values.
            core.multiply_adds(queries, keys, periods * share, head_width)
            * (width / head_width + 1)
            / 2
            for (core, share, _), width in zip(self._turns(), self.widths, strict=True)
        )


def _shares(config: SplitHeads.Config) -> tuple[int, ...]:
    """Heads of each core in one turn."""
    shares = config.shares
    # `check` refuses another number of shares than of cores; the traits are asked for before it.
    if shares is None or len(shares) != len(config.cores):
        shares = (1,) * len(config.cores)
    common = gcd(*shares)
    return tuple(share // common for share in shares)


def _with_values(cost: str, config: Any) -> str:
    """Return the formula with the values of the config's keys in place of their names."""
    for name, value in dict(config).items():
        cost = re.sub(rf"\b{name}\b", repr(value), cost)
    return cost


def _mask_of(
    mask: AttentionMask, select: Callable[[Tensor, int], Tensor], heads: Tensor
) -> AttentionMask:
    """Return the mask with the bias and the position's terms of the selected heads."""
    if mask.position_terms is not None:
        mask = replace(mask, position_terms=mask.position_terms.select_heads(select(heads, 0)))
    if mask.bias is not None:
        mask = replace(mask, bias=select(mask.bias, 1))
    bias = mask.relative_bias
    if bias is not None:
        return replace(mask, relative_bias=lambda offsets: select(bias(offsets), 0))
    return mask

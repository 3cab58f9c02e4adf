"""Roller et al. 2021, hash layers: a fixed hash of the token's id chooses its expert; nothing is learned.

y = E_hash(id)(x). With several hashes the experts form as many pools, each hash chooses from its own, and the
outputs add up: the paper's MultiHash, whose segments of one hidden layer are here experts of a smaller one.

The table of a balanced hash follows from the counts of the ids in the training data. A run counts them before its first
step; then the table is state of the model, in every checkpoint.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import Parameter

from xscale.core.errors import ConfigError, Problem
from xscale.core.requirements import must_divide, take
from xscale.nn.ffn.moe.assignment import balanced_hash
from xscale.nn.ffn.moe.router.router import ROUTERS, Router, RouterDims, RouterTraits
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.init import Init
from xscale.nn.post_step import WeightWriter
from xscale.nn.random import hash63
from xscale.nn.roles import Role, Seams
from xscale.nn.tokens import Tokens


@ROUTERS.register(
    "hash",
    traits=RouterTraits(
        choice="token",
        top_k=None,
        drops=True,
        scope="token",
        causal=True,
        balance="none",
        learned=False,
    ),
    deviations=("With several hashes the segments of one hidden layer are smaller experts.",),
)
class HashRouter(Router):
    table: Parameter
    seams: ClassVar[Seams] = {"counted": Role.TOKEN_TABLE}

    class Config(Router.Config):
        function: Literal["random", "balanced", "rolled", "bigram", "previous", "position"] = (
            "random"
        )
        """random: of the id; balanced: a table of ids, the most frequent first, each to the expert with least load;
        rolled: ids to experts round-robin, one expert later for each seed; bigram: of the id and the previous one;
        previous: of the previous id; position: of the position in the document."""
        hashes: int = Field(default=1, ge=1)
        """Hash functions, and experts of each token."""
        seed: int = Field(default=0, ge=0)
        """Seed of the hash function. Layers that should differ need different seeds."""
        frequencies: tuple[Annotated[float, Field(ge=0)], ...] | None = None
        """Frequency of each id in the data, for function = balanced; null: the run counts the ids of its training data
        before its first step."""

    def __init__(self, config: Config, dims: RouterDims) -> None:
        super().__init__()
        self.config: Any = config
        self.experts = dims.experts
        self.per_hash = dims.experts // config.hashes
        # Not a buffer: it follows from the config, so it is neither saved nor left behind on the meta device.
        self.fixed_table: Tensor | None = None
        self.reads_token_counts = config.function == "balanced" and config.frequencies is None
        if self.reads_token_counts:
            # A parameter, so that it is initialised, sharded and saved like others; -1: the counts are not set.
            shape = (config.hashes, dims.vocabulary)
            self.declare(
                "table", shape, ("state", "state"), Init("constant", value=-1.0), decays=False
            )
            self.table.requires_grad_(False)
        elif config.function == "balanced" and config.frequencies is not None:
            self.fixed_table = self._table(config.frequencies)

    def _table(self, frequencies: Sequence[float]) -> Tensor:
        """Expert of each id in the pool of each hash, int64 [hashes, V]."""
        seeds = range(self.config.seed, self.config.seed + self.config.hashes)
        return torch.stack([balanced_hash(frequencies, self.per_hash, seed) for seed in seeds])

    def set_token_counts(self, counts: Sequence[float], weights: WeightWriter) -> None:
        weights.write(self.table, self._table(counts))

    @classmethod
    def check(cls, config: Config, dims: RouterDims, path: str) -> list[Problem]:
        problems = must_divide(path, "hashes", config.hashes, "experts", dims.experts)
        frequencies = config.frequencies
        if frequencies is not None and config.function != "balanced":
            what = f"function={config.function} uses no frequencies"
            problems.append(
                Problem(
                    f"{path}.frequencies",
                    what,
                    choices=take(None) + take("balanced", key=f"{path}.function"),
                )
            )
        elif frequencies is not None and (
            len(frequencies) != dims.vocabulary or min(frequencies) < 0
        ):
            what = f"{len(frequencies)} frequencies for a vocabulary of {dims.vocabulary}"
            fix = "Or give one number of 0 or more for each id."
            problems.append(Problem(f"{path}.frequencies", what, fix, choices=take(None)))
        return problems

    @classmethod
    def experts_per_token(cls, config: Config, experts: int) -> float:
        return float(config.hashes)

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        pools = [
            self.hash(tokens, number) + number * self.per_hash
            for number in range(self.config.hashes)
        ]
        selected = torch.stack(pools, dim=1)  # [N, k]
        probabilities = torch.zeros(len(x), self.experts, dtype=x.dtype, device=x.device)
        probabilities.scatter_(1, selected, 1 / self.config.hashes)
        weights = torch.ones(selected.shape, dtype=x.dtype, device=x.device)
        return Routing.from_topk(
            self.replay(selected, tokens), weights, probabilities, selected=selected
        )

    def hash(self, tokens: Tokens, number: int) -> Tensor:
        """[N]: hash function `number` of each token, in [0, experts per hash)."""
        ids = tokens.ids
        function = self.config.function
        seed = self.config.seed + number
        if function == "balanced":
            table = (
                self.use(self.table)
                if self.fixed_table is None
                else self.fixed_table.to(ids.device)
            )
            return self.counted(table[number])[ids.flatten()].long()
        if function == "rolled":
            return torch.remainder(ids.flatten() + seed, self.per_hash)
        if function == "random":
            hashed = hash63(seed, ids)
        elif function == "position":
            hashed = hash63(seed, tokens.positions)
        elif function == "previous":
            hashed = hash63(seed, self.previous(tokens))
        else:
            hashed = hash63(seed, ids, self.previous(tokens))
        return torch.remainder(hashed.flatten(), self.per_hash)

    def counted(self, row: Tensor) -> Tensor:
        """Return `row`, the experts [V] of the ids; refuses one without counts. A seam: a plan has no numbers."""
        if not row.is_cuda and bool((row < 0).any()):
            what = "a balanced hash follows the counts of the ids in the training data, which only a run has"
            raise ConfigError(
                f"{self.path}.frequencies", what, "Give one number of 0 or more for each id."
            )
        return row

    def why_not_static(self) -> str | None:
        reads_previous = self.config.function not in ("balanced", "rolled", "random", "position")
        return "it keeps the id of the token before" if reads_previous else None

    def previous(self, tokens: Tokens) -> Tensor:
        """[B, T]: the id before each token in its document, -1 at the document's start."""
        ids = tokens.ids
        before = torch.full_like(ids[:, :1], -1)
        if tokens.forward.cache is not None:
            before = tokens.forward.cache.get(self.path, before)
            tokens.forward.cache[self.path] = ids[:, -1:]
        return torch.cat([before, ids[:, :-1]], dim=1).masked_fill(tokens.positions == 0, -1)

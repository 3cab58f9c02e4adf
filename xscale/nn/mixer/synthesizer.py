"""Tay et al. 2021 (Synthesizer): scores that are predicted from each token alone, or that are parameters.

    y = softmax(S) G(x),  G(x) = x W_v, in each head, with S [T, T] cropped from scores for N positions by
    dense                S_i = W_2 ReLU(W_1 x_i + b_1) + b_2, with N entries
    factorized_dense     S_i = tile(A_i) * repeat(B_i), A_i and B_i as above, with a and b entries, a b >= N
    random               S = R, [N, N], trained or fixed
    factorized_random    S = R_1 R_2^T, both [N, k]

W_1 has the hidden width K in each head, so that all heads together have the paper's D^2 + D N parameters, and D^2 +
D (a + b) when factorised. Rows and columns of S are positions in the document, from 0. Longer sequences than N fail.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import FractionBelowOne, PositiveFloat, PositiveInt
from xscale.core.errors import ConfigError, Problem
from xscale.core.requirements import at_least, at_most, take
from xscale.nn.attention.ops.dense import masked_softmax, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS, Init
from xscale.nn.linear import Linear
from xscale.nn.mixer.kv_cache import grow_buffer
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS
from xscale.nn.mixer.value_mixer import ValueMixer
from xscale.nn.tokens import Tokens

USED_BY: dict[str, tuple[str, ...]] = {
    "hidden": ("dense", "factorized_dense"),
    "factor_width": ("factorized_dense",),
    "factor_columns": ("factorized_random",),
    "trainable": ("random", "factorized_random"),
    "scores_std": ("random", "factorized_random"),
}
"""Config key -> the generators that have it."""


class ValueCache:
    """Values of one mixer during generation."""

    def __init__(self) -> None:
        self._v: Tensor | None = None
        self.length = 0

    def append(self, v: Tensor) -> Tensor:
        """Append [B, H, T, K] and return a view of everything cached, [B, H, S, K]."""
        start, count = self.length, v.shape[2]
        self._v = grow_buffer(self._v, v, start)
        self._v.narrow(2, start, count).copy_(v)
        self.length = start + count
        return self._v.narrow(2, 0, self.length)


@MIXERS.register(
    "synthesizer",
    traits=CAUSAL_OR_BIDIRECTIONAL,
    deviations=(
        "The second factor of factorized_dense is repeated entry by entry, so that all pairs of entries occur; the "
        "paper tiles both, which gives equal scores to some columns unless a and b have no common divisor.",
    ),
)
class Synthesizer(ValueMixer):
    scores: Parameter
    scores_bias: Parameter
    tiled: Parameter
    tiled_bias: Parameter
    repeated: Parameter
    repeated_bias: Parameter
    rows: Parameter
    columns: Parameter

    class Config(ValueMixer.Config):
        generator: Literal["dense", "factorized_dense", "random", "factorized_random"] = "dense"
        """dense: a perceptron predicts a token's row of scores; random: the scores are parameters; factorized: of two
        short vectors, or of two narrow matrices."""
        length: PositiveInt | None = None
        """N, positions that have scores; null: the data's sequence length."""
        hidden: PositiveInt | None = None
        """Hidden width of each head's perceptron (dense, factorized_dense); null: head_width."""
        factor_width: PositiveInt | None = None
        """a, entries of the tiled vector (factorized_dense); null: the square root of N, rounded up. The other has
        b = N / a, rounded up."""
        factor_columns: PositiveInt | None = None
        """k, columns of R_1 and R_2 (factorized_random); null: 8, as the paper."""
        trainable: bool | None = None
        """Whether the scores are trained (random, factorized_random); false is the paper's Fixed Random. Null: true."""
        scores_std: PositiveFloat | None = None
        """Standard deviation of the initial scores (random, factorized_random); null: 1."""
        dropout: FractionBelowOne = 0.0
        """Dropout probability of the attention weights."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.generator, self.dropout = config.generator, config.dropout
        self.length = config.length or dims.length
        heads, length = config.heads, self.length
        if config.generator in ("dense", "factorized_dense"):
            hidden = config.hidden or self.head_width
            self.up = Linear.from_width(dims, heads * hidden, "heads", bias=True)
            factor = config.factor_width or next(a for a in range(1, length + 1) if a * a >= length)
            sizes = {"tiled": factor, "repeated": -(-length // factor)}
            if config.generator == "dense":
                self.declare(
                    "scores", (heads, length, hidden), ("heads", "tokens", "state"), dims.init
                )
                self.declare(
                    "scores_bias", (heads, length), ("heads", "tokens"), ZEROS, decays=False
                )
                sizes = {}
            for name, size in sizes.items():
                self.declare(name, (heads, size, hidden), ("heads", "state", "state"), dims.init)
                self.declare(f"{name}_bias", (heads, size), ("heads", "state"), ZEROS, decays=False)
            return
        std, columns = config.scores_std or 1.0, config.factor_columns or 8
        if config.generator == "random":
            self.declare(
                "scores", (heads, length, length), ("heads", "tokens", "tokens"), Init(std=std)
            )
        else:
            # A score is a sum of `columns` products.
            start = Init(std=(std**2 / columns) ** 0.25)
            for name in ("rows", "columns"):
                self.declare(name, (heads, length, columns), ("heads", "tokens", "state"), start)
        if config.trainable is False:
            for name in self.axes:
                self.get_parameter(name).requires_grad_(False)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if config.length is not None and config.length < dims.length:
            what = f"{config.length} positions have scores, and a sequence has {dims.length} tokens"
            problems.append(at_least(f"{path}.length", what, dims.length, *take(None)))
        if config.factor_width is not None and config.factor_width > (config.length or dims.length):
            what = f"{config.factor_width} entries are more than the {config.length or dims.length} positions"
            problems.append(
                at_most(f"{path}.factor_width", what, config.length or dims.length, *take(None))
            )
        for key, generators in USED_BY.items():
            if getattr(config, key) is not None and config.generator not in generators:
                what = f"the generator '{config.generator}' has none"
                choices = take(None) + take(*generators, key=f"{path}.generator")
                problems.append(Problem(f"{path}.{key}", what, choices=choices))
        return problems

    def mix(self, x: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        queries = v.shape[2]
        if tokens.forward.cache is not None:
            if self.path not in tokens.forward.cache:
                tokens.forward.cache[self.path] = ValueCache()
            v = tokens.forward.cache[self.path].append(v)
        keys = v.shape[2]
        if keys > self.length:
            what = f"{self.path} has scores for {self.length} positions, and the sequence has {keys} tokens"
            fix = f"Take a sequence of at most {self.length} tokens, or train with the mixer's length={keys} or more."
            raise ConfigError("data.sequence_length", what, fix)
        if self.generator in ("dense", "factorized_dense"):
            scores = self._scores_of_tokens(x, v.shape[1], keys, tokens)
        else:
            scores = self._scores_of_positions(keys - queries, queries, keys, tokens)
        allowed = self._allowed(queries, keys, tokens)
        weights = masked_softmax(
            upcast(scores), None if allowed is None else ~allowed
        )  # [B or 1, H, T, S]
        if self.training and tokens.forward.rng_seed is not None and self.dropout:
            weights = weights.expand(len(x), -1, -1, -1)
            weights = self.random.dropout(
                weights, self.dropout, ("batch", "heads", "state", "state")
            )
        weights = weights.to(v.dtype)
        if len(weights) == len(v):
            return weights @ v
        # The samples share their weights: one product of each head.
        together = v.permute(1, 2, 0, 3).flatten(2)  # [H, S, B * K]
        mixed = (weights[0] @ together).view(v.shape[1], queries, len(v), -1)  # [H, T, B, K]
        return mixed.permute(2, 0, 1, 3)

    def _scores_of_tokens(self, x: Tensor, heads: int, keys: int, tokens: Tokens) -> Tensor:
        """Scores [B, H, T, S] of the dense generators, by x [B, T, D]."""
        hidden = (
            F.relu(self.up(x)).view(*x.shape[:2], heads, -1).transpose(1, 2)
        )  # [B, H, T, hidden]
        if self.generator == "dense":
            weight, bias = self.use(self.scores)[:, :keys], self.use(self.scores_bias)[:, :keys]
            scores = hidden @ weight.mT + bias[:, None]
        else:
            tiled = (
                hidden @ self.use(self.tiled).mT + self.use(self.tiled_bias)[:, None]
            )  # [B, H, T, a]
            repeated = (
                hidden @ self.use(self.repeated).mT + self.use(self.repeated_bias)[:, None]
            )  # [B, H, T, b]
            scores = (repeated[..., None] * tiled[..., None, :]).flatten(-2)[..., :keys]
        if tokens.documents is None:
            return scores
        return scores.gather(3, tokens.positions[:, None, None, :].expand(*scores.shape[:3], -1))

    def _scores_of_positions(self, first: int, queries: int, keys: int, tokens: Tokens) -> Tensor:
        """Scores [B or 1, H, T, S] of the random generators, for queries from position `first` on."""
        positions = tokens.positions
        if self.generator == "random":
            scores = self.use(self.scores)
            if tokens.documents is None:
                return scores[None, :, first : first + queries, :keys]
            return scores[:, positions[:, :, None], positions[:, None, :]].transpose(0, 1)
        rows, columns = self.use(self.rows), self.use(self.columns)
        if tokens.documents is None:
            return (rows[:, first : first + queries] @ columns[:, :keys].mT)[None]
        return (rows[:, positions] @ columns[:, positions].mT).transpose(0, 1)

    def _allowed(self, queries: int, keys: int, tokens: Tokens) -> Tensor | None:
        def compute() -> Tensor | None:
            documents = tokens.documents
            return AttentionMask(
                queries=queries,
                keys=keys,
                causal=self.causal,
                offset=keys - queries,
                query_documents=documents,
                key_documents=documents,
                device=tokens.positions.device,
            ).allowed

        allowed: Tensor | None = tokens.shared_values.get_or_compute(
            f"allowed/{self.causal}/{queries}/{keys}", compute
        )
        return allowed

    def multiply_adds(self, queries: int, keys: int) -> float:
        # Parameters with an axis of tokens are not counted with the weight matrices. The product of the two narrow ones
        # is computed once for all samples of a micro-batch, and left out.
        predicted = self.scores.shape[2] if self.generator == "dense" else 0
        pairs = queries * keys / (2 if self.causal else 1)
        return float(self.heads * pairs * (self.head_width + predicted))

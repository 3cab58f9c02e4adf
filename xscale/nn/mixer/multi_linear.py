"""Ma et al. 2019 (Tensorized Transformer), section 3: multi-linear attention by block-term tensor decomposition.

    T_b[i, j, m] = sum_r g_b[r] Q[i, r] K[j, r] V[m, r],  Q = x W_q,  K = x W_k,  V = x W_v,  all [N, R]
    y = SplitConcat((1 / h) sum_b T_b) W_o,  so that y_i = (1 / h) sum_b sum_jm T_b[i, j, m] W_o[j, m]

with W_o [N, N, D]. The h blocks have the same Q, K and V, and each a diagonal core tensor g_b = softmax(z_b) [R]. No
tensor of N^3 elements is formed: with g the mean of all g_b,

    y_i = sum_r g[r] Q[i, r] C[r],  C[r] = sum_jm K[j, r] V[m, r] W_o[j, m]

takes N^2 R D multiply-adds. In a causal model T_b[i, j, m] is 0 where j or m is later than i, and C depends on i:

    C_i[r] = C_{i-1}[r] + K[i, r] sum_{m <= i} V[m, r] W_o[i, m] + V[i, r] sum_{j < i} K[j, r] W_o[j, i]

Packed documents are computed one by one, each with the rows of W_o from its first token on.
"""

import torch
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.dims import Dims, check_trained_length
from xscale.nn.init import Init
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS
from xscale.nn.mixer.positional_mlp import PositionalMixer
from xscale.nn.mixer.synthesizer import ValueCache
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "multi_linear",
    traits=CAUSAL_OR_BIDIRECTIONAL,
    deviations=(
        "In a causal model the elements of the tensor whose key or value is later than the query are 0; the authors' "
        "code for language models masks nothing.",
        "The diagonals of the core tensors are softmaxes of learned numbers; the authors' code does not train them.",
        "The authors' code for language models adds a second tensor whose keys are the relative positions of "
        "Transformer-XL; here positions enter with the embeddings.",
    ),
)
class MultiLinear(PositionalMixer):
    seams = {"first_hidden": Role.FIRST_HIDDEN}
    diagonals: Parameter
    output: Parameter

    class Config(PositionalMixer.Config):
        factors: PositiveInt = 40
        """R, columns of Q, K and V; the paper takes the width of one head."""
        blocks: PositiveInt = 2
        """h, core tensors."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.causal, self.length = dims.causal, config.length or dims.length
        self.factors = config.factors
        self.first_hidden = 0
        """Index in the model of the first local factor: set when factors are sharded over ranks."""
        # Products of three factors are of the size of their cubes: they start at the size of the mixer's input.
        start = Init(std=dims.width**-0.5)
        self.q, self.k, self.v = (
            Linear(dims.width, config.factors, ("ffn", "width"), start) for _ in range(3)
        )
        self.declare(
            "diagonals",
            (config.blocks, config.factors),
            ("state", "state"),
            Init(std=1.0),
            decays=False,
        )
        # A token's output sums N^2 products.
        start = Init(std=dims.residual_init.std / dims.std / self.length)
        self.declare(
            "output", (self.length, self.length, dims.width), ("tokens", "tokens", "width"), start
        )

    @classmethod
    def example(cls) -> "MultiLinear.Config":
        return cls.Config(factors=8)

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)  # [B, T, R]
        diagonal = upcast(self.use(self.diagonals)).softmax(-1).mean(0)  # [R]
        q = q * diagonal.narrow(0, self.first_hidden, q.shape[-1]).to(q.dtype)
        weight = self.use(self.output).to(q.dtype)
        if tokens.documents is None or tokens.forward.cache is not None:
            return self._mix(q, k, v, weight, tokens)
        rows = []
        for row, documents in enumerate(tokens.documents):
            lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
            row_q, row_k, row_v = (x[row : row + 1].split(lengths, 1) for x in (q, k, v))
            parts = zip(row_q, row_k, row_v, strict=True)
            rows.append(
                torch.cat([self._mix(*part, weight=weight, tokens=tokens) for part in parts], 1)
            )
        return torch.cat(rows)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, tokens: Tokens) -> Tensor:
        """Output [B, T, D] of the factors [B, T, R] of sequences of one document; `weight` is W_o."""
        if self.causal:
            return self._causal(q, k, v, weight, tokens)
        length = q.shape[1]
        check_trained_length(self.path, length, self.length)
        inner = torch.einsum("jmd,bmr->bjrd", weight[:length, :length], v)
        total = torch.einsum("bjr,bjrd->brd", k, inner)
        return torch.einsum("bir,brd->bid", q, total)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, tokens: Tokens) -> Tensor:
        """Output [B, T, D] of the new tokens' factors [B, T, R]; `weight` is W_o."""
        new_k = k
        new_v = v
        earlier = None
        if tokens.forward.cache is not None:
            factors, earlier = tokens.forward.cache.get(self.path, (ValueCache(), None))
            k, v = factors.append(torch.stack((k, v), 1)).unbind(1)  # [B, S, R] each
        length, new = k.shape[1], q.shape[1]
        check_trained_length(self.path, length, self.length)
        first, places = length - new, torch.arange(length, device=q.device)
        new_places = places[first:]
        # A token's key meets its own value once: in the first of the two.
        by_value = (
            weight[first:length, :length] * (places <= new_places[:, None])[..., None]
        )  # [T, S, D] of i, m
        by_key = (
            weight[:length, first:length] * (places[:, None] < new_places)[..., None]
        )  # [S, T, D] of j, i
        step = new_k[..., None] * torch.einsum("imd,bmr->bird", by_value, v)
        step = step + new_v[..., None] * torch.einsum("jid,bjr->bird", by_key, k)  # [B, T, R, D]
        total = upcast(step).cumsum(1)
        if earlier is not None:
            total = total + earlier[:, None]
        if tokens.forward.cache is not None:
            tokens.forward.cache[self.path] = (factors, total[:, -1].clone())
        return torch.einsum("bir,bird->bid", q, total.to(q.dtype))

    @property
    def hidden_units(self) -> int:
        """R, factors of all ranks."""
        return self.factors

    def multiply_adds(self, queries: int, keys: int) -> float:
        # Causal, each of two products has half of the pairs of positions. W_o is not counted with the weight matrices.
        return float(self.factors * self.output.shape[-1] * (queries * keys + 2 * queries))

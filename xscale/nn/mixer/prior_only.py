"""Lin et al. 2022, section 4.4.4: attention with only a prior, whose weights depend on no query and no key.

    o_h = softmax(B_h) V_h,  V = x W_v

B [H, T, S] is the bias that a position would add to the scores, by distance or by positions.
"""

import torch
from torch import Tensor

from xscale.core.config import FractionBelowOne
from xscale.core.errors import Problem
from xscale.core.requirements import kinds
from xscale.nn.attention.ops.dense import masked_softmax, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS
from xscale.nn.mixer.synthesizer import ValueCache
from xscale.nn.mixer.value_mixer import ValueMixer
from xscale.nn.position.gaussian import Gaussian
from xscale.nn.position.position import POSITIONS, Position, PositionSlot
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "prior_only",
    traits=CAUSAL_OR_BIDIRECTIONAL,
)
class PriorOnly(ValueMixer):
    class Config(ValueMixer.Config):
        generator: PositionSlot = Gaussian.Config()
        """The generator of the prior: a position that adds a bias to scores."""
        dropout: FractionBelowOne = 0.0
        """Dropout probability of the attention weights."""

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.dropout = config.dropout
        self.generator: Position = POSITIONS.build(
            config.generator, dims, config.heads, self.head_width
        )

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        entry = POSITIONS.of(config.generator)
        if entry.traits.where != "bias":
            what = f"position '{entry.name}' adds no bias that positions alone determine"
            choices = kinds(POSITIONS.able(where="bias"), f"{path}.generator")
            problems.append(Problem(f"{path}.generator", what, choices=choices))
        return problems + list(entry.part.check(config.generator, dims, f"{path}.generator"))

    def mix(self, x: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        queries = v.shape[2]
        positions = tokens.positions
        if tokens.forward.cache is not None:
            v = tokens.forward.cache.setdefault(self.path, ValueCache()).append(v)
            # Cached tokens have the positions 0, 1, 2 ...
            positions = positions.new_tensor(range(v.shape[2])).expand(len(positions), -1)
        keys = v.shape[2]
        scores = self.generator.bias(tokens.positions, positions)
        assert scores is not None
        if scores.shape[1] != v.shape[1]:
            # Without parameters, which are sharded by head, a bias is that of all heads.
            scores = scores.narrow(1, self.first_head, v.shape[1])
        mask = AttentionMask(
            queries,
            keys,
            self.causal,
            offset=keys - queries,
            query_documents=tokens.documents,
            key_documents=tokens.documents,
            device=x.device,
        )
        scores = upcast(scores.to(torch.promote_types(scores.dtype, v.dtype)))
        weights = masked_softmax(
            scores, None if mask.allowed is None else ~mask.allowed.to(x.device)
        )
        if self.training and tokens.forward.rng_seed is not None and self.dropout:
            weights = weights.expand(len(x), -1, -1, -1)
            weights = self.random.dropout(
                weights, self.dropout, ("batch", "heads", "state", "state")
            )
        return weights.to(v.dtype) @ v

    def multiply_adds(self, queries: int, keys: int) -> float:
        return float(self.heads * queries * keys * self.head_width)

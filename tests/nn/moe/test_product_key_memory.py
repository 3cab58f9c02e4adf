"""Product keys find what a search through all keys finds (Lample et al. 2019)."""

import math

import pytest
import torch

from tests.nn.moe.mixture import D, config_of, dims, sample
from xscale.core.errors import ConfigError
from xscale.nn.ffn.ffn import FFNS
from xscale.nn.ffn.product_key_memory import ProductKeyMemory
from xscale.nn.materialize import materialize


def memory(**data: object) -> ProductKeyMemory:
    config = config_of("product_key_memory", **{"subkeys": 6, "top_k": 3, "heads": 2, "query_width": 8} | data)
    assert not ProductKeyMemory.check(config, dims(), "ffn")
    part: ProductKeyMemory = FFNS.build(config, dims())
    materialize(part, 0, dtype=torch.float64)
    return part


@pytest.mark.parametrize("norm", ["layer", "none"])
def test_against_every_key(norm: str) -> None:
    x, tokens = sample(rows=1, length=9)
    part = memory(query_norm=norm)
    wanted = torch.zeros(9, D, dtype=torch.float64)
    for token in range(9):
        queries = (part.query.weight @ x[0, token]).view(2, 8)
        for head in range(2):
            q = queries[head]
            if norm == "layer":
                q = (q - q.mean()) / math.sqrt(q.var(correction=0).item() + 1e-5)
            # All 36 keys, each the concatenation of a sub-key of either set.
            keys = {
                (a, b): torch.cat([part.keys[0, head, a], part.keys[1, head, b]]) for a in range(6) for b in range(6)
            }
            scores = {pair: (key @ q).item() for pair, key in keys.items()}
            best = sorted(scores, key=lambda pair: -scores[pair])[:3]
            total = sum(math.exp(scores[pair]) for pair in best)
            for a, b in best:
                wanted[token] += math.exp(scores[a, b]) / total * part.values[a * 6 + b].detach()
    torch.testing.assert_close(part(x, tokens)[0], wanted)


def test_gradients() -> None:
    x, tokens = sample(rows=1, length=3)
    part = memory()
    names = [name for name, _ in part.named_parameters()]

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(part, dict(zip(names, weights, strict=True)), (x, tokens))

    weights = [parameter.detach().requires_grad_() for parameter in part.parameters()]
    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *weights), fast_mode=True)


def test_only_what_was_read_gets_a_gradient() -> None:
    x, tokens = sample(rows=1, length=2)
    part = memory()
    part(x, tokens).sum().backward()
    touched = (part.values.grad != 0).any(1).sum().item()
    assert 0 < touched <= 2 * 2 * 3


def test_what_is_refused() -> None:
    config = config_of("product_key_memory", subkeys=6, top_k=7)
    (problem,) = ProductKeyMemory.check(config, dims(), "ffn")
    assert str(problem) == "ffn.top_k: top_k=7 exceeds subkeys=6. Take 6, or ffn.subkeys=7. Lower values work too."
    for key, value in {"query_width": 7, "dropout": 1.0, "heads": 0}.items():
        with pytest.raises(ConfigError, match=key):
            config_of("product_key_memory", **{"subkeys": 6, "top_k": 3, key: value})

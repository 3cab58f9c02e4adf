"""The enhanced mask decoder against the paper's description, written out, its limit and what it refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import close, ready
from xscale.core.config import decode
from xscale.measure.flops import training_flops
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.encoder import Encoder
from xscale.nn.tokens import Tokens

VOCABULARY, LENGTH, WIDTH, HEADS = 17, 7, 12, 3
K = WIDTH // HEADS
DEBERTA = {"kind": "deberta", "buckets": None, "distance": 4}


def built(decoder: Any, *, problems: int = 0, part: Any = Encoder, **block: Any) -> Any:
    mixer = {"kind": "attention", "heads": HEADS, "bias": True}
    ffn = {"kind": "dense", "hidden": 8, "bias": True, "activation": "gelu"}
    block = {"mixer": mixer, "ffn": ffn, "norm": "layer", "residual": "post", **block}
    stack = {"depth": 3, "block": block, "mask_decoder": decoder}
    config = decode(part.Config, {"width": WIDTH, "position": DEBERTA, "stack": stack})
    refused = part.check(config, (VOCABULARY, LENGTH), "model")
    assert len(refused) == problems, [str(problem) for problem in refused]
    return " ".join(map(str, refused)) if problems else ready(part(config, VOCABULARY, LENGTH))


def attention(part: Any, queries: Tensor, keys: Tensor) -> Tensor:
    """Disentangled attention of one sample, for one head and pair of tokens at a time."""
    heads = []
    for h in range(HEADS):
        rows = slice(h * K, (h + 1) * K)

        def project(linear: Any, x: Tensor, rows: slice = rows) -> Tensor:
            return x @ linear.weight[rows].T + linear.bias[rows]

        q, k, v = project(part.q, queries), project(part.k, keys), project(part.v, keys)
        table = part.position.table
        scores = torch.empty(LENGTH, LENGTH, dtype=torch.float64)
        for i in range(LENGTH):
            for j in range(LENGTH):
                row = table[max(0, min(7, i - j + 4))]
                scores[i, j] = (q[i] @ k[j] + q[i] @ project(part.k, row) + k[j] @ project(part.q, row)) / (
                    3 * K
                ) ** 0.5
        heads.append(scores.softmax(-1) @ v)
    return torch.cat(heads, -1) @ part.o.weight.T + part.o.bias


def layer(block: Any, queries: Tensor, keys: Tensor) -> Tensor:
    """A post-norm block whose keys may be of other hidden states than its queries."""

    def norm(part: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), part.norm.weight, part.norm.bias, part.norm.eps)

    x = norm(block.mixer, queries + attention(block.mixer.part, queries, keys))
    ffn = block.ffn.part
    hidden = F.gelu(x @ ffn.up.weight.T + ffn.up.bias)
    return norm(block.ffn, x + hidden @ ffn.down.weight.T + ffn.down.bias)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_last_block_decodes_as_the_paper_says(steps: int) -> None:
    model = built({"steps": steps})
    ids = torch.tensor([[3, 5, 2, 2, 9, 16, 0]])
    first, second, last = model.stack.blocks.values()
    h = model.embed.table.weight[ids[0]]
    h = layer(second, layer(first, h, h), layer(first, h, h))
    x = h + last.position.weight[:LENGTH]
    for _ in range(steps):
        x = layer(last, x, h)
    out = model(Tokens.from_ids(ids))[0]
    assert close(out, x @ model.embed.table.weight.T)
    names = {name for name, _ in model.named_parameters() if "position.weight" in name}
    assert names == {"stack.blocks.2.position.weight"}, "absolute positions enter nowhere else"


def test_one_step_without_positions_is_the_plain_encoder() -> None:
    ids = torch.tensor([[3, 5, 2, 2, 9, 16, 0]])
    plain = built(None)
    assert close(built({"steps": 1, "position": "none"})(Tokens.from_ids(ids)), plain(Tokens.from_ids(ids)))
    assert not close(built({"steps": 2, "position": "none"})(Tokens.from_ids(ids)), plain(Tokens.from_ids(ids)))


def test_flops_count_each_step() -> None:
    one, two, three = (training_flops(built({"steps": steps}), LENGTH) for steps in (1, 2, 3))
    assert three - two == two - one > 0
    assert training_flops(built(None), LENGTH) == one


def test_what_cannot_decode_is_refused_with_what_would_work() -> None:
    assert "model.stack.mask_decoder: its keys are the output of the block before, and residual 'pre'" in built(
        {}, problems=1, residual="pre"
    )
    assert "this model is causal" in built({}, problems=1, part=Decoder)
    assert "block.position adds some to the input of every block" in built({}, problems=1, position="sinusoidal")
    assert "position 'alibi' acts within attention" in built({"position": "alibi"}, problems=1)
    shared = built({}, problems=1, mixer={"kind": "attention", "heads": HEADS, "shared_qk": True})
    assert "needs attention with a projection of each" in shared
    scores = built({}, problems=1, mixer={"kind": "attention", "heads": HEADS, "core": "prior_scores"})
    assert "core 'prior_scores' hands on its scores, and each step would have its own" in scores

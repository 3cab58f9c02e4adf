"""Star-Transformer's mixer against algorithm 1 of the paper, node by node, and as a whole encoder."""

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, drawn, numbered, ready
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.dims import Dims
from xscale.nn.mixer.star import StarAttention, StarTransformerLayers
from xscale.nn.model.encoder import Encoder
from xscale.nn.position.rope import Rope
from xscale.nn.tokens import Tokens
from xscale.parallel import context
from xscale.parallel.config import ParallelConfig
from xscale.parallel.tensor import apply

WIDTH, HEADS = 32, 4
DIMS = Dims(width=WIDTH, depth=2, vocabulary=9, length=256, causal=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def updated(part: StarAttention, node: Tensor, context: Tensor) -> Tensor:
    """LN(ReLU(MultiAtt(node, context))): node [B, D], context [B, C, D]."""
    heads = []
    for head in range(HEADS):
        rows = slice(head * 8, (head + 1) * 8)
        q, k, v = node @ part.q.weight[rows].T, context @ part.k.weight[rows].T, context @ part.v.weight[rows].T
        weights = ((q[:, None] * k).sum(-1) / 8**0.5).softmax(-1)
        heads.append((weights[..., None] * v).sum(1))
    return layer_norm((torch.cat(heads, -1) @ part.o.weight.T).clamp(min=0), part.norm.weight, part.norm.bias)


def algorithm(part: StarTransformerLayers, e: Tensor) -> Tensor:
    nodes, relay = [e[:, i] for i in range(e.shape[1])], e.mean(1)
    count = len(nodes)
    for step in range(part.steps):
        nodes = [
            updated(
                part.satellites,
                nodes[i],
                torch.stack((nodes[i - 1], nodes[i], nodes[(i + 1) % count], e[:, i], relay), 1),
            )
            for i in range(count)
        ]
        if step < part.steps - 1:
            assert part.relay is not None
            relay = updated(part.relay, relay, torch.stack((relay, *nodes), 1))
    return torch.stack(nodes, 1)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 11])
def test_it_is_the_papers_algorithm(length: int, steps: int) -> None:
    part = ready(StarTransformerLayers(StarTransformerLayers.Config(heads=HEADS, steps=steps), DIMS))
    x = drawn(2, length, WIDTH).requires_grad_()
    out, wanted = part(x, Tokens.from_ids(torch.zeros(2, length, dtype=torch.long))), algorithm(part, x)
    assert close(out, wanted)
    above = drawn(*out.shape, seed=3)
    leaves = [x, *part.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(ours, theirs)


def encoder() -> Encoder:
    block = {"mixer": {"kind": "star", "heads": HEADS, "steps": 3}, "ffn": "none", "residual": "none"}
    config = decode(Encoder.Config, {"width": WIDTH, "position": "learned", "stack": {"depth": 1, "block": block}})
    assert Encoder.check(config, (9, 20), "model") == []
    return ready(Encoder(config, 9, 20))


def test_a_block_adds_neither_norm_nor_residual_nor_ffn() -> None:
    model = encoder()
    ids = torch.randint(9, (2, 20), generator=torch.Generator().manual_seed(0))
    tokens = Tokens.from_ids(ids)
    part = model.get_submodule("stack.blocks.0.mixer.part")
    assert isinstance(part, StarTransformerLayers)
    inside = {name for name, _ in model.stack.named_parameters()} - {
        f"blocks.0.mixer.part.{name}" for name, _ in part.named_parameters()
    }
    assert inside == set()
    wanted = model.head(algorithm(part, model.embed(tokens)), None, tokens)
    assert close(model(tokens), wanted)


def test_what_it_cannot_do_is_refused() -> None:
    config = StarTransformerLayers.Config(heads=5)
    dims = Dims(width=WIDTH, depth=1, vocabulary=9, length=20, causal=False, position=Rope.Config())
    problems = StarTransformerLayers.check(config, dims, "mixer")
    assert [problem.path for problem in problems] == ["model.position", "mixer.heads"]
    with pytest.raises(ConfigError, match="cross_documents"):
        encoder()(Tokens.from_ids(torch.zeros(2, 20, dtype=torch.long), numbered(8, 12)))
    two = {mesh: decode(ParallelConfig, {"mesh": {mesh: 2}}) for mesh in ("tp", "cp")}
    assert "'star' has neither heads" in str(apply.check(encoder(), two["tp"], "parallel")[0])
    assert "mixer 'star' mixes the full sequence" in str(context.check(encoder(), two["cp"], "parallel")[0])

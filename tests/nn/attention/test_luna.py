"""Luna against its equations, one token at a time where it is causal; two layers of its encoder."""

import torch
from torch import Tensor

from tests.conformance.made import dims, drawn, ready, tokens
from tests.nn.attention.literal import agree, build, masks
from xscale.nn.attention.luna import Luna
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.blocks.block import BlockConfig
from xscale.nn.blocks.stack import Stack, StackConfig
from xscale.nn.ffn.ffn import Dense
from xscale.nn.mixer.luna import LunaAttention
from xscale.nn.norm.norm import Layer
from xscale.nn.residual.norms import Post


def test_both_ways_it_is_two_attentions() -> None:
    core = build(Luna.Config(slots=5), causal=False)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        packed = torch.softmax(core.slots @ k.mT / 8**0.5, -1)
        return torch.softmax(q @ (packed @ k).mT / 8**0.5, -1) @ (packed @ v)

    agree(core, AttentionMask(50, 50, False), reference)


def test_causal_it_is_the_running_mean() -> None:
    core = build(Luna.Config(slots=5), causal=True)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scores = k @ core.slots.mT / 8**0.5
        packed = torch.where(scores > 0, scores + 1, scores.exp())
        first, out = k.shape[2] - q.shape[2], []
        for at in range(q.shape[2]):
            past = slice(0, first + at + 1)
            count = first + at + 1
            # The authors' causal form scales the query as the others do.
            query = q[:, :, at : at + 1] / 8**0.5
            weights = torch.softmax(query @ (k[:, :, past].mT @ packed[:, :, past]) / count, -1)
            out.append(weights @ (packed[:, :, past].mT @ v[:, :, past]) / count)
        return torch.cat(out, 2)

    for mask in masks(90, causal=True, documents=False):
        agree(core, mask, reference, tolerance=1e-8)


def test_two_layers_carry_the_packed_sequence() -> None:
    """Equations 3 to 5 of the paper in each of two layers, the second with the first one's P'."""
    block = BlockConfig(
        mixer=LunaAttention.Config(heads=4, slots=5),
        ffn=Dense.Config(hidden=48),
        norm=Layer.Config(),
        residual=Post.Config(),
    )
    stack = ready(Stack(StackConfig(depth=2, block=block), dims(causal=False)))

    def attend(part: torch.nn.Module, queries: Tensor, context: Tensor) -> Tensor:
        q, k, v = (x @ part.get_parameter(f"{name}.weight").mT for name, x in
                   (("q", queries), ("k", context), ("v", context)))  # fmt: skip
        heads = [
            torch.softmax(q[..., at : at + 8] @ k[..., at : at + 8].mT / 8**0.5, -1) @ v[..., at : at + 8]
            for at in range(0, 32, 8)
        ]
        return torch.cat(heads, -1) @ part.get_parameter("o.weight").mT

    x = drawn(2, 30, 32)
    packed, text = x[:, :5], x[:, 5:]
    for layer in stack.blocks.values():
        y_packed = attend(layer.mixer.part.pack, packed, text)
        y_text = attend(layer.mixer.part.unpack, text, y_packed)
        packed, text = layer.mixer.norm(packed + y_packed), layer.mixer.norm(text + y_text)
        packed, text = (layer.ffn.norm(state + layer.ffn.part(state, tokens(30))) for state in (packed, text))
    torch.testing.assert_close(stack(x, tokens(30)), torch.cat((packed, text), 1))

"""Feedback Transformer: the paper's equations written out, over segments and documents, in generation, and refusals."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import close
from tests.nn.depth.segments import (
    DEPTH,
    HEADS,
    SEGMENT,
    VOCABULARY,
    WIDTH,
    decoder,
    logits_of_segments,
    refusals,
    text,
)
from xscale.generate.generate import generate
from xscale.nn.tokens import Tokens


def literal(model: Any, ids: Tensor, length: int) -> Tensor:
    """Logits of one text [T] by the equations of Fan et al. 2020, a token at a time, with norms behind the sums."""
    weights, k = dict(model.named_parameters()), WIDTH // HEADS
    rates = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    alpha = weights["stack.feedback.alpha"]
    w = alpha.exp() / alpha.exp().sum()
    memory: list[Tensor] = []
    logits = []
    for token in ids.tolist():
        x = weights["embed.table.weight"][token]
        states, read = [x], [torch.zeros(WIDTH, dtype=torch.float64), *memory[-length:]]
        for layer in range(DEPTH):

            def part(path: str, layer: int = layer) -> Tensor:
                return weights[f"stack.blocks.{layer}.{path}"]

            q = part("mixer.part.q.weight") @ x
            keys, values = ([part(f"mixer.part.{name}.weight") @ m for m in read] for name in "kv")
            heads = []
            for head in range(HEADS):
                own = slice(head * k, (head + 1) * k)
                u = part("mixer.part.position.content_bias")[head]
                v = part("mixer.part.position.position_bias")[head]
                scores = []
                for j, key in enumerate(keys):
                    distance = float(len(read) - j if j else length + 1)
                    r = torch.cat(((distance * rates).sin(), (distance * rates).cos()))
                    position = (q[own] + v) @ (part("mixer.part.position.weight")[own] @ r)
                    scores.append(((q[own] + u) @ key[own] + position) / math.sqrt(k))
                a = torch.softmax(torch.stack(scores), 0)
                heads.append(sum(share * value[own] for share, value in zip(a, values, strict=True)))
            y = part("mixer.part.o.weight") @ torch.cat(heads)
            x = F.layer_norm(x + y, (WIDTH,), part("mixer.norm.weight"), part("mixer.norm.bias"), 1e-5)
            y = part("ffn.part.down.weight") @ F.gelu(part("ffn.part.up.weight") @ x)
            x = F.layer_norm(x + y, (WIDTH,), part("ffn.norm.weight"), part("ffn.norm.bias"), 1e-5)
            states.append(x)
        memory.append(sum(w[number] * state for number, state in enumerate(states)))
        logits.append(weights["embed.table.weight"] @ x)
    return torch.stack(logits)


@pytest.mark.parametrize("length", [3, 6, 20])
def test_segments_are_those_of_the_paper(length: int) -> None:
    """A memory that passes from segment to segment makes a text of them."""
    model, ids = decoder({"feedback": {"length": length}}, residual="post"), text(3 * SEGMENT)
    expected = torch.stack([literal(model, row, length) for row in ids])
    assert close(logits_of_segments(model, ids), expected)
    assert close(model(Tokens.from_ids(ids)), expected)


def test_documents_that_are_apart_do_not_remember_each_other() -> None:
    model, ids = decoder({"feedback": {"length": 20}}), text(3 * SEGMENT)
    documents = torch.tensor([[0] * 6 + [1] * 6, [0] * 3 + [1] * 9])
    apart = logits_of_segments(model, ids, documents)
    for row, end in ((0, 6), (1, 3)):
        first = model(Tokens.from_ids(ids[row : row + 1, :end]))
        assert close(apart[row : row + 1, :end], first)
        assert not close(apart[row : row + 1, end:], model(Tokens.from_ids(ids[row : row + 1]))[:, end:])


@torch.no_grad()
def test_generation_reads_the_memories_in_the_cache() -> None:
    model = decoder({"feedback": {"length": 6}})
    ids = torch.randint(VOCABULARY, (SEGMENT + 1,), generator=torch.Generator().manual_seed(1))
    written = generate(model, ids, 2 * SEGMENT, end=-1, temperature=0, window=SEGMENT)
    for token in written:
        assert model(Tokens.from_ids(ids[None]))[0, -1].argmax() == token
        ids = torch.cat((ids, token[None]))


@pytest.mark.parametrize(
    ("stack", "changes", "words"),
    [
        ({"feedback": {"length": 3}, "segment_memory": {"length": 3}}, {}, "the blocks are called for one token"),
        ({"feedback": {"length": 3}}, {"mixer": {"core": "linear"}}, "core 'linear' has as many queries as keys"),
        ({"feedback": {"length": 3}}, {"residual": "reversible"}, "feedback"),
    ],
    ids=["two memories", "core", "reversible"],
)
def test_what_is_refused(stack: Any, changes: dict[str, Any], words: str) -> None:
    assert words in refusals(stack, **changes)

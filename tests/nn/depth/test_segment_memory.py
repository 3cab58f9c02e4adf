"""Memory of earlier segments: the paper's equations written out, the whole text where segments equal it, documents,
rows that begin anew, every core and position that may read it, gradients, and what is refused."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import close, dims, ready
from tests.nn.depth.segments import (
    DEPTH,
    HEADS,
    SEGMENT,
    WIDTH,
    decoder,
    logits_of_segments,
    refusals,
    states_of,
    text,
)
from xscale.nn.attention.core import CORES
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.depth.segment_memory.memory import EMPTY, position_reads_memory, reads_memory
from xscale.nn.position.position import POSITIONS
from xscale.nn.segment_state import SEGMENT_STATE
from xscale.nn.tokens import Tokens

CORES_WITH_MEMORY = [entry.name for entry in CORES if reads_memory(entry.part.Config())]
POSITIONS_WITH_MEMORY = [entry.name for entry in POSITIONS if position_reads_memory(entry.name)]


def attention_weights(query: Tensor, keys: Tensor, u: Tensor, v: Tensor, projection: Tensor) -> Tensor:
    """Weights of the keys [S, K], of which the last is the query's own, by section 3.3 of Dai et al. 2019."""
    rates = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    scores = []
    for j, key in enumerate(keys):
        distance = float(len(keys) - 1 - j)
        r = torch.cat(((distance * rates).sin(), (distance * rates).cos()))
        scores.append(((query + u) @ key + (query + v) @ (projection @ r)) / math.sqrt(len(query)))
    return torch.softmax(torch.stack(scores), 0)


def outputs_of_heads(q: Tensor, key: Tensor, value: Tensor, u: Tensor, v: Tensor, projection: Tensor) -> Tensor:
    """Outputs [B, T, D] of all heads. Each query sees the keys [B, M + T, D] up to its own token."""
    outputs = torch.zeros_like(q)
    offset = key.shape[1] - q.shape[1]
    for b, head, i in itertools.product(range(len(q)), range(HEADS), range(q.shape[1])):
        own = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
        seen = key[b, : offset + i + 1, own]
        weights = attention_weights(q[b, i, own], seen, u[head], v[head], projection[own])
        outputs[b, i, own] = weights @ value[b, : len(seen), own]
    return outputs


def literal(
    model: Any,
    ids: Tensor,
    memory: int,
    *,
    layer: str = "below",
    post: bool = True,
    compress: Any = None,
    slots: int = 0,
    summarise: Any = None,
) -> Tensor:
    """Logits of a text [B, T] by the equations of Dai et al. 2019, section 3.2 and 3.3, written out by the key.

    `layer`: "same" is equation 5 of Ding et al. 2021. `post`: norms stand behind the sums, as in the paper. `compress`:
    maps the states of a block that leave its memory to slots, of which the last `slots` are read before the memory.
    `summarise`: makes of the outputs of all blocks what each reads before the next segment.
    """
    weights = dict(model.named_parameters())
    batch, total = ids.shape
    compressed = [torch.zeros(batch, 0, WIDTH, dtype=torch.float64) for _ in range(DEPTH)]
    kept = [torch.zeros(batch, 0, WIDTH, dtype=torch.float64) for _ in range(DEPTH)]
    outputs = []
    for start in range(0, total, SEGMENT):
        h = weights["embed.table.weight"][ids[:, start : start + SEGMENT]]
        of_blocks = []
        for number in range(DEPTH):
            name = f"stack.blocks.{number}"

            def part(path: str, name: str = name) -> Tensor:
                return weights[f"{name}.{path}"]

            def norm(x: Tensor, sublayer: str, name: str = name) -> Tensor:
                where = f"{name}.{sublayer}.{'after' if f'{name}.{sublayer}.after.weight' in weights else 'norm'}"
                return F.layer_norm(x, (WIDTH,), weights[f"{where}.weight"], weights[f"{where}.bias"], 1e-5)

            below, both = h, torch.cat((compressed[number], kept[number], h), 1)
            reads, queries = (both, h) if post else (norm(both, "mixer"), norm(h, "mixer"))
            q, key, value = (
                x @ part(f"mixer.part.{letter}.weight").T for x, letter in ((queries, "q"), (reads, "k"), (reads, "v"))
            )
            u, v = part("mixer.part.position.content_bias"), part("mixer.part.position.position_bias")
            projection = part("mixer.part.position.weight")
            mixed = outputs_of_heads(q, key, value, u, v, projection) @ part("mixer.part.o.weight").T
            h = norm(h + mixed, "mixer") if post else h + mixed
            inner = h if post else norm(h, "ffn")
            y = F.gelu(inner @ part("ffn.part.up.weight").T) @ part("ffn.part.down.weight").T
            h = norm(h + y, "ffn") if post else h + y
            of_blocks.append(h)
            after = torch.cat((kept[number], below if layer == "below" else h), 1)
            leaving = max(0, after.shape[1] - memory)
            kept[number] = after[:, leaving:]
            if compress is not None and leaving:
                slot = torch.cat((compressed[number], compress(number, after[:, :leaving])), 1)
                compressed[number] = slot[:, max(0, slot.shape[1] - slots) :]
        compressed = compressed if summarise is None else summarise(of_blocks)
        if not post:
            h = F.layer_norm(h, (WIDTH,), weights["stack.norm.weight"], weights["stack.norm.bias"], 1e-5)
        outputs.append(h @ weights["embed.table.weight"].T)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("layer", ["below", "same"])
@pytest.mark.parametrize(("memory", "residual"), [(3, "post"), (4, "post"), (6, "pre")])
def test_segments_are_those_of_the_paper(layer: str, memory: int, residual: str) -> None:
    model = decoder({"segment_memory": {"length": memory, "layer": layer}}, residual=residual)
    ids = text(4 * SEGMENT)
    expected = literal(model, ids, memory, layer=layer, post=residual == "post")
    assert close(logits_of_segments(model, ids), expected)


def test_the_literal_reference_tells_layers_and_lengths_apart() -> None:
    model, ids = decoder({"segment_memory": {"length": 3}}, residual="post"), text(4 * SEGMENT)
    ours = logits_of_segments(model, ids)
    for memory, layer in ((2, "below"), (3, "same")):
        assert not close(ours, literal(model, ids, memory, layer=layer))


@pytest.mark.parametrize("position", POSITIONS_WITH_MEMORY)
def test_segments_with_all_of_the_text_before_are_the_text(position: str) -> None:
    ids, memory = text(4 * SEGMENT), {"length": 3 * SEGMENT}
    model = decoder({"segment_memory": memory}, position=position)
    assert close(logits_of_segments(model, ids), model(Tokens.from_ids(ids)))


def test_less_memory_is_another_text() -> None:
    ids = text(4 * SEGMENT)
    model = decoder({"segment_memory": {"length": 2 * SEGMENT}})
    assert not close(logits_of_segments(model, ids), model(Tokens.from_ids(ids)))


def test_evaluation_reads_a_memory_of_its_own_length() -> None:
    ids = text(4 * SEGMENT)
    model = decoder({"segment_memory": {"length": 2, "eval_length": 3 * SEGMENT}})
    assert close(logits_of_segments(model, ids), model(Tokens.from_ids(ids)))
    short = decoder({"segment_memory": {"length": 2}})
    short.load_state_dict(model.state_dict())
    model.train()
    assert close(logits_of_segments(model, ids), logits_of_segments(short, ids))


def test_documents_that_are_apart_do_not_remember_each_other() -> None:
    model, ids = decoder({"segment_memory": {"length": 3 * SEGMENT}}), text(4 * SEGMENT)
    lengths = torch.tensor([[6, 2, 8], [3, 9, 4]])
    documents = torch.stack([torch.repeat_interleave(torch.arange(3), row) for row in lengths])
    apart = logits_of_segments(model, ids, documents)
    for row in range(2):
        ends = lengths[row].cumsum(0).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            alone = model(Tokens.from_ids(ids[row : row + 1, start:end]))
            assert close(apart[row : row + 1, start:end], alone)
    assert not close(apart, logits_of_segments(model, ids))


def test_a_row_that_begins_anew_has_no_memory() -> None:
    model, ids = decoder({"segment_memory": {"length": 5}}), text(4 * SEGMENT)
    ours = logits_of_segments(model, ids, begins={2: [True, False]})
    whole = logits_of_segments(model, ids)
    assert close(ours[1], whole[1])
    assert close(ours[0, 2 * SEGMENT :], logits_of_segments(model, ids[:, 2 * SEGMENT :])[0])
    assert not close(ours[0, 2 * SEGMENT :], whole[0, 2 * SEGMENT :])


def test_no_gradient_reaches_the_segment_before() -> None:
    model, ids = decoder({"segment_memory": {"length": SEGMENT}}), text(2 * SEGMENT)
    states = states_of(model, 2)
    logits = logits_of_segments(model, ids, states=states)
    (both,) = torch.autograd.grad(logits[:, SEGMENT:].sum(), [model.stack.blocks["0"].mixer.part.q.weight])
    states = states_of(model, 2)
    logits_of_segments(model, ids[:, :SEGMENT], states=states)
    second = logits_of_segments(model, ids[:, SEGMENT:], states=states)
    (alone,) = torch.autograd.grad(second.sum(), [model.stack.blocks["0"].mixer.part.q.weight])
    assert close(both, alone)


@pytest.mark.parametrize("kind", CORES_WITH_MEMORY)
def test_cores_with_memory_are_those_of_all_queries(kind: str) -> None:
    """The last queries over all keys are what the core makes of them among all queries."""
    entry = CORES.get(kind)
    heads, width, keys, queries = 4, 8, 11, 5
    core = ready(entry.part(entry.part.Config(), replace(dims(causal=True), layer=0), heads, width))
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, heads, keys, width, dtype=torch.float64, generator=generator).unbind()
    documents = torch.zeros(2, keys, dtype=torch.int64)
    whole = AttentionMask(keys, keys, causal=True, query_documents=documents, key_documents=documents)
    last = AttentionMask(
        queries,
        keys,
        causal=True,
        offset=keys - queries,
        query_documents=documents[:, -queries:],
        key_documents=documents,
    )
    assert close(core(q[:, :, -queries:], k, v, last), core(q, k, v, whole)[:, :, -queries:])


def test_the_state_after_a_segment() -> None:
    model, ids = decoder({"segment_memory": {"length": 6}}), text(SEGMENT)
    states = states_of(model, 2)
    assert set(states.tensors) == {f"stack.segment_memory.{name}" for name in ("documents", "0", "1")}
    signals: dict[Any, Any] = {SEGMENT_STATE: states.of_rows(0, 2)}
    model(Tokens.from_ids(ids, signals=signals))
    documents = states.tensors["stack.segment_memory.documents"]
    assert (documents == EMPTY).all(), "a state changes before its step is done"
    states.commit()
    assert documents.tolist() == [[EMPTY] * 2 + [0] * 4] * 2
    assert close(states.tensors["stack.segment_memory.0"][:, 2:], model.embed(Tokens.from_ids(ids)))
    states.reset()
    assert (documents == EMPTY).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixer": {"kind": "gated_linear_attention"}}, "mixer 'gated_linear_attention' makes keys"),
        ({"mixer": {"core": "linear"}}, "core 'linear' has as many queries as keys"),
        ({"position": "alibi"}, "position 'alibi' tells no distance"),
        ({"residual": "parallel"}, "residual 'parallel'"),
        ({"residual": "reversible"}, "segment_memory"),
    ],
    ids=["mixer", "core", "biases", "parallel", "reversible"],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    assert words in refusals({"segment_memory": {"length": 3}}, **changes)

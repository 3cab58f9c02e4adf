"""Multi-head latent attention against DeepSeek-V2's equations 37 to 47, head by head; what generation caches."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import dims, drawn, ready
from tests.distributed import Pool
from tests.parallel.against_one import alone, same
from xscale.nn.forward import Forward
from xscale.nn.mixer.kv_cache import KvCache
from xscale.nn.mixer.mla import Mla
from xscale.nn.position.rope import Rope
from xscale.nn.tokens import Tokens

WIDTH, HEADS, PLAIN, ROTATED, VALUES, RANK, QUERY_RANK, LENGTH = 12, 3, 4, 6, 5, 7, 8, 9
TOKENS = Tokens.from_ids(torch.zeros(1, LENGTH, dtype=torch.long))
SIZES: dict[str, Any] = {
    "heads": HEADS,
    "kv_latent_width": RANK,
    "head_width": PLAIN,
    "rope_width": ROTATED,
    "value_width": VALUES,
}


def built(**changes: Any) -> Mla:
    config = Mla.Config(**{**SIZES, "query_latent_width": QUERY_RANK, **changes})
    around = dims(width=WIDTH, position=Rope.Config(base=100.0))
    assert Mla.check(config, around, "mixer") == []
    part: Mla = ready(Mla(config, around))
    return part


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * gain


def turned(x: Tensor, position: int) -> Tensor:
    half = len(x) // 2
    out = x.clone()
    for pair in range(half):
        angle = position * 100.0 ** (-pair / half)
        first, second = x[pair], x[pair + half]
        out[pair] = first * math.cos(angle) - second * math.sin(angle)
        out[pair + half] = second * math.cos(angle) + first * math.sin(angle)
    return out


@pytest.mark.parametrize("compressed", [True, False])
def test_it_is_the_papers_equations(compressed: bool) -> None:
    part = built() if compressed else built(query_latent_width=None)
    x = drawn(1, LENGTH, WIDTH)
    weights = {name: value.detach() for name, value in part.named_parameters()}
    keys, values = [], []
    out = torch.zeros(LENGTH, WIDTH, dtype=torch.float64)
    for t in range(LENGTH):
        h = x[0, t]
        down = weights["kv_down.weight"] @ h
        c, k_rotated = normed(down[:RANK], weights["kv_latent_norm.weight"]), turned(down[RANK:], t)
        k_plain, v = (weights["k.weight"] @ c).view(HEADS, PLAIN), (weights["v.weight"] @ c).view(HEADS, VALUES)
        keys.append([torch.cat((k_plain[head], k_rotated)) for head in range(HEADS)])
        values.append(v)
        latent = normed(weights["q_down.weight"] @ h, weights["q_latent_norm.weight"]) if compressed else h
        q = (weights["q.weight"] @ latent).view(HEADS, PLAIN + ROTATED)
        heads = []
        for head in range(HEADS):
            query = torch.cat((q[head, :PLAIN], turned(q[head, PLAIN:], t)))
            scores = torch.stack([query @ key[head] for key in keys]) / (PLAIN + ROTATED) ** 0.5
            heads.append(scores.softmax(0) @ torch.stack([value[head] for value in values]))
        out[t] = weights["o.weight"] @ torch.cat(heads)
    torch.testing.assert_close(part(x, TOKENS)[0], out, rtol=1e-9, atol=1e-12)


def test_generation_caches_the_latent_and_one_rotated_key() -> None:
    part, x, cache = built(), drawn(1, LENGTH, WIDTH), {}
    outputs = []
    for t in range(LENGTH):
        about = Tokens(
            ids=torch.zeros(1, 1, dtype=torch.long), positions=torch.tensor([[t]]), forward=Forward(cache=cache)
        )
        outputs.append(part(x[:, t : t + 1], about))
    torch.testing.assert_close(torch.cat(outputs, 1), part(x, TOKENS), rtol=1e-9, atol=1e-12)
    (kept,) = cache.values()
    assert isinstance(kept, KvCache)
    latent, rotated = kept.append(torch.zeros(1, 1, 1, RANK).double(), torch.zeros(1, 1, 1, ROTATED).double())
    assert latent.shape[2:] == (LENGTH + 1, RANK)
    assert rotated.shape[2:] == (LENGTH + 1, ROTATED)


def test_values_wider_than_keys_are_refused() -> None:
    config = Mla.Config(**{**SIZES, "value_width": 11})
    (problem,) = Mla.check(config, dims(width=WIDTH), "mixer")
    assert "must be <= head_width + rope_width = 10" in str(problem)


@pytest.mark.long
def test_layouts_have_the_numbers_of_one_process(pool: Pool) -> None:
    mixer = {
        "kind": "mla",
        "heads": 4,
        "kv_latent_width": 10,
        "query_latent_width": 12,
        "rope_width": 4,
        "value_width": 6,
        "scale": 0.5,
    }
    block = {"mixer": {**mixer, "dropout": 0.1}, "ffn": {"kind": "gated", "hidden": 48}}
    model = {"kind": "decoder", "width": 32, "stack": {"depth": 2, "block": block}}
    expected = alone(pool, model)
    same(pool, expected, 2, model, {"mesh": {"tp": 2}, "tensor": {"sequence": True}})
    same(pool, expected, 2, model, {"mesh": {"cp": 2}, "context": {"style": "ulysses"}})
    still = {**model, "stack": {"depth": 2, "block": {**block, "mixer": mixer}}}
    same(pool, alone(pool, still), 2, still, {"mesh": {"cp": 2}, "context": {"style": "ring"}})

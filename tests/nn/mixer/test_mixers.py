"""The attention mixer's projections, groups and refusals, the cache's growth, and the Fourier mixer's formula."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.conformance.made import dims, drawn, ready, tokens
from xscale.core.compose import compose
from xscale.core.config import decode
from xscale.nn.attention.reformer import Reformer
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.kv_cache import KvCache
from xscale.nn.mixer.mixer import Fourier
from xscale.nn.model.model import MODELS
from xscale.nn.norm.norm import Rms
from xscale.nn.position.alibi import Alibi
from xscale.nn.position.rope import Rope
from xscale.nn.tokens import SharedValues
from xscale.recipe import Recipe


def attention(about: Dims, **config: Any) -> Attention:
    return ready(Attention(Attention.Config(**config), about))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_are_the_projections_in_turn(kv_heads: int) -> None:
    part = attention(dims(width=16), heads=4, kv_heads=kv_heads, bias=True)
    x = drawn(2, 7, 16)
    q, k, v = (F.linear(x, one.weight, one.bias) for one in (part.q, part.k, part.v))
    outputs = []
    for head in range(4):
        group = head * kv_heads // 4
        mine, theirs = slice(4 * head, 4 * head + 4), slice(4 * group, 4 * group + 4)
        scores = q[..., mine] @ k[..., theirs].transpose(1, 2) / 2
        seen = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf")).softmax(-1)
        outputs.append(seen @ v[..., theirs])
    wanted = F.linear(torch.cat(outputs, -1), part.o.weight, part.o.bias)
    assert torch.allclose(part(x, tokens(7)), wanted)


def test_queries_can_be_projected_as_keys() -> None:
    x = drawn(2, 7, 16)
    whole, tied = (attention(dims(width=16), heads=2, shared_qk=shared) for shared in (False, True))
    names = {name for name, _ in whole.named_parameters()} - {name for name, _ in tied.named_parameters()}
    assert names == {"k.weight"}
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(tied.get_parameter("q.weight" if name == "k.weight" else name))
    assert torch.allclose(tied(x, tokens(7)), whole(x, tokens(7)))
    for about, kv_heads in ((dims(width=16), 1), (dims(width=16, cross=True), None)):
        config = Attention.Config(heads=2, kv_heads=kv_heads, shared_qk=True)
        assert [one.path for one in Attention.check(config, about, "m")] == ["m.shared_qk"]


def test_reformer_shares_queries_and_keys_unless_the_config_says_otherwise() -> None:
    about = dims(width=16)
    for shared, names in ((None, {"q", "v", "o"}), (True, {"q", "v", "o"}), (False, {"q", "k", "v", "o"})):
        part = attention(about, heads=2, shared_qk=shared, core=Reformer.Config())
        assert {name.split(".")[0] for name, _ in part.named_parameters()} == names
    assert attention(about, heads=2).k is not None
    (problem,) = Attention.check(Attention.Config(heads=2, kv_heads=1, core=Reformer.Config()), about, "m")
    assert problem.path == "m.shared_qk"
    assert "reformer" in str(problem)
    assert "Take false" in str(problem)


def test_the_head_width_can_be_chosen() -> None:
    part = attention(dims(width=16), heads=3, head_width=8)
    assert part.q.weight.shape == (24, 16)
    assert part.o.weight.shape == (16, 24)
    assert part(drawn(2, 7, 16), tokens(7)).shape == (2, 7, 16)


def test_queries_and_keys_can_be_normed() -> None:
    plain = attention(dims(width=16), heads=2)
    normed = attention(dims(width=16), heads=2, qk_norm=Rms.Config())
    x = drawn(2, 7, 16)
    assert normed.q_norm is not None
    assert {name for name, _ in normed.named_parameters()} - {name for name, _ in plain.named_parameters()} == {
        "q_norm.weight",
        "k_norm.weight",
    }
    loud = normed(x, tokens(7))
    normed.q.weight.data *= 10
    normed.k.weight.data *= 10
    assert torch.allclose(normed(x, tokens(7)), loud, atol=1e-4), "a norm takes the scale away"


@pytest.mark.parametrize("position", [Rope.Config(), Alibi.Config()])
def test_positions_act_inside_but_not_across_sequences(position: Any) -> None:
    here = attention(dims(width=16, position=position), heads=2)
    x, about = drawn(2, 7, 16), tokens(7)
    moved = replace(about, positions=about.positions.flip(1), shared_values=SharedValues())
    scattered = replace(about, positions=about.positions * 3, shared_values=SharedValues())
    assert not torch.allclose(here(x, about), here(x, scattered))
    across = attention(dims(width=16, position=position, cross=True), heads=2)
    assert across.position is None
    memory = drawn(2, 9, 16)
    assert torch.equal(across(x, about, memory, tokens(9)), across(x, moved, memory, tokens(9)))


@pytest.mark.parametrize(
    ("config", "about", "said"),
    [
        ({"heads": 3}, {"width": 16}, "heads: heads=3 does not divide width=16. Take 1, 2, 4 or 8"),
        ({"heads": 4, "kv_heads": 3}, {"width": 16}, "kv_heads: kv_heads=3 does not divide heads=4"),
        ({"heads": 5, "kv_heads": 2}, {"width": 16}, "heads=5 does not divide"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(config: Any, about: Any, said: str) -> None:
    problems = [str(one) for one in Attention.check(Attention.Config(**config), dims(**about), "mixer")]
    assert any(said in one for one in problems), problems


def test_what_fits_has_no_problem() -> None:
    core = Softmax.Config()
    for config in (
        Attention.Config(core=core, heads=4),
        Attention.Config(core=core, heads=3, head_width=8),
        Attention.Config(core=core, heads=4, kv_heads=2),
    ):
        assert Attention.check(config, dims(width=16), "mixer") == []


def test_the_cache_grows_and_keeps_what_it_had() -> None:
    cache, keys, values = KvCache(), drawn(2, 3, 200, 4), drawn(2, 3, 200, 4, seed=1)
    start = 0
    for size in (1, 5, 64, 1, 129):
        k, v = cache.append(keys[:, :, start : start + size], values[:, :, start : start + size])
        start += size
        assert torch.equal(k, keys[:, :, :start])
        assert torch.equal(v, values[:, :, :start])


def test_fourier_is_the_real_part_of_the_unnormalised_transform_over_both_axes() -> None:
    """Equations 1 and 3 of the paper: X_k = sum_n x_n exp(-2 pi i n k / N), y = Re(F_seq(F_h(x)))."""
    part, x = Fourier(Fourier.Config(), dims(causal=False)), drawn(2, 6, 4)
    wanted = torch.zeros(2, 6, 4, dtype=torch.float64)
    for t, d in itertools.product(range(6), range(4)):
        for s, e in itertools.product(range(6), range(4)):
            wanted[:, t, d] += x[:, s, e] * math.cos(2 * math.pi * (s * t / 6 + e * d / 4))
    assert torch.allclose(part(x, tokens(6)), wanted)
    assert part(x.bfloat16(), tokens(6)).dtype == torch.bfloat16
    assert list(part.parameters()) == []


def test_fnets_recipe_is_fnet() -> None:
    """Logits of `transformers`, whose dense layer after the embeddings is the identity."""
    from transformers import FNetConfig, FNetForMaskedLM

    data = compose(Path(__file__).parents[3] / "configs/model/fnet.yaml", ["model.width=16"]).data["model"]
    data["stack"]["block"]["ffn"]["hidden"] = 24
    kind = data.pop("kind")
    part = MODELS.get(kind).part
    model = ready(part(decode(part.Config, data), 40, 10))
    config = FNetConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=4, intermediate_size=24, max_position_embeddings=10
    )
    other = FNetForMaskedLM(config).double().eval()
    layers = [
        (f"fnet.encoder.layer.{at}.{theirs}", f"stack.blocks.{at}.{name}")
        for at in range(4)
        for theirs, name in (
            ("fourier.output.LayerNorm", "mixer.norm"),
            ("intermediate.dense", "ffn.part.up"),
            ("output.dense", "ffn.part.down"),
            ("output.LayerNorm", "ffn.norm"),
        )
    ]
    head = "cls.predictions"
    modules = [
        ("fnet.embeddings.LayerNorm", "embed.norm"),
        (f"{head}.transform.dense", "head.transform.dense"),
        (f"{head}.transform.LayerNorm", "head.transform.norm"),
        *layers,
    ]
    names = {f"{theirs}.{end}": f"{name}.{end}" for theirs, name in modules for end in ("weight", "bias")}
    names |= {
        "fnet.embeddings.word_embeddings.weight": "embed.table.weight",
        "fnet.embeddings.position_embeddings.weight": "embed.position.weight",
        f"{head}.decoder.weight": "embed.table.weight",
        f"{head}.decoder.bias": "head.bias",
    }
    assert set(names.values()) == {name for name, _ in model.named_parameters()}
    weights = {theirs: model.get_parameter(name).detach() for theirs, name in names.items()}
    weights["fnet.embeddings.token_type_embeddings.weight"] = torch.zeros(4, 16)
    weights["fnet.embeddings.projection.weight"] = torch.eye(16)
    weights["fnet.embeddings.projection.bias"] = torch.zeros(16)
    weights[f"{head}.bias"] = weights[f"{head}.decoder.bias"]
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("pooler" in name for name in missing), missing
    about = tokens(10)
    assert torch.allclose(model(about), other(about.ids).logits, atol=1e-10)


def test_a_position_that_no_layer_uses_is_warned_of() -> None:
    def warned(model: dict[str, Any]) -> list[str]:
        section = {"kind": "encoder", "position": "rope", **model}
        recipe = decode(Recipe, {"model": section, "objective": "masked"})
        return [str(problem) for problem in recipe.warnings() if problem.path == "model.position"]

    fourier = {"depth": 2, "block": {"mixer": "fourier"}}
    (warning,) = warned({"stack": fourier})
    assert "'rope' acts inside attention, and the model has none ('fourier'): it has no effect" in warning
    assert warned({"stack": {**fourier, "rules": [{"first": 1, "mixer": "attention"}]}}) == []
    assert warned({"stack": fourier, "position": "learned"}) == []

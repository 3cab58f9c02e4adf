"""FLOPs as counted from the modules against FLOPs as torch counts them while they are done."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from xscale.core.config import decode
from xscale.measure.flops import size, training_flops
from xscale.measure.memory import model_state_bytes
from xscale.mesh.axes import Degrees
from xscale.nn.materialize import materialize
from xscale.nn.mixer.attention import Attention
from xscale.nn.model.model import MODELS
from xscale.nn.tokens import Tokens
from xscale.settings.settings import Settings

V, T = 96, 32
BLOCK = {"mixer": {"kind": "attention", "heads": 4, "kv_heads": 2}, "ffn": {"kind": "gated", "hidden": 48}}
EXPERTS = {
    "kind": "moe",
    "experts": 4,
    "router": {"kind": "topk", "top_k": 2},
    "expert": {"kind": "dense", "hidden": 64},
}


def model_of(model: dict[str, Any], length: int = T) -> nn.Module:
    with torch.device("meta"):
        built: nn.Module = MODELS.build(decode(Settings, {"model": model}).model, V, length)
    return built


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder_decoder"])
@pytest.mark.parametrize("tied", [True, False])
def test_against_what_torch_counts(kind: str, tied: bool) -> None:
    stack = {"depth": 2, "block": BLOCK}
    parts = {"encoder": stack, "decoder": stack} if kind == "encoder_decoder" else {"stack": stack}
    model = model_of({"kind": kind, "width": 32, "tied": tied, "position": "sinusoidal", **parts})
    materialize(model, 0)
    tokens = Tokens.from_ids(torch.randint(V, (1, T)))
    # The fused attention of the CPU is not counted by torch; the plain one is, masked scores included.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens.ids, tokens).backward()
    masked = sum(6 * one.multiply_adds(T, T) for one in model.modules() if isinstance(one, Attention) and one.causal)
    assert training_flops(model, T, T) + masked == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_only_matrices_are_multiplied(norm: str) -> None:
    """A literal count: 6 for each element of a matrix and token, 12 T D for scores and values of half of the pairs."""
    D, hidden, depth = 32, 48, 2
    block = {"mixer": {"kind": "attention", "heads": 4, "kv_heads": 2, "bias": True, "qk_norm": {"kind": norm}}}
    block |= {"ffn": {"kind": "gated", "hidden": hidden, "bias": True}, "norm": {"kind": norm}}
    model = model_of({"kind": "decoder", "width": D, "position": "none", "stack": {"depth": depth, "block": block}})
    matrices = depth * (D * D + 2 * D * D // 2 + D * D + 3 * D * hidden) + V * D
    assert size(model).multiplied == matrices
    assert training_flops(model, T) == 6 * T * matrices + depth * 6 * T * T * D


def test_biases_of_experts_are_not_multiplied() -> None:
    def multiplied(**bias: bool) -> int:
        experts = {**EXPERTS, "expert": {**EXPERTS["expert"], **bias}}
        return size(
            model_of({"kind": "decoder", "width": 32, "stack": {"depth": 1, "block": {**BLOCK, "ffn": experts}}})
        ).multiplied

    assert multiplied(bias=True) == multiplied(bias=False)


def test_experts_count_by_the_share_that_a_token_visits() -> None:
    stack = {"depth": 1, "block": {**BLOCK, "ffn": EXPERTS}}
    model = model_of({"kind": "decoder", "width": 32, "stack": stack})
    counted = size(model)
    experts = 4 * 2 * 32 * 64
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert counted.parameters - counted.active == experts // 2


def test_a_memory_counts_the_values_that_a_token_reads() -> None:
    memory = {"kind": "product_key_memory", "subkeys": 16, "top_k": 4, "heads": 2, "query_width": 8}
    model = model_of({"kind": "decoder", "width": 32, "stack": {"depth": 1, "block": {**BLOCK, "ffn": memory}}})
    counted = size(model)
    assert counted.parameters - counted.active == (256 - 2 * 4) * 32
    materialize(model, 0)
    tokens = Tokens.from_ids(torch.randint(V, (1, T)))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens.ids).backward()
    masked = sum(6 * one.multiply_adds(T, T) for one in model.modules() if isinstance(one, Attention) and one.causal)
    # Torch does not count the weighted sum of the values that were read.
    read = 6 * T * 2 * 4 * 32
    assert training_flops(model, T, T) + masked - read == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize(
    ("mixer", "changes"),
    [
        ({"kind": "longformer", "global_token_indices": [0, 3], "core": {"kind": "block_sparse", "block": 8}}, {}),
        (
            {
                "kind": "etc",
                "projections": "pieces",
                "core": {"kind": "etc", "global_tokens": 4, "radius": 7, "labels": "structure", "segment_length": 16},
            },
            {"global_tokens": 4},
        ),
    ],
    ids=["longformer", "etc"],
)
def test_projections_of_global_tokens_count_for_these_alone(mixer: dict[str, Any], changes: dict[str, Any]) -> None:
    block = {"mixer": {"heads": 4, **mixer}, "ffn": {"kind": "dense", "hidden": 64}}
    section = {"kind": "encoder", "width": 32, "position": "none", "stack": {"depth": 2, "block": block}, **changes}
    model: Any = model_of(section, length := 256)
    materialize(model, 0)
    part = model.stack.blocks["0"].mixer.part
    weights = sum(weight.numel() for weight in part.parameters() if weight.dim() == 2 and len(weight) == 32)
    x, tokens = torch.randn(1, length, 32), Tokens.from_ids(torch.zeros(1, length, dtype=torch.long))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        part(x, tokens)
    counted = counter.get_total_flops() / 2
    assert part.multiply_adds(length, length) + weights * length == pytest.approx(counted, rel=0.03)


def test_a_table_that_is_only_looked_up_is_not_multiplied() -> None:
    tied = size(model_of({"kind": "decoder", "width": 32, "tied": True}))
    apart = size(model_of({"kind": "decoder", "width": 32, "tied": False}))
    assert apart.parameters - tied.parameters == V * 32
    assert apart.multiplied == tied.multiplied


def test_memory_at_rest_is_what_each_stage_shares_out() -> None:
    model = model_of({"kind": "decoder", "width": 32, "stack": {"depth": 1, "block": {**BLOCK, "ffn": EXPERTS}}})
    whole = size(model).parameters * 4
    four = Degrees(dp_shard=4)
    alone = model_state_bytes(model, Degrees(), 1, 2, 4)
    assert (alone.parameters, alone.gradients, alone.optimizer) == (whole, whole, 2 * whole)
    assert model_state_bytes(model, four, 0, 2, 4).total == alone.total
    shared = model_state_bytes(model, four, 3, 2, 4)
    assert shared.total == pytest.approx(alone.total / 4, rel=0.01)
    assert model_state_bytes(model, four, 1, 2, 4).gradients == whole
    cut = model_state_bytes(model, Degrees(tp=4), 1, 2, 4)
    assert alone.total / 4 < cut.total < alone.total / 2
    staged = model_state_bytes(model, Degrees(pp=2), 1, 2, 4)
    assert alone.total / 2 < staged.total < alone.total
    spread = model_state_bytes(model, Degrees(dp_shard=4, ep=4), 1, 2, 4)
    assert spread.gradients < whole

"""Model types against transformers, a row each: a model of odd sizes that the library builds is imported, and has the
library's logits, gradients and greedy tokens; its weights and config.json come out as they went in; what is not
honoured is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.convert.hf.test_decoders import SETTINGS, greedy
from xscale.convert.hf.compare import TOLERANCE, build
from xscale.convert.hf.import_model import ImportedModel, import_model
from xscale.convert.hf.registry import architecture_named, model_from_hf_config, model_of, select_architecture
from xscale.convert.hf.tables.stack import resolved
from xscale.core.errors import ConfigError
from xscale.nn.tokens import Tokens

VOCABULARY, LENGTH, GENERATED = 1013, 48, 32
SIZES = {
    "hidden_size": 30,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "intermediate_size": 17,
    "num_hidden_layers": 3,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
"""Sizes that divide nothing."""
TIED = {**SIZES, "tie_word_embeddings": True}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 11}
ROUTED = {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 11}
ROUTED |= {"n_group": 3, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 9}
HALF = {"rope_theta": 500.0, "partial_rotary_factor": 0.6, "rope_type": "default"}
ENCODER = {
    "hidden_size": 30,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "num_hidden_layers": 3,
    "max_position_embeddings": LENGTH,
}
TYPES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 13, "mlp_only_layers": [1]},
    "glm4_moe": {**SIZES, **ROUTED, "use_qk_norm": True, "attention_bias": True, "rope_parameters": HALF},
    "glm4_moe without norms": {**SIZES, **ROUTED, "first_k_dense_replace": 0, "head_dim": 12},
    "ministral": {**SIZES, "layer_types": MIXED, "sliding_window": 3},
    "cwm": {**TIED, "layer_types": MIXED, "sliding_window": 3, "mlp_bias": True},
    "seed_oss": {**SIZES, "mlp_bias": True, "attention_out_bias": True},
    "minimax_m2": {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": HALF},
    "smollm3": {**TIED, "no_rope_layers": [1, 0, 1], "rope_parameters": YARN, "attention_bias": True},
    "smollm3 with windows": {
        **SIZES,
        "no_rope_layers": [1, 0, 1],
        "layer_types": MIXED,
        "sliding_window": 3,
        "use_sliding_window": True,
    },
    "olmo3": {**SIZES, "layer_types": MIXED, "sliding_window": 3},
    "olmo3 with yarn": {
        **TIED,
        "layer_types": MIXED,
        "sliding_window": 3,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
    },
    "flex_olmo": {**SIZES, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "solar_open": {**SIZES, **ROUTED, "rope_parameters": YARN},
    "exaone4": {**SIZES, "layer_types": MIXED, "sliding_window": 3},
    "exaone4 without windows": {
        **TIED,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "sliding_window_pattern": None,
    },
    "exaone_moe": {
        **SIZES,
        "layer_types": MIXED,
        "sliding_window": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 11,
        "n_group": 3,
        "topk_group": 2,
    },
    "helium": {**SIZES, "attention_bias": True, "mlp_bias": True},
    "glm": {**SIZES, "rope_parameters": HALF},
    "glm4": {**TIED, "rope_parameters": HALF, "attention_bias": False},
    "ernie4_5": {**TIED, "use_bias": True},
    "ernie4_5_moe": {
        **SIZES,
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_intermediate_size": 11,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
    },
    "starcoder2": {**TIED, "sliding_window": 3, "use_bias": True},
    "starcoder2 without biases": {**SIZES, "use_bias": False},
    "stablelm": {**SIZES, "use_qkv_bias": True, "rope_parameters": HALF},
    "opt": {
        "hidden_size": 30,
        "num_attention_heads": 3,
        "num_hidden_layers": 3,
        "ffn_dim": 17,
        "max_position_embeddings": LENGTH,
    },
    "gpt_neo": {
        "hidden_size": 30,
        "num_heads": 3,
        "num_layers": 3,
        "intermediate_size": 17,
        "attention_types": [[["local", "global", "local"], 1]],
        "window_size": 3,
        "max_position_embeddings": LENGTH,
    },
    "xlm-roberta": {**ENCODER, "type_vocab_size": 1},
    "camembert": {**ENCODER, "hidden_act": "relu", "tie_word_embeddings": False},
    "roberta-prelayernorm": {**ENCODER, "type_vocab_size": 2},
    "electra": {**ENCODER, "embedding_size": 14},
    "electra of one width": {**ENCODER, "embedding_size": 30, "hidden_act": "gelu_new"},
    "mpnet": {**ENCODER, "pad_token_id": 1},
    "dots1": {**SIZES, **ROUTED, "layer_types": MIXED, "sliding_window": 3, "first_k_dense_replace": 1},
}
"""Name, which begins with the `model_type`, and keys of its config."""


def library_model(name: str, **changes: Any) -> Any:
    """The library's model of a row, with random weights that are not as they start."""
    import transformers

    kind = name.split()[0]
    loader = getattr(transformers, architecture_named(kind, "").loader)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CONFIG_MAPPING[kind](**{"vocab_size": VOCABULARY, **special, **TYPES[name], **changes})
    torch.manual_seed(0)
    model = loader(config).eval()
    if hasattr(model, "set_experts_implementation"):
        # The library's grouped products of experts need widths of whole 16 bytes.
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for key, parameter in [*model.named_parameters(), *experts_biases(model)]:
            parameter.normal_(mean=float(parameter.dim() == 1 and "norm" in key), std=0.3)
        for key, parameter in model.named_parameters():
            if key.endswith(("position_embeddings.weight", "embed_positions.weight")):
                # Rows of no position.
                parameter[: 2 if kind == "opt" else model.config.pad_token_id + 1] = 0
        if hasattr(model, "lm_head") and hasattr(model.lm_head, "decoder"):
            # An untied head has one of two biases.
            model.lm_head.bias.copy_(model.lm_head.decoder.bias)
    return model


def experts_biases(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]


def imported(name: str, folder: Path, **changes: Any) -> tuple[Any, ImportedModel]:
    model = library_model(name, **changes)
    model.save_pretrained(str(folder))
    return model, import_model(folder)


def external(back: ImportedModel, tensors: dict[str, Tensor], *, linear: bool = False) -> dict[str, Tensor]:
    """Tensors by the library's names; `linear`: without what a transform adds, as gradients are mapped."""
    mapped = {}
    for mapping in back.architecture.weights(model_of(back.model), back.sizes):
        forward = mapping.transform.forward
        values = forward([tensors[one] for one in mapping.xscale_names])
        if linear:
            zeros = forward([torch.zeros_like(tensors[one]) for one in mapping.xscale_names])
            values = [value - zero for value, zero in zip(values, zeros, strict=True)]
        mapped |= dict(zip(mapping.external_names, values, strict=True))
    return mapped


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.sampled(4)
def test_import_export_and_tokens(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    original, back = imported(name, tmp_path)
    assert back.comparison.within(TOLERANCE), back.comparison
    assert back.comparison.largest > 0.3
    stored = load_file(tmp_path / "model.safetensors")
    written = external(back, back.weights)
    assert all(torch.equal(written[key], value) for key, value in stored.items() if key in written)
    assert set(stored) - set(written) <= {"lm_head.weight"}
    data = select_architecture(model_of(back.model), back.sizes, name.split()[0])[1]
    data |= {"pad_token_id": original.config.pad_token_id}
    again = model_from_hf_config(type(original.config)(**data).to_dict())[1]
    assert resolved(model_of(again), back.sizes) == resolved(model_of(back.model), back.sizes)
    if back.model["kind"] != "decoder":
        return
    model = build(model_of(back.model), back.sizes, back.weights).double()
    ids = torch.arange(3, 8)[None]
    text = greedy(model, ids, GENERATED)
    generated = original.double().generate(ids, **SETTINGS, max_new_tokens=GENERATED, min_new_tokens=GENERATED)
    assert text.tolist() == generated.tolist()
    assert len(set(text[0].tolist())) > 3


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.sampled(4)
def test_gradients_of_all_weights(name: str, tmp_path: Path) -> None:
    original, back = imported(name, tmp_path)
    model = build(model_of(back.model), back.sizes, back.weights).double().requires_grad_(True)
    ids = torch.arange(7, 27).view(2, 10) * 11 % VOCABULARY
    expected = original.double()(input_ids=ids).logits
    logits = model(Tokens.from_ids(ids))
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (expected * direction).sum().backward()
    (logits * direction).sum().backward()
    gradients = {key: torch.zeros_like(one) if one.grad is None else one.grad for key, one in model.named_parameters()}
    mapped = external(back, gradients, linear=True)
    # A bias of keys without positions has no gradient but rounding.
    small = 1e-3 * max(one.grad.norm() for one in original.parameters() if one.grad is not None)
    compared = 0
    for key, parameter in original.named_parameters():
        if key in mapped and parameter.grad is not None:
            # The library computes norms and rotations in float32, whatever the weights are.
            difference = (mapped[key] - parameter.grad).norm() / (parameter.grad.norm() + small)
            assert difference < 1e-5, (key, difference)
            compared += 1
    assert compared > 5


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.sampled(4)
def test_one_layer(name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": 1}
    if "attention_types" in TYPES[name]:
        changes = {"num_layers": 1, "attention_types": [[["local"], 1]]}
    for key in ("layer_types", "mlp_layer_types"):
        if key in TYPES[name]:
            changes[key] = TYPES[name][key][:1]
    assert imported(name, tmp_path, **changes)[1].comparison.within(TOLERANCE)


@pytest.mark.parametrize("name", TYPES)
def test_keys_that_are_not_honoured(name: str) -> None:
    """Each key of the type that no table reads, set to something else, is refused by its name."""
    import transformers

    kind = name.split()[0]
    data = transformers.CONFIG_MAPPING[kind](**{"vocab_size": VOCABULARY, **TYPES[name]}).to_dict()
    section = model_from_hf_config(data)[1]
    assert section["kind"]
    with pytest.raises(ConfigError, match="chunk_size_feed_forward"):
        model_from_hf_config(data | {"chunk_size_feed_forward": 4})

"""Decoders against transformers in double precision, token by token; configs of the library that do not map."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.hf.models import LENGTH, SECTIONS, checkpoint
from xscale.convert.hf.compare import build
from xscale.convert.hf.export_model import export_model
from xscale.convert.hf.import_model import import_model
from xscale.convert.hf.registry import (
    ModelSizes,
    architecture_named,
    model_from_hf_config,
    model_of,
    select_architecture,
)
from xscale.core.errors import ConfigError
from xscale.nn.forward import Forward
from xscale.nn.tokens import Tokens

PROMPT, GENERATED = 5, 24
"""Together more tokens than any window, and than the original length of each scaling."""
DECODERS = [name for name, (_, section) in SECTIONS.items() if section["kind"] == "decoder"]
SETTINGS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def greedy(model: Any, ids: torch.Tensor, count: int, source: Tokens | None = None) -> torch.Tensor:
    """Continue ids [1, T] by the `count` likeliest tokens, with a cache of keys and values."""
    cache: dict[str, Any] = {}
    first = 0
    for _ in range(count):
        positions = torch.arange(first, ids.shape[1])[None]
        logits = model(Tokens(ids=ids[:, first:], positions=positions, forward=Forward(cache=cache)), source=source)
        first = ids.shape[1]
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    return ids


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.sampled(3)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    import transformers

    architecture, section = SECTIONS[name]
    path, _ = checkpoint(tmp_path / "run", section)
    assert export_model(path, tmp_path / "out", architecture=architecture, say=lambda _: None) == 0
    # The library's grouped product of experts has no double precision.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path / "out"), dtype=torch.float64, experts_implementation="eager"
    ).eval()
    back = import_model(tmp_path / "out")
    ours = build(model_of(back.model), back.sizes, back.weights).double()
    ids = torch.arange(3, 3 + PROMPT)[None]
    with torch.no_grad():
        # Learned positions end.
        count = LENGTH - PROMPT if section["position"] == "learned" else GENERATED
        text = greedy(ours, ids, count)
        generated = theirs.generate(ids, **SETTINGS, max_new_tokens=count, min_new_tokens=count)
        assert text.tolist() == generated.tolist()
        torch.testing.assert_close(ours(Tokens.from_ids(text)), theirs(text).logits, rtol=0, atol=1e-5)
    assert len(set(text[0].tolist())) > 3


@pytest.mark.parametrize("name", ["t5 of one table", "flan", "switch of one table"])
def test_greedy_targets_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    import transformers

    architecture, section = SECTIONS[name]
    path, _ = checkpoint(tmp_path / "run", section)
    assert export_model(path, tmp_path / "out", architecture=architecture, say=lambda _: None) == 0
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        str(tmp_path / "out"), dtype=torch.float64, experts_implementation="eager"
    ).eval()
    back = import_model(tmp_path / "out")
    dropless = architecture_named(architecture, name).without_capacity(model_of(back.model))
    ours = build(dropless, back.sizes, back.weights).double()
    source, start = torch.arange(3, 15)[None], torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        text = greedy(ours, start, GENERATED, Tokens.from_ids(source))
        lengths = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED}
        assert text.tolist() == theirs.generate(source, **SETTINGS, **lengths, decoder_start_token_id=0).tolist()
        # Random weights repeat a token, so other targets are compared too.
        targets = torch.arange(20, 32)[None]
        logits = ours(Tokens.from_ids(targets), source=Tokens.from_ids(source))
        expected = theirs(input_ids=source, decoder_input_ids=targets).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def hf_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of that model as transformers reads it, with other keys."""
    import transformers

    architecture, section = SECTIONS[name]
    data = select_architecture(model_of(section), ModelSizes(320, 24), architecture)[1]
    kind = transformers.CONFIG_MAPPING[data["model_type"]]
    found: dict[str, Any] = kind(**{**data, **changes}).to_dict()
    return found


def test_a_config_comes_back_as_it_was() -> None:
    """Windows and dense layers become the rules that they were, in the order of transformers' own keys."""
    names = (
        "qwen2 with windows",
        "qwen3_moe with dense layers",
        "gemma3",
        "mistral with a window",
        "pythia",
        "gpt_oss",
    )
    for name in names:
        given = model_of(SECTIONS[name][1])
        section = model_of(model_from_hf_config(hf_config(name))[1])
        assert section.position == given.position
        for layer in range(given.stack.depth):
            block, original = section.stack.block_config(layer), given.stack.block_config(layer)
            assert block.ffn == original.ffn
            assert block.mixer.core.kind == original.mixer.core.kind
            assert getattr(block.mixer, "position", None) == original.mixer.position
    assert len(model_from_hf_config(hf_config("qwen3_moe with dense layers"))[1]["stack"]["rules"]) == 1


def cores(data: dict[str, Any]) -> list[int | None]:
    """The window of each layer of the model that a config.json becomes."""
    stack = model_of(model_from_hf_config(data)[1]).stack
    found = [stack.block_config(layer).mixer.core for layer in range(stack.depth)]
    return [core.pattern.left + 1 if core.kind == "block_sparse" else None for core in found]


def test_windows_are_those_of_the_layers_that_the_library_gives_one() -> None:
    plain = {"layer_types": None, "sliding_window": 8}
    qwen = {**plain, "use_sliding_window": True, "max_window_layers": 1}
    assert cores(hf_config("qwen2 with windows", **qwen)) == [None, 8, 8]
    assert cores(hf_config("qwen2 with windows", **{**qwen, "use_sliding_window": False})) == [None] * 3
    assert cores(hf_config("qwen2 with windows", **{**qwen, "sliding_window": 24})) == [None] * 3
    assert cores(hf_config("gemma2", **plain)) == [8, None, 8]
    assert cores(hf_config("gemma3", **plain, num_hidden_layers=7)) == [8] * 5 + [None, 8]


def test_dense_layers_are_those_of_the_library() -> None:
    changes = {"num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    stack = model_of(model_from_hf_config(hf_config("qwen3_moe", **changes))[1]).stack
    kinds = [stack.block_config(layer).ffn.kind for layer in range(6)]
    assert kinds == ["gated", "moe", "gated", "gated", "gated", "moe"]


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters.rope_type"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters.rope_type"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5}}, "factor"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 9.0}, "attn_logit_softcapping"),
        ("qwen2 with windows", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ],
)
def test_what_the_library_has_and_xscale_has_not_is_refused(name: str, changes: dict[str, Any], key: str) -> None:
    data = hf_config(name) | changes
    with pytest.raises(ConfigError, match="would map") as caught:
        model_from_hf_config(data)
    assert any(key in problem.path for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("name", "rule", "key"),
    [
        ("gemma2", {"core": {"kind": "softmax", "soft_cap": 3.0}}, "mixer.core.soft_cap"),
        ("gemma3", {"position": "none"}, "model.stack.rules"),
        ("mistral with a window", {"core": "softmax"}, "model.stack.rules"),
        ("qwen3", {"qk_norm_over": "heads"}, "mixer.qk_norm_over"),
        ("gpt_oss", {"core": "softmax"}, "mixer.core.sinks"),
        ("gpt_oss", {"bias": False}, "model.stack.rules"),
    ],
)
def test_layers_that_the_library_cannot_tell_apart_are_refused(name: str, rule: dict[str, Any], key: str) -> None:
    architecture, section = SECTIONS[name]
    mixer = section["stack"]["block"]["mixer"] | rule
    other = {**section, "stack": {**section["stack"], "rules": [{"first": 1, "mixer": mixer}]}}
    with pytest.raises(ConfigError) as caught:
        select_architecture(model_of(other), ModelSizes(320, 24), architecture)
    assert any(key in problem.path for problem in caught.value.problems), caught.value.problems
    assert all(problem.advice for problem in caught.value.problems)


def test_pythias_own_config_maps() -> None:
    """EleutherAI/pythia-70m's config.json, as it is published, with an earlier version's names of keys."""
    import transformers

    published = json.loads(
        '{"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",'
        '"hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-05,'
        '"max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,'
        '"rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false, "use_parallel_residual": true,'
        '"vocab_size": 50304}'
    )
    _, section, sizes = model_from_hf_config(transformers.GPTNeoXConfig(**published).to_dict())
    model = model_of(section)
    assert (model.position.base, model.position.fraction, sizes.length) == (10_000.0, 0.25, 2048)
    assert model.stack.block.residual.kind == "parallel"


def test_a_reversible_model_is_no_gpt_neox() -> None:
    architecture, section = SECTIONS["pythia"]
    stack = section["stack"]
    other = {**section, "stack": {**stack, "block": {**stack["block"], "residual": "reversible"}}}
    with pytest.raises(ConfigError) as caught:
        select_architecture(model_of(other), ModelSizes(320, 24), architecture)
    assert [problem.path for problem in caught.value.problems] == ["model.stack.block.residual"]

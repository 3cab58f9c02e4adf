"""Over a hundred models of odd shapes, as the library builds them: in, out and loaded again with equal logits, or
refused with what would work."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.test_import_hf import call
from xscale.convert.hf.registry import ARCHITECTURES
from xscale.convert.hf.types.bert import DISTILBERT_KEYS
from xscale.core.errors import ConfigError

DRAWS = 6
"""Models of each family. An option of so many choices or fewer has each of them."""
Choose = Callable[..., Any]
Config = dict[str, Any]


def sizes(choose: Choose) -> Config:
    heads, groups = choose((6, 2), (5, 1), (4, 4), (6, 3))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": heads * choose(6, 8, 10),
        "intermediate_size": choose(17, 40),
        "num_hidden_layers": choose(1, 3, 2),
        "tie_word_embeddings": choose(True, False),
        "rms_norm_eps": choose(1e-6, 1e-5),
        "rope_parameters": rope(choose),
    }


def rope(choose: Choose, *methods: str) -> Config:
    """Each type of rotary positions; with `methods`, one of these."""
    base = {"rope_theta": choose(10000.0, 500.0)}
    scalings: dict[str, Config] = {
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 2.0},
        "llama3": {
            "factor": 8.0,
            "original_max_position_embeddings": 7,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 5, "beta_fast": 16.0},
    }
    method = choose(*(methods or ("default", "linear", "dynamic", "llama3", "yarn", "linear")))
    return {"rope_type": method, **base, **scalings[method]}


def llama(choose: Choose) -> Config:
    biases = {"attention_bias": choose(True, False), "mlp_bias": choose(True, False)}
    return sizes(choose) | biases | {"head_dim": choose(6, 8, 10)}


def mistral(choose: Choose) -> Config:
    return sizes(choose) | {"head_dim": choose(6, 8, 10), "sliding_window": choose(None, 4, 40)}


def qwen2(choose: Choose) -> Config:
    windows = {"use_sliding_window": choose(True, False, True), "sliding_window": 4, "max_window_layers": choose(0, 1)}
    return sizes(choose) | windows


def qwen3(choose: Choose) -> Config:
    return qwen2(choose) | {"attention_bias": choose(True, False), "head_dim": choose(6, 12)}


def mixtral(choose: Choose) -> Config:
    experts = {"num_local_experts": choose(2, 5), "num_experts_per_tok": choose(1, 2)}
    jitter = choose(0.0, 0.0, 0.0, 0.0, 0.0, 0.1)
    return sizes(choose) | experts | {"router_jitter_noise": jitter, "head_dim": choose(6, 10)}


def qwen3_moe(choose: Choose) -> Config:
    experts = {"num_experts": choose(3, 5), "num_experts_per_tok": choose(1, 2), "norm_topk_prob": choose(True, False)}
    dense = {"decoder_sparse_step": choose(1, 2), "mlp_only_layers": choose([], [0]), "num_hidden_layers": choose(2, 3)}
    widths = {"head_dim": choose(6, 10), "moe_intermediate_size": 19, "attention_bias": choose(True, False)}
    return sizes(choose) | experts | dense | widths


def phi3(choose: Choose) -> Config:
    parameters = rope(choose, "default") | {"partial_rotary_factor": choose(1.0, 0.5)}
    return sizes(choose) | {"rope_parameters": parameters, "sliding_window": choose(None, 4)}


def olmo2(choose: Choose) -> Config:
    return sizes(choose) | {"attention_bias": choose(True, False)}


def olmoe(choose: Choose) -> Config:
    experts = {"num_experts": choose(3, 5), "num_experts_per_tok": choose(1, 2), "norm_topk_prob": choose(True, False)}
    return sizes(choose) | experts | {"clip_qkv": choose(None, None, None, None, None, 8.0)}


def gpt_oss(choose: Choose) -> Config:
    experts = {"num_local_experts": choose(3, 5), "num_experts_per_tok": choose(1, 2), "head_dim": choose(6, 12)}
    unit = {"swiglu_alpha": choose(1.702, 1.702, 1.702, 1.702, 1.0, 1.5), "swiglu_limit": choose(0.4, 7.0)}
    windows = {"sliding_window": choose(4, 40), "attention_bias": choose(True, False)}
    return sizes(choose) | experts | unit | windows


def gemma2(choose: Choose) -> Config:
    caps = {"attn_logit_softcapping": choose(None, 3.0), "final_logit_softcapping": choose(None, 4.0, 9.0)}
    scale = {"head_dim": choose(6, 10), "query_pre_attn_scalar": choose(12, 7), "sliding_window": choose(4, 40)}
    return sizes(choose) | caps | scale | {"attention_bias": choose(True, False)}


def gemma3(choose: Choose) -> Config:
    positions = {"full_attention": rope(choose, "default", "linear"), "sliding_attention": rope(choose, "default")}
    kept = {"rope_parameters": positions, "attn_logit_softcapping": None, "num_hidden_layers": choose(2, 7)}
    return gemma2(choose) | kept


def gpt_neox(choose: Choose) -> Config:
    heads = choose(1, 3, 5)
    shape = {"num_attention_heads": heads, "hidden_size": heads * 8, "intermediate_size": choose(17, 40)}
    position = {"rope_parameters": rope(choose) | {"partial_rotary_factor": choose(1.0, 0.5, 0.25)}}
    forms = {"use_parallel_residual": choose(True, False), "tie_word_embeddings": choose(True, False)}
    return shape | position | forms | {"num_hidden_layers": choose(1, 3), "attention_bias": choose(True, True, False)}


def deepseek_v3(choose: Choose) -> Config:
    heads = choose(4, 3)
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * choose(8, 9)}
    latents = {"q_lora_rank": choose(None, 14), "kv_lora_rank": choose(9, 12), "qk_nope_head_dim": choose(6, 8)}
    widths = {"qk_rope_head_dim": choose(4, 6), "v_head_dim": choose(5, 10), "n_shared_experts": choose(1, 2)}
    groups, best = choose((2, 1), (3, 2), (1, 1))
    experts = {"n_routed_experts": 6, "n_group": groups, "topk_group": best, "num_experts_per_tok": choose(1, 2)}
    dense = {"first_k_dense_replace": choose(0, 1), "num_hidden_layers": choose(2, 3), "moe_intermediate_size": 11}
    scaled = rope(choose, "default", "yarn", "yarn", "linear")
    if scaled["rope_type"] == "yarn":
        scaled |= {"mscale": 1.0, "mscale_all_dim": choose(0.7, 1.0)}
    rest = {"rope_parameters": scaled, "routed_scaling_factor": choose(1.0, 2.5), "intermediate_size": 23}
    return shape | latents | widths | experts | dense | rest | {"tie_word_embeddings": choose(True, False)}


def deepseek_v2(choose: Choose) -> Config:
    method = choose("greedy", "group_limited_greedy")
    return deepseek_v3(choose) | {"topk_method": method, "norm_topk_prob": choose(*[False] * 5, True)}


def gpt2(choose: Choose) -> Config:
    heads = choose(1, 3, 5)
    shape = {"n_head": heads, "n_embd": 6 * heads, "n_layer": choose(1, 3), "n_inner": choose(None, 17)}
    names = choose("gelu_new", "gelu", "relu", "tanh")
    by_layer = {"scale_attn_by_inverse_layer_idx": choose(*[False] * 5, True)}
    return shape | by_layer | {"activation_function": names, "tie_word_embeddings": choose(True, False)}


def bert(choose: Choose) -> Config:
    heads = choose(1, 3, 5)
    shape = {"num_attention_heads": heads, "hidden_size": 6 * heads, "intermediate_size": choose(17, 40)}
    shape |= {"num_hidden_layers": choose(1, 3), "type_vocab_size": choose(1, 2, 3)}
    return shape | {"tie_word_embeddings": choose(True, False), "hidden_act": choose("gelu", "relu")}


def albert(choose: Choose) -> Config:
    shape = {"embedding_size": choose(7, 18), "num_hidden_groups": choose(*[1] * 5, 2), "inner_group_num": 1}
    return bert(choose) | shape


def distilbert(choose: Choose) -> Config:
    made = bert(choose)
    del made["type_vocab_size"]
    shape = {DISTILBERT_KEYS.get(key, key): value for key, value in made.items()}
    return shape | {"sinusoidal_pos_embds": choose(*[False] * 5, True)}


def big_bird(choose: Choose) -> Config:
    sparse = choose("original_full", "original_full", "block_sparse")
    return bert(choose) | {"attention_type": sparse, "num_random_blocks": 1, "block_size": choose(2, 5)}


def longformer(choose: Choose) -> Config:
    made = bert(choose)
    windows = choose(4, [4, 8, 8], [8, 4, 4], [4, 6, 6])
    return made | {"attention_window": windows if isinstance(windows, int) else windows[: made["num_hidden_layers"]]}


def t5(choose: Choose) -> Config:
    shape = {"num_heads": choose(3, 5), "d_kv": choose(6, 11), "d_model": choose(18, 25), "d_ff": choose(17, 40)}
    depths = {"num_layers": choose(1, 3), "num_decoder_layers": choose(1, 2)}
    buckets = {
        "relative_attention_num_buckets": choose(4, 7, 18, 32),
        "relative_attention_max_distance": choose(10, 128),
    }
    forward = choose("relu", "gated-gelu", "gated-silu", "gelu")
    return shape | depths | buckets | {"feed_forward_proj": forward, "tie_word_embeddings": choose(True, False)}


def switch(choose: Choose) -> Config:
    sparse = {"num_sparse_encoder_layers": choose(0, 1, 2), "num_sparse_decoder_layers": choose(0, 1)}
    made = t5(choose) | sparse | {"num_experts": choose(2, 5), "tie_word_embeddings": choose(True, True, True, False)}
    made["num_layers"] = max(made["num_layers"], 2)
    del made["feed_forward_proj"]
    return made


OPTIONS: dict[str, Callable[[Choose], Config]] = {
    "llama": llama,
    "gpt2": gpt2,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "phi3": phi3,
    "olmo2": olmo2,
    "olmoe": olmoe,
    "gpt_oss": gpt_oss,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gpt_neox": gpt_neox,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "bert": bert,
    "roberta": bert,
    "big_bird": big_bird,
    "albert": albert,
    "distilbert": distilbert,
    "longformer": longformer,
    "t5": t5,
    "switch_transformers": switch,
}
LENGTH_KEY = {"gpt2": "n_positions", "t5": "n_positions", "switch_transformers": "n_positions"}
MODELS = len(OPTIONS) * DRAWS


def chooser(name: str, seed: int) -> Choose:
    """Choose by shuffling the choices of each call and taking the one at `seed`, so that the seeds take all of them."""
    calls = iter(range(1000))

    def choose(*choices: Any) -> Any:
        order = random.Random(f"{name} {next(calls)}").sample(range(len(choices)), len(choices))
        return choices[order[seed % len(choices)]]

    return choose


def their_model(name: str, seed: int) -> tuple[Any, int]:
    """A model of the library with random weights, and its longest text."""
    import transformers

    choose = chooser(name, seed)
    (loader,) = [architecture.loader for architecture in ARCHITECTURES if architecture.name == name]
    kind = getattr(transformers, loader)
    length = choose(5, 17, 33)
    pad = 1 if name in ("roberta", "longformer") else 0
    reserved = pad + 1 if pad else 0
    config = {LENGTH_KEY.get(name, "max_position_embeddings"): length + reserved, "vocab_size": choose(61, 97, 128)}
    config |= {"pad_token_id": pad, "bos_token_id": 2, "eos_token_id": 3}
    torch.manual_seed(seed)
    theirs = kind(kind.config_class(**OPTIONS[name](choose), **config)).eval()
    # The library's grouped products of experts need widths of whole 16 bytes.
    theirs.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.2)
        if pad:
            # The row of the padding id, and those before it, belong to no position.
            getattr(theirs, name).embeddings.position_embeddings.weight[: pad + 1] = 0
    return theirs, length


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        output: torch.Tensor = model(**inputs).logits
    return output


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_odd_models(name: str, tmp_path: Path) -> None:
    assert MODELS >= 113
    converted = 0
    refusals: list[ConfigError] = []
    for seed in range(DRAWS):
        theirs, longest = their_model(name, seed)
        folder = tmp_path / str(seed)
        theirs.save_pretrained(str(folder / "theirs"))
        try:
            status, output = call("checkpoint", "import", folder / "theirs", folder / "run", "--from", "hf")
        except ConfigError as error:
            refusals.append(error)
            continue
        assert status == 0, (seed, output)
        status, output = call("checkpoint", "export", folder / "run", folder / "out", "--architecture", name)
        assert status == 0, (seed, output)
        again = type(theirs).from_pretrained(str(folder / "out"), experts_implementation="eager").eval()
        for length in {1, 2, longest // 2 + 1, longest}:
            ids = torch.randint(4, theirs.config.vocab_size, (2, length))
            expected = logits(theirs, ids)
            exact = logits(theirs.double(), ids)
            rounding = (expected - exact).abs().max().item()
            theirs.float()
            torch.testing.assert_close(logits(again, ids), expected, rtol=0, atol=max(1e-5, 4 * rounding))
        converted += 1
    print(f"{name}: {converted} models equal, {len(refusals)} refused", *refusals, sep="\n  ")
    assert all(problem.advice for error in refusals for problem in error.problems), refusals
    assert converted >= 2, refusals

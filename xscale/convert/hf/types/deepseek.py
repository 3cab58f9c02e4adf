"""DeepSeek-V2 and V3 (DeepSeek-AI 2024), and types with V3's mixture: GLM-4.5, dots.llm1 and EXAONE-MoE.

V2 has softmax gates and ranks a group of experts by its best one; V3 has sigmoid gates, ranks a group by its two best
experts, and adds a bias to the gates for the selection.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xscale.convert.hf.architecture import Data
from xscale.convert.hf.tables.decoders import (
    CORE,
    FULL,
    LOCAL,
    SOME_WINDOWS,
    RopeKeys,
    WindowKey,
    heads_divide_width,
    heads_give_width,
)
from xscale.convert.hf.tables.keys import (
    ByKey,
    ByLayer,
    Computed,
    Initial,
    KeyMapping,
    LayerKinds,
    Reading,
    Renamed,
    SameKey,
    Table,
    Writing,
    merged,
    one_value,
)
from xscale.convert.hf.tables.rotations import paired_channels
from xscale.convert.hf.tables.tensors import Absent, Moved, RowContext, Rows
from xscale.convert.hf.types.llama import (
    BIAS,
    FFN,
    HEAD_NORM,
    MISTRAL,
    NORM,
    QK_NORMS,
    layers,
    missing_bias,
    mixture,
)
from xscale.convert.hf.types.olmo import NORMS_AFTER
from xscale.convert.mapping import Tensors as TensorList
from xscale.convert.mapping import Transform

EPS = 1e-6
"""Epsilon of the latents' norms in the library, whatever the other norms have."""
AUX_LOSS_WEIGHT = 0.01
"""Weight of an imported router's loss where config.json has none."""
BIAS_UPDATE_RATE = 0.001
"""Rate of an imported selection bias, as in DeepSeek-V3: config.json does not have it."""
NO_LOSS = (
    "aux_loss_alpha: transformers has no auxiliary loss of this architecture; the key is that of DeepSeek's own code, "
    "whose loss is xscale's. A config.json without it becomes a router with xscale's default"
)
SELECTION_BIAS = "selection bias: transformers has no rate of its update, so an import takes DeepSeek-V3's, 0.001"


@dataclass(frozen=True)
class YarnScale(KeyMapping):
    """A factor of the scores: the library multiplies them by (0.1 mscale_all_dim ln(factor) + 1)^2, with yarn only."""

    def read(self, reading: Reading, name: str) -> float | None:
        rope = reading.data["rope_parameters"]
        all_dim = rope.get("mscale_all_dim")
        if rope.get("rope_type", "default") == "default" or not all_dim or rope["factor"] <= 1:
            return None
        width = reading.data["qk_nope_head_dim"] + reading.data["qk_rope_head_dim"]
        gain: float = 0.1 * all_dim * math.log(rope["factor"]) + 1
        return float(gain**2 * width**-0.5)

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        scale, rope = one_value(values, path, writing), writing.data["rope_parameters"]
        is_yarn = rope["rope_type"] == "yarn"
        if is_yarn:
            rope.setdefault("attention_factor", 0.1 * math.log(rope["factor"]) + 1.0)
        if scale is None:
            return
        width = writing.data["qk_nope_head_dim"] + writing.data["qk_rope_head_dim"]
        gain = math.sqrt(scale * width**0.5)
        if not is_yarn or rope["factor"] <= 1 or gain <= 1:
            what = f"transformers has no scale of {scale}"
            writing.require.reject(path, what, "null would map.")
        else:
            rope["mscale_all_dim"] = (gain - 1) / (0.1 * math.log(rope["factor"]))


def _first_dense(data: Data) -> Sequence[str]:
    dense = data["first_k_dense_replace"] or 0
    return ["dense" if layer < dense else "sparse" for layer in range(data["num_hidden_layers"])]


def _dense_count(kinds: Sequence[str]) -> Data:
    return {"first_k_dense_replace": kinds.index("sparse") if "sparse" in kinds else len(kinds)}


FIRST_DENSE = LayerKinds(_first_dense, _dense_count)


def shared_hidden(experts: str) -> Computed:
    """Return the mapping of the hidden units of shared experts, which config.json counts by this key."""

    def to_hf(hidden: int, writing: Writing) -> Data:
        unit = writing.data["moe_intermediate_size"]
        if hidden % unit:
            what = f"{hidden} hidden units are no multiple of an expert's {unit}"
            path = "model.stack.block.ffn.shared.hidden"
            writing.require.reject(path, what, f"A multiple of {unit} would map.")
        return {experts: hidden // unit}

    return Computed(
        lambda reading: reading.data["moe_intermediate_size"] * reading.data[experts],
        to_hf,
        (experts,),
    )


def v3_mixture(experts: str = "n_routed_experts", shared: str = "n_shared_experts") -> Table:
    """Return the table of V3's mixture, with these keys for the numbers of experts."""
    expert = {**FFN, "hidden": SameKey("moe_intermediate_size")}
    return {
        "kind": "moe",
        "experts": SameKey(experts, "=num_local_experts"),
        "router": {
            "kind": "group_limited",
            "score": "sigmoid",
            "group_score": "top2",
            "top_k": SameKey("num_experts_per_tok"),
            "normalise": SameKey("norm_topk_prob"),
            "scale": SameKey("routed_scaling_factor", 1.0),
            "expert_groups": SameKey("n_group", 1),
            "topk_groups": SameKey("topk_group", 1),
            "bias_update_rate": Initial(BIAS_UPDATE_RATE),
            "aux_loss_weight": SameKey("aux_loss_alpha", AUX_LOSS_WEIGHT),
            "balance_over": Renamed(
                "seq_aux", {False: "micro_batch", True: "sequence", None: "micro_batch"}
            ),
        },
        "expert": expert,
        "shared": {**expert, "hidden": shared_hidden(shared)},
        "shared_combine": "sum",
    }


def first_dense(sparse: Table, kinds: LayerKinds = FIRST_DENSE) -> ByLayer:
    """Return the feed-forward parts of layers of which the first are dense."""
    return ByLayer(kinds, {"dense": FFN, "sparse": sparse})


def _queries(row: RowContext) -> Transform:
    mixer = row.block.mixer
    plain = mixer.head_width or row.config.width // mixer.heads
    return paired_channels(mixer.heads, plain, mixer.rope_width)


def _query_names(row: RowContext) -> str:
    latent = row.block.mixer.query_latent_width
    return f"self_attn.{'q_proj' if latent is None else 'q_b_proj'}"


def _latent_keys(row: RowContext) -> Transform:
    return paired_channels(1, row.block.mixer.kv_latent_width, row.block.mixer.rope_width)


def _keys_and_values(row: RowContext) -> Transform:
    """Return the transform of the projections of keys and values to one, interleaved by head."""
    heads, (keys, values) = row.block.mixer.heads, [shape[0] for shape in row.shapes]

    def forward(tensors: TensorList) -> TensorList:
        by_head = [part.view(heads, -1, part.shape[1]) for part in tensors]
        return [torch.cat(by_head, 1).flatten(0, 1)]

    def inverse(tensors: TensorList) -> TensorList:
        by_head = tensors[0].view(heads, (keys + values) // heads, -1)
        return [
            part.flatten(0, 1) for part in torch.split(by_head, [keys // heads, values // heads], 1)
        ]

    return Transform(forward, inverse)


V3_MIXTURE = mixture("mlp") | layers(
    {
        "ffn.part.router.bias": "mlp.gate.e_score_correction_bias",
        "ffn.part.shared.gate": "mlp.shared_experts.gate_proj",
        "ffn.part.shared.up": "mlp.shared_experts.up_proj",
        "ffn.part.shared.down": "mlp.shared_experts.down_proj",
    }
)
ZERO_BIAS = {"model.layers.{i}.mlp.gate.e_score_correction_bias": Absent(missing_bias)}
LATENT: Rows = {
    **layers(
        {
            "mixer.part.kv_down": Moved("self_attn.kv_a_proj_with_mqa", _latent_keys),
            "mixer.part.kv_latent_norm": "self_attn.kv_a_layernorm",
            "mixer.part.k mixer.part.v": Moved("self_attn.kv_b_proj", _keys_and_values),
            "mixer.part.q": Moved(_query_names, _queries),
            "mixer.part.q_down": "self_attn.q_a_proj",
            "mixer.part.q_latent_norm": "self_attn.q_a_layernorm",
        }
    ),
}

_MLA = {
    "kind": "mla",
    "heads": SameKey("num_attention_heads"),
    "kv_latent_width": SameKey("kv_lora_rank"),
    "query_latent_width": SameKey("q_lora_rank"),
    "head_width": SameKey("qk_nope_head_dim"),
    "rope_width": SameKey("qk_rope_head_dim"),
    "value_width": SameKey("v_head_dim"),
    "core": CORE,
    "norm": {"kind": "rms", "eps": Initial(EPS)},
    "scale": YarnScale(),
    "dropout": SameKey("attention_dropout"),
}


def _heads(config: Any, sizes: Any) -> Data:
    return {"num_key_value_heads": config.stack.block_config(0).mixer.heads}


DEEPSEEK_V3 = MISTRAL.variant(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    model={"position": RopeKeys(methods=("yarn",))},
    block={"mixer": _MLA, "ffn": first_dense(v3_mixture())},
    fixed={"attention_bias": (False,), "rope_interleave": (True,)},
    tensors={**LATENT, **V3_MIXTURE},
    absent=ZERO_BIAS,
    checks=(),
    writes=_heads,
    ignored_keys=frozenset({"head_dim", "num_key_value_heads", "qk_head_dim"}),
    notes=(NO_LOSS, SELECTION_BIAS),
)
_V2_ROUTER = {
    "score": "softmax",
    "group_score": "max",
    "normalise": False,
    "bias_update_rate": 0.0,
}
_V2_MIXTURE = merged(v3_mixture(), {"router": _V2_ROUTER})
_GREEDY = merged(_V2_MIXTURE, {"router": {"expert_groups": 1, "topk_groups": 1}})
DEEPSEEK_V2 = DEEPSEEK_V3.variant(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    # A token's experts come from all groups in the greedy method: one group of all experts.
    block={
        "ffn": first_dense(
            ByKey("topk_method", {"group_limited_greedy": _V2_MIXTURE, "greedy": _GREEDY})
        )
    },
    # transformers ignores norm_topk_prob=true, and DeepSeek's own code does not.
    fixed={"rope_interleave": None, "mlp_bias": (False,), "norm_topk_prob": (False,)},
    absent={},
    checks=(heads_divide_width,),
    notes=(NO_LOSS,),
)
GLM4_MOE = MISTRAL.variant(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    model={"position": RopeKeys(partial=True)},
    block={
        "mixer": {
            **BIAS,
            "output_bias": False,
            "core": CORE,
            "qk_norm": ByKey("use_qk_norm", {False: None, True: NORM}),
        },
        "ffn": first_dense(v3_mixture()),
    },
    tensors={**QK_NORMS, **V3_MIXTURE},
    absent=ZERO_BIAS,
    checks=(heads_give_width,),
    ignored_keys=frozenset({"num_mtp_layers", "num_nextn_predict_layers"}),
    notes=(SELECTION_BIAS,),
)
DOTS1 = MISTRAL.variant(
    "dots1",
    "Dots1ForCausalLM",
    block={
        "mixer": {**BIAS, **HEAD_NORM, "core": SOME_WINDOWS},
        "ffn": first_dense(v3_mixture()),
    },
    tensors={**QK_NORMS, **V3_MIXTURE},
    absent=ZERO_BIAS,
    checks=(heads_give_width,),
    ignored_keys=frozenset({"max_window_layers"}),
    notes=(SELECTION_BIAS,),
)
SOLAR_OPEN = GLM4_MOE.variant(
    "solar_open",
    "SolarOpenForCausalLM",
    model={"position": RopeKeys()},
    block={"mixer": {"qk_norm": None}, "ffn": v3_mixture()},
    ignored_keys=frozenset(),
)


def _exaone_kinds(data: Data) -> Sequence[str]:
    kinds: Sequence[str] = data["layer_types"]
    return kinds if data.get("sliding_window") else ["all rotated"] * len(kinds)


def _exaone_types(kinds: Sequence[str]) -> Data:
    if set(kinds) == {"all rotated"}:
        return {"layer_types": [FULL] * len(kinds), "sliding_window": None}
    return {"layer_types": [FULL if kind == "all rotated" else kind for kind in kinds]}


_EXAONE_MIXER = merged(MISTRAL.model["stack"].block["mixer"], {**HEAD_NORM, "core": CORE})
_EXAONE_MIXERS = ByLayer(
    LayerKinds(_exaone_kinds, _exaone_types),
    {
        "all rotated": merged(_EXAONE_MIXER, {"position": Initial(None)}),
        FULL: merged(_EXAONE_MIXER, {"position": "none"}),
        LOCAL: merged(_EXAONE_MIXER, {"position": Initial(None), "core": WindowKey(some=True)}),
    },
)
"""Layers without a window have no positions, unless no layer has a window."""
EXAONE4 = MISTRAL.variant(
    "exaone4",
    "Exaone4ForCausalLM",
    block={"mixer": _EXAONE_MIXERS, "residual": "res_post"},
    tensors={**QK_NORMS, **NORMS_AFTER},
    checks=(heads_give_width,),
    ignored_keys=frozenset({"sliding_window_pattern"}),
)
EXAONE_MOE = MISTRAL.variant(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    block={
        "mixer": _EXAONE_MIXERS,
        "ffn": first_dense(
            v3_mixture("num_experts", "num_shared_experts"), LayerKinds.listed("mlp_layer_types")
        ),
    },
    tensors={
        **QK_NORMS,
        **V3_MIXTURE,
        **layers({"ffn.part.router.bias": "mlp.e_score_correction_bias"}),
    },
    absent={"model.layers.{i}.mlp.e_score_correction_bias": Absent(missing_bias)},
    checks=(heads_give_width,),
    ignored_keys=frozenset({"sliding_window_pattern", "first_k_dense_replace"}),
    notes=(SELECTION_BIAS,),
)

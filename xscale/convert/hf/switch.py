"""Switch Transformer (Fedus et al. 2021): the mixtures of experts in a T5 of transformers."""

import math
from typing import Any

from xscale.convert.hf.architecture import ACTIVATIONS, Data, Requirements

STACKS = ("encoder", "decoder")

CAPACITY = 1 << 30
"""Expert capacity in config.json: unlimited."""
LOSSES = {"aux_loss_weight": "router_aux_loss_coef", "z_loss_weight": "router_z_loss_coef"}
"""Weights of a router's losses: name in xscale -> key of config.json."""
SPARSE_NOTES = (
    "capacity: the logits are compared without it. An export sets expert_capacity so that experts take every token, as "
    "xscale's do in evaluation; an import drops expert_capacity, and capacity_factor limits experts in training",
    "router losses: transformers' are means over a stack's layers and xscale's are sums, so the weight of a layer is "
    "the coefficient divided by the sparse layers of the stack",
    "jitter: in float32, transformers' also multiplies what the experts read; xscale's only what the router reads",
)


def sparse_to_hf(config: Any, dense: Any, require: Requirements) -> Data:
    mixtures: list[Any] = []
    data: Data = {"dense_act_fn": ACTIVATIONS[dense.activation], "expert_capacity": CAPACITY}
    for stack in STACKS:
        path, blocks = f"model.{stack}.rules", getattr(config, stack)
        sparse = [
            layer for layer in range(blocks.depth) if blocks.block_config(layer).ffn.kind == "moe"
        ]
        # Without a sparse layer the library makes block 1 sparse, or the only one.
        expected = _sparse_layers(blocks.depth, len(sparse))
        if sparse != expected:
            what = f"blocks {sparse} of {stack} have an MoE ffn, and transformers can only put it into {expected}"
            require.reject(path, what, "Every second block from 1 would map.")
        for layer in range(blocks.depth):
            block = blocks.block_config(layer)
            require.one_of(path, block.model_copy(update={"ffn": dense}), blocks.block)
            if block.ffn.kind == "moe":
                mixtures.append(block.ffn)
        data[f"num_sparse_{stack}_layers"] = len(sparse)
    if any(_without_weights(mixture) != _without_weights(mixtures[0]) for mixture in mixtures):
        require.reject("model.decoder.rules", "the MoE ffns differ", "Equal MoE ffns would map.")
    if not mixtures or require.problems:
        if not mixtures:
            require.reject(
                "model.encoder.rules", "no block has an MoE ffn", "Architecture t5 would map."
            )
        return {}
    for key in ("aux_loss_weight", "z_loss_weight"):
        # Their losses pool the layers of a stack, and ours are added.
        sums = [
            math.fsum(getattr(mixture.router, key) for mixture in _mixtures(getattr(config, stack)))
            for stack in STACKS
        ]
        data[LOSSES[key]] = sums[0]
        if not math.isclose(*sums, rel_tol=1e-6, abs_tol=1e-12):
            what = f"the sum of {key} over the layers is {sums[0]:g} in the encoder and {sums[1]:g} in the decoder"
            require.reject(f"model.decoder.rules.ffn.router.{key}", what, "Equal sums would map.")
    return data | _mixture(mixtures[0], dense, require)


def _mixture(moe: Any, dense: Any, require: Requirements) -> Data:
    path = "model.encoder.rules.ffn"
    require.one_of(f"{path}.router", moe.router.kind, "switch")
    require.one_of(f"{path}.expert", moe.expert, dense)
    require.one_of(f"{path}.shared", moe.shared, None)
    if require.problems:
        return {}
    return {
        "num_experts": moe.experts,
        "router_bias": False,
        "router_dtype": "float32",
        "router_jitter_noise": moe.router.jitter,
    }


def _sparse_layers(depth: int, count: int) -> list[int]:
    """Return the layers that the library makes sparse if config.json says that `count` of a stack's `depth` are."""
    step = depth // count if count else depth
    return [layer for layer in range(depth) if step == 1 or layer % step == 1]


def sparse_rule(data: Data, depth: int, count: int, ffn: Data) -> Data:
    """Return the rule that makes these layers mixtures of experts."""
    layers = _sparse_layers(depth, count)
    router = {
        "kind": "switch",
        "jitter": float(data["router_jitter_noise"]),
        "balance_over": "sequence",
        **{key: float(data[hf_key]) / len(layers) for key, hf_key in LOSSES.items()},
    }
    moe = {"kind": "moe", "experts": data["num_experts"], "expert": ffn, "router": router}
    step = depth // count if count else depth
    return {"every": step, "at": 1 if step > 1 else 0, "ffn": moe}


def _mixtures(stack: Any) -> list[Any]:
    ffns = [stack.block_config(layer).ffn for layer in range(stack.depth)]
    return [ffn for ffn in ffns if ffn.kind == "moe"]


def _without_weights(moe: Any) -> Any:
    """Return the config of an MoE ffn without the weights of its losses, which differ with the layers of a stack."""
    if moe.router.kind != "switch":
        return moe
    return moe.model_copy(
        update={"router": moe.router.model_copy(update=dict.fromkeys(LOSSES, 0.0))}
    )


def dropless(config: Any) -> Any:
    """Return the config without expert capacity, which only limits training micro-batches."""
    changes = {}
    for stack in STACKS:
        blocks = getattr(config, stack)
        free = {"capacity_factor": None, "eval_capacity_factor": None}
        rules = tuple(
            rule.model_copy(update={"ffn": rule.ffn.model_copy(update=free)})
            if rule.ffn and rule.ffn.kind == "moe"
            else rule
            for rule in blocks.rules
        )
        block = blocks.block
        if block.ffn.kind == "moe":
            block = block.model_copy(update={"ffn": block.ffn.model_copy(update=free)})
        changes[stack] = blocks.model_copy(update={"rules": rules, "block": block})
    return config.model_copy(update=changes)

"""The table of refused passes over the depth: exits, gates, pooling, sharing and mixes of layers; see `refusals`."""

from typing import Any

from tests.requirements.sections import BLOCK, DECODER, ENCODER, PAIR, Sections, decoder


def exits(**values: Any) -> Sections:
    """A decoder of four blocks with exits."""
    return decoder({"exits": values})


def policy(criterion: str, threshold: float, **values: Any) -> Sections:
    """A decoder whose tokens leave by a policy."""
    return exits(policy={"criterion": criterion, "threshold": threshold, **values})


def pooled(stack: Sections | None = None, *, model: Sections = ENCODER, **values: Any) -> Sections:
    """A model, an encoder if no other is given, whose sequence is shortened."""
    whole = {"before": (1,), "decoder_blocks": 2, **values}
    return {**model, "stack": {**ENCODER["stack"], "pooling": whole, **(stack or {})}}


def pooled_block(*, pooling: Sections | None = None, **block: Any) -> Sections:
    """An encoder whose blocks have other parts, and whose sequence is shortened."""
    return pooled({"block": {**BLOCK, **block}}, **(pooling or {}))


def decoding(stack: Sections | None = None, *, model: Sections = ENCODER, **block: Any) -> Sections:
    """A model, an encoder if no other is given, whose last block decodes masked tokens."""
    whole = {"mask_decoder": {}, "block": {**BLOCK, **block}, **(stack or {})}
    return {**model, "stack": {**ENCODER["stack"], **whole}}


def remembering(stack: Sections | None = None, *, model: Sections = DECODER) -> Sections:
    """A model, a decoder if no other is given, that reads a memory of the segments before."""
    whole = {"segment_memory": {"length": 8}, **(stack or {})}
    return {**model, "stack": {**DECODER["stack"], **whole}}


def compressed(memory: Sections | None = None, **values: Any) -> Sections:
    """A decoder whose memory is compressed."""
    compression = {"slots": 4, "rate": 2, **values}
    return remembering({"segment_memory": {"length": 8, "compression": compression, **(memory or {})}})


def attention(**values: Any) -> Sections:
    """Attention of four heads."""
    return {"kind": "attention", "heads": 4, **values}


PRIOR, REUSED = {"kind": "prior_scores"}, {"kind": "reused_attention", "heads": 4}
LAZY = attention(core={"kind": "prior_scores", "previous": 0})
DEPTHS: dict[str, Sections] = {
    "exits after blocks that are not there": exits(blocks=(1, 9)),
    "an exit after the last block alone": exits(blocks=(3,)),
    "exits in no order": exits(blocks=(2, 1, 1)),
    "an exit of one block": decoder({"exits": {}, "depth": 1}),
    "exits of scores that are handed on": decoder(
        {"exits": {"policy": {"criterion": "entropy", "threshold": 1}}}, mixer=attention(core=PRIOR)
    ),
    "exits of tokens that halt": decoder({"exits": {}, "halting": {}}),
    "exits of an encoder with a decoder": {**PAIR, "encoder": {**PAIR["encoder"], "exits": {}}},
    "a frozen head of exits": exits(two_stage=0.5, head="shared"),
    "losses that end before the exits are trained": exits(two_stage=0.5, stop="by_depth"),
    "a second target behind frozen exits": exits(two_stage=0.5, second_target=0.5),
    "a second target of an encoder": {**ENCODER, "stack": {**ENCODER["stack"], "exits": {"second_target": 0.5}}},
    "weights of losses that are apart": exits(two_stage=0.5, weights="linear"),
    "diversity of exits in two stages": exits(two_stage=0.5, diversity=0.1),
    "diversity of exits that end": exits(stop="by_depth", diversity=0.1),
    "sampling of no policy": exits(self_sampling=0.5),
    "sampling in two stages": exits(self_sampling=0.5, two_stage=0.5, policy={"criterion": "entropy", "threshold": 1}),
    "uncertainty without a window": policy("uncertainty", 0.5),
    "a window of entropy": policy("entropy", 1, window=1),
    "a vote without a power": policy("vote", 1),
    "a power of patience": policy("patience", 1, power=0.5),
    "a distance of entropies": policy("entropy", 1, tolerance=0.1),
    "more patience than exits": policy("patience", 9),
    "half an exit of patience": policy("patience", 1.5),
    "patience of one exit": exits(blocks=(0,), policy={"criterion": "patience", "threshold": 1}),
    "more than all uncertainty": policy("uncertainty", 1.5, window=1),
    "more votes than exits": policy("vote", 9, power=0.5),
    "no votes": policy("vote", 0, power=0.5),
    "budgets in no order": decoder(gates={"budgets": (1.0, 0.5)}),
    "a budget that is not trained": decoder(gates={"budgets": (0.5, 1.0), "budget": 0.7}),
    "gates of a stream that is not skipped": decoder(gates={}, residual="attention_residuals"),
    "rules of blocks that are shared": decoder(
        {"share": "all", "rules": ({"every": 2, "at": 1, "mixer": attention(kv_heads=2)},)}
    ),
    "scores of blocks that are shared": decoder({"share": "all"}, mixer=attention(core=PRIOR)),
    "values of blocks that are shared": decoder({"share": "all"}, mixer={"kind": "rwkv7", "heads": 4}),
    "scores that no block hands on": decoder({"rules": ({"every": 2, "at": 1, "mixer": REUSED},)}),
    "scores of a core that hands on none": decoder(
        {"rules": ({"every": 4, "at": 1, "mixer": attention()},)}, mixer=attention(core=PRIOR)
    ),
    "scores before the first block": decoder(mixer=REUSED),
    "scores of other heads": decoder({"rules": ({"every": 2, "at": 1, "mixer": {**REUSED, "heads": 2}},)}, mixer=LAZY),
    "a mixer without quaternions": decoder({"linear_maps": "quaternion"}, mixer={"kind": "mamba2"}),
    "an ffn without quaternions": decoder({"linear_maps": "quaternion"}, ffn={"kind": "moe", "experts": 4}),
    "hidden units that quaternions do not share": decoder(
        {"linear_maps": "quaternion"}, ffn={"kind": "dense", "hidden": 30}
    ),
    "a width that quaternions do not share": {
        **decoder({"linear_maps": "quaternion"}, mixer=attention(heads=1)),
        "width": 30,
    },
    "heads that quaternions do not share": decoder({"linear_maps": "quaternion"}, mixer=attention(heads=16)),
    "memory of a bidirectional model": remembering(model=ENCODER),
    "memory of an encoder's output": {**PAIR, "decoder": {**PAIR["decoder"], "segment_memory": {"length": 8}}},
    "memory of tokens that halt": remembering({"halting": {}}),
    "memory without a block's position": remembering({"block": {**BLOCK, "position": {"kind": "sinusoidal"}}}),
    "memory of a mixer of its own tokens": remembering({"block": {**BLOCK, "mixer": {"kind": "mamba2"}}}),
    "memory of a core of its own tokens": remembering({"block": {**BLOCK, "mixer": attention(core="linear")}}),
    "memory of keys that are queries": remembering({"block": {**BLOCK, "mixer": attention(shared_qk=True)}}),
    "memory without distances": {**remembering(), "position": {"kind": "alibi"}},
    "memory of parallel sublayers": remembering({"block": {**BLOCK, "residual": "parallel"}}),
    "a memory in windows that no segment has": compressed(rate=3),
    "a compression that nothing trains": compressed(loss_weight=0.0),
    "a compressed memory in evaluation alone": compressed({"eval_length": 16}),
    "a summary for no block": decoder({"segment_summary": {"layer": 4}}),
    "a summary beside a memory": remembering({"segment_summary": {}}),
    "a summary for a mixer of its own tokens": decoder({"segment_summary": {}}, mixer={"kind": "mamba2"}),
    "a summary of later segments": {**ENCODER, "stack": {**ENCODER["stack"], "segment_summary": {}}},
    "feedback beside a memory": remembering({"feedback": {"length": 8}}),
    "feedback of exits": decoder({"feedback": {"length": 8}, "exits": {}}),
    "feedback for a mixer of its own tokens": decoder({"feedback": {"length": 8}}, mixer={"kind": "mamba2"}),
    "windows of later tokens": pooled(model=DECODER),
    "windows of tokens that halt": pooled({"halting": {}}),
    "windows of tokens that leave": pooled({"exits": {}}),
    "windows of a mask decoder": pooled({"mask_decoder": {}}),
    "windows of scores": pooled_block(mixer=attention(core=PRIOR)),
    "windows of gates": pooled_block(gates={}),
    "windows before no block": pooled(before=(1, 9)),
    "windows of the decoder's blocks": pooled(before=(1, 3), decoder_blocks=1),
    "windows of the decoder's blocks alone": pooled(decoder_blocks=4),
    "windows of a convolution": pooled(method="distill"),
    "a norm of a mean": pooled(norm={"kind": "layer"}),
    "windows of a bias by distance": {
        **pooled_block(mixer=attention(core={"kind": "block_sparse"}), pooling={"queries_only": False}),
        "position": {"kind": "alibi"},
    },
    "fewer queries of a mixer": pooled_block(mixer={"kind": "fourier"}),
    "fewer queries of shared projections": pooled_block(mixer=attention(shared_qk=True)),
    "fewer queries of a core": pooled_block(mixer=attention(core={"kind": "informer"})),
    "fewer queries of parallel sublayers": pooled_block(residual="parallel"),
    "fewer queries of a block's position": pooled_block(position={"kind": "sinusoidal"}),
    "a mask decoder of later tokens": decoding(model=DECODER, residual="post"),
    "a mask decoder of normed keys": decoding(residual="pre"),
    "a mask decoder of parallel sublayers": decoding(residual="parallel"),
    "a mask decoder of a block's position": decoding(residual="post", position={"kind": "sinusoidal"}),
    "a mask decoder of tokens that halt": decoding({"halting": {}}, residual="post"),
    "a mask decoder of a mixer": decoding(residual="post", mixer={"kind": "fourier"}),
    "a mask decoder of shared projections": decoding(residual="post", mixer=attention(shared_qk=True)),
    "a mask decoder of scores": decoding(residual="post", mixer=attention(core=PRIOR)),
    "a position of attention in a mask decoder": decoding(
        {"mask_decoder": {"position": {"kind": "alibi"}}}, residual="post"
    ),
}
"""Name -> a model that a pass of its stack refuses."""

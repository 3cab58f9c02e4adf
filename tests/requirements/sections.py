"""Sections of small recipes, which the tables of refusals are made of."""

from typing import Any

Sections = dict[str, Any]
BLOCK: Sections = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "dense", "hidden": 32}}
DECODER: Sections = {"kind": "decoder", "width": 32, "stack": {"depth": 4, "block": BLOCK}}
ENCODER: Sections = {**DECODER, "kind": "encoder"}
PAIR: Sections = {
    "kind": "encoder_decoder",
    "width": 32,
    "encoder": {"depth": 2, "block": BLOCK},
    "decoder": {"depth": 2, "block": BLOCK},
}
SENTENCES: Sections = {**ENCODER, "token_types": 2, "sentence_head": {"classes": 2}}
APART: Sections = {"cross_documents": False}
SPLIT: Sections = {**APART, "split_sentences": True, "sequence_length": 32}
DEEPSPEED: Sections = {"mesh": {"dp_shard": 2}, "zero": {"engine": "deepspeed", "stage": 2}}
LABELLED: Sections = {**APART, "source": {"kind": "stdlib_labelled"}}


def encoder(**block: Any) -> Sections:
    """A model of kind encoder whose blocks have other parts."""
    return {**ENCODER, "stack": {"depth": 4, "block": {**BLOCK, **block}}}


def decoder(stack: Sections | None = None, **block: Any) -> Sections:
    """A decoder whose stack, or whose blocks, have other parts."""
    return {**DECODER, "stack": {"depth": 4, "block": {**BLOCK, **block}, **(stack or {})}}

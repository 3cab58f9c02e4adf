"""Transformer-XL's u and v, which the layers of a stack have in common, as in the paper, or each for itself."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance.made import close, dims, drawn, ready
from tests.nn.position.test_scores import literal
from xscale.core.config import decode
from xscale.nn.blocks.stack import Stack, StackConfig
from xscale.nn.dims import Dims
from xscale.nn.position.transformer_xl import TransformerXl
from xscale.nn.tokens import Tokens

LENGTH, WIDTH, HEADS = 7, 32, 4
BIASES = ["content_bias", "position_bias"]


def stack_of(rules: Any = (), **position: Any) -> tuple[StackConfig, Dims]:
    mixer = {"kind": "attention", "heads": HEADS}
    config = decode(StackConfig, {"depth": 3, "block": {"mixer": mixer}, "rules": list(rules)})
    return config, replace(dims(causal=True), position=TransformerXl.Config(**position))


def test_all_layers_have_one_u_and_v() -> None:
    config, sizes = stack_of(shared_biases=True)
    assert Stack.check(config, sizes, "model.stack") == []
    stack = ready(Stack(config, sizes))
    names = [name for name, _ in stack.named_parameters() if name.endswith(("content_bias", "position_bias"))]
    assert names == [f"position_tables.{name}" for name in BIASES]
    parts = [block.mixer.part.position for block in stack.blocks.values()]
    assert len({id(part.weight) for part in parts}) == len(parts), "W is of each layer"
    assert all(part.layer_tables is stack.position_tables for part in parts)
    assert Stack.check(*stack_of(), "model.stack") == []
    apart = [name for name, _ in Stack(*stack_of()).named_parameters() if name.endswith("content_bias")]
    assert len(apart) == 3


@pytest.mark.parametrize("layer", ["0", "2"])
def test_each_layer_computes_the_papers_scores_with_them(layer: str) -> None:
    stack = ready(Stack(*stack_of(shared_biases=True)))
    mixer, tables = stack.blocks[layer].mixer.part, stack.position_tables
    x = drawn(2, LENGTH, WIDTH)
    tokens = Tokens.from_ids(torch.zeros(2, LENGTH, dtype=torch.long))
    out = mixer(x, tokens)
    for name in BIASES:
        vars(mixer.position)[name] = getattr(tables, name)
    assert close(out, literal(mixer, x, torch.zeros(2, LENGTH, dtype=torch.long)))
    with torch.no_grad():
        tables.content_bias += 1
    assert not close(mixer(x, tokens), out)


def test_mixers_of_other_heads_cannot_share_them() -> None:
    for mixer in ({"kind": "attention", "heads": 8}, {"kind": "attention", "heads": HEADS, "head_width": 16}):
        rules = [{"every": 2, "at": 1, "mixer": mixer}]
        (problem,) = Stack.check(*stack_of(rules, shared_biases=True), "model.stack")
        assert problem.path == "model.stack.rules"
        assert "position.shared_biases=false" in problem.advice
        assert Stack.check(*stack_of(rules), "model.stack") == []

"""T5's relative positions against `transformers`, and what their check refuses."""

import copy
from dataclasses import replace

import pytest
import torch

from tests.conformance.made import close, dims, drawn, ready
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.blocks.stack import Stack, StackConfig
from xscale.nn.dims import Dims
from xscale.nn.materialize import materialize
from xscale.nn.position.deberta import Deberta
from xscale.nn.position.relative import Relative
from xscale.nn.tokens import Tokens


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (18, 20), (7, 9)])
def test_buckets_are_t5s(causal: bool, buckets: int, distance: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    part = Relative(Relative.Config(buckets=buckets, distance=distance), dims(causal=causal), 2, 8)
    after = torch.arange(-400, 400)
    if causal:
        after = after[after <= 0]
    wanted = T5Attention._relative_position_bucket(after, not causal, buckets, distance)
    assert torch.equal(part.bucket(after, buckets), wanted)
    assert wanted.unique().numel() == (buckets if causal else 2 * (buckets // 2) - 1)


def test_the_bias_is_a_row_of_the_table() -> None:
    part = Relative(Relative.Config(), dims(causal=True), 2, 8)
    torch.nn.init.normal_(part.weight)
    places = torch.tensor([[0, 1, 2, 300]])
    bias = part.bias(places, places)
    assert bias.shape == (1, 2, 4, 4)
    assert torch.equal(bias[0, :, 2, 1], part.weight[1])
    assert torch.equal(bias[0, :, 3, 0], part.weight[31])
    assert torch.equal(bias[0, :, 3, 2], part.weight[31])


def test_a_count_of_buckets_that_cannot_be_halved_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="buckets: must be >= 4, got 3"):
        decode(Relative.Config, {"buckets": 3})


def stack_of(rules: list[dict[str, object]], **position: object) -> tuple[StackConfig, Dims]:
    mixer = {"kind": "attention", "heads": 2}
    config = decode(StackConfig, {"depth": 3, "block": {"mixer": mixer}, "rules": rules})
    return config, replace(dims(causal=True), position=Relative.Config(**position))


def test_blocks_share_one_table_which_belongs_to_their_stack() -> None:
    config, sizes = stack_of([], shared=True)
    stack = Stack(config, sizes)
    assert [name for name, _ in stack.named_parameters() if "position" in name] == ["position.weight"]
    torch.nn.init.normal_(stack.position.weight)
    mixers = [block.mixer.part for block in stack.blocks.values()]
    assert all(mixer.position is stack.position for mixer in mixers)
    copied = copy.deepcopy(stack)
    assert all(block.mixer.part.position is copied.position for block in copied.blocks.values())
    # The gradient of the table is that of all blocks.
    materialize(stack, 0)
    tokens = Tokens.from_ids(torch.zeros(1, 6, dtype=torch.long))
    x = torch.randn(1, 6, sizes.width)
    out = stack(x, tokens).square().sum()
    (whole,) = torch.autograd.grad(out, [stack.position.weight])
    parts = []
    for mixer in mixers:
        others = [other for other in mixers if other is not mixer]
        for other in others:
            vars(other)["position"] = copy.deepcopy(stack.position).requires_grad_(False)
        parts += torch.autograd.grad(stack(x, tokens).square().sum(), [stack.position.weight])
        for other in others:
            vars(other)["position"] = stack.position
    torch.testing.assert_close(sum(parts), whole)
    config, sizes = stack_of([])
    assert len([name for name, _ in Stack(config, sizes).named_parameters() if "position" in name]) == 3


def test_mixers_with_other_heads_cannot_share_a_table() -> None:
    rule = {"every": 2, "at": 1, "mixer": {"kind": "attention", "heads": 4}}
    config, sizes = stack_of([rule], shared=True)
    (problem,) = Stack.check(config, sizes, "model.stack")
    assert problem.path == "model.stack.rules"
    assert "position.shared=false" in problem.advice
    assert Stack.check(*stack_of([rule]), "model.stack") == []


def test_mixers_with_other_heads_share_a_table_without_heads() -> None:
    """DeBERTa's, which each mixer projects to heads of its own."""
    rule = {"every": 2, "at": 1, "mixer": {"kind": "attention", "heads": 4}}
    config = decode(StackConfig, {"depth": 2, "block": {"mixer": {"kind": "attention", "heads": 2}}, "rules": [rule]})
    around = replace(dims(causal=False), position=Deberta.Config(shared=True))
    assert Stack.check(config, around, "model.stack") == []
    stack, apart = ready(Stack(config, around)), ready(Stack(config, replace(around, position=Deberta.Config())))
    with torch.no_grad():
        for block in apart.blocks.values():
            block.mixer.part.position.table.copy_(stack.position.table)
        for name, parameter in apart.named_parameters():
            if "position" not in name:
                parameter.copy_(stack.get_parameter(name))
    x, tokens = drawn(1, 9, around.width), Tokens.from_ids(torch.zeros(1, 9, dtype=torch.long))
    assert close(stack(x, tokens), apart(x, tokens))


def test_a_distance_within_the_exact_buckets_is_refused() -> None:
    problems = Relative.check(Relative.Config(distance=16), dims(causal=True), "p")
    assert [problem.path for problem in problems] == ["p.distance"]
    assert Relative.check(Relative.Config(), dims(causal=True), "p") == []

"""A stack: rules over the depth, the final norm, noise that a layout cannot change, each problem said once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import dims, drawn, ready, tokens
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.blocks.block import BlockConfig, SublayerConfig
from xscale.nn.blocks.stack import LayerRule, Stack, StackConfig
from xscale.nn.depth.depth_pass import StackUse
from xscale.nn.ffn.ffn import Dense, Gated
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import Fourier
from xscale.nn.module import parameter_inits, substitute
from xscale.nn.residual.norms import Post

SMALL = BlockConfig(mixer=Attention.Config(heads=2), ffn=Dense.Config(hidden=8))


def kinds(*rules: LayerRule, depth: int = 6) -> list[str | None]:
    config = StackConfig(depth=depth, block=SMALL, rules=rules)
    return [config.block_config(layer).ffn.kind for layer in range(depth)]


@pytest.mark.parametrize(
    ("rule", "layers"),
    [
        ({"every": 2}, [0, 2, 4]),
        ({"every": 2, "at": 1}, [1, 3, 5]),
        ({"every": 3, "at": 2}, [2, 5]),
        ({"first": 2}, [2, 3, 4, 5]),
        ({"last": 2}, [0, 1]),
        ({"first": 1, "last": 5, "every": 2}, [2, 4]),
    ],
)
def test_a_rule_holds_where_it_says(rule: dict[str, Any], layers: list[int]) -> None:
    found = kinds(LayerRule(ffn=Gated.Config(), **rule))
    assert [layer for layer, kind in enumerate(found) if kind == "gated"] == layers


def test_later_rules_win_and_leave_alone_what_they_do_not_name() -> None:
    rules = (
        LayerRule(ffn=Gated.Config(hidden=5), mixer=Fourier.Config()),
        LayerRule(every=2, ffn=Gated.Config(hidden=7)),
    )
    config = StackConfig(depth=2, block=SMALL, rules=rules)
    first, second = config.block_config(0), config.block_config(1)
    assert (first.ffn, second.ffn) == (Gated.Config(hidden=7), Gated.Config(hidden=5))
    assert first.mixer == second.mixer == Fourier.Config()
    assert first.norm == SMALL.norm


def test_a_rule_sets_the_sublayers_of_its_blocks() -> None:
    """s s (sf) (sf) f f, the Sandwich Transformer of 8 sublayers with coefficient 2."""
    mixer, ffn = (SublayerConfig(part="mixer"),), (SublayerConfig(part="ffn"),)
    rules = (LayerRule(last=2, sublayers=mixer), LayerRule(first=4, sublayers=ffn))
    stack = Stack(StackConfig(depth=6, block=SMALL, rules=rules), dims(width=8))
    orders = [block.order for block in stack.blocks.values()]
    assert orders == [["mixer"]] * 2 + [["mixer", "ffn"]] * 2 + [["ffn"]] * 2


@pytest.mark.parametrize(
    ("parts", "cross", "said"),
    [
        (("ffn",), False, "no block has a sublayer 'mixer', without which no token sees another"),
        (("mixer", "ffn"), True, "no block has a sublayer 'cross', without which the decoder does not read the source"),
    ],
)
def test_a_stack_without_a_needed_sublayer_is_refused(parts: tuple[Any, ...], cross: bool, said: str) -> None:
    block = SMALL.model_copy(update={"sublayers": tuple(SublayerConfig(part=part) for part in parts)})
    (problem,) = Stack.check(StackConfig(depth=2, block=block), dims(width=8), "x", StackUse(cross=cross))
    assert said in str(problem)


def test_the_blocks_run_in_turn_and_pre_norm_ends_in_a_norm() -> None:
    stack = ready(Stack(StackConfig(depth=3, block=SMALL), dims(width=8)))
    x, about = drawn(2, 5, 8), tokens(5)
    wanted = x
    for block in stack.blocks.values():
        wanted = block(wanted, about)
    assert stack.norm is not None
    assert torch.allclose(stack(x, about), stack.norm(wanted))
    post = Stack(StackConfig(depth=1, block=SMALL.model_copy(update={"residual": Post.Config()})), dims(width=8))
    assert post.norm is None


def noisy() -> Stack:
    stack = ready(Stack(StackConfig(depth=3, block=SMALL.model_copy(update={"dropout": 0.3})), dims(width=8)))
    return stack.train()


def test_noise_is_a_function_of_its_seed() -> None:
    stack, x = noisy(), drawn(2, 5, 8)
    first = stack(x, tokens(5, rng_seed=1))
    torch.rand(10)
    assert torch.equal(stack(x, tokens(5, rng_seed=1)), first)
    assert not torch.equal(stack(x, tokens(5, rng_seed=2)), first)


def test_the_noise_of_a_block_does_not_depend_on_the_blocks_before_it() -> None:
    """Draws do not depend on earlier blocks: a pipeline stage, which has not run those, draws what one process
    draws."""
    whole, x, about = noisy(), drawn(2, 5, 8), tokens(5, rng_seed=1)
    reached: list[Tensor] = []

    def watched(block: Any, *inputs: Any) -> Tensor:
        reached.append(inputs[0])
        out: Tensor = block(*inputs)
        return out

    substitute(whole, "run_block", watched)
    wanted = whole(x, about)
    stage = noisy()
    for name in ("0", "1"):
        del stage.blocks[name]
    assert torch.equal(stage(reached[2], about), wanted)


def test_what_writes_into_the_residual_stream_starts_by_the_depth() -> None:
    stack = Stack(StackConfig(depth=8, block=SMALL), dims(width=8))
    starts = {name: init.std for name, _, init in parameter_inits(stack)}
    assert starts["blocks.0.ffn.part.down.weight"] == pytest.approx(0.02 / 4)
    assert starts["blocks.0.mixer.part.o.weight"] == pytest.approx(0.02 / 4)
    assert starts["blocks.0.ffn.part.up.weight"] == 0.02


def test_problems_are_said_once() -> None:
    wrong = StackConfig(depth=6, block=SMALL.model_copy(update={"mixer": Attention.Config(heads=3)}))
    assert len(Stack.check(wrong, dims(width=8), "stack")) == 1
    with pytest.raises(ConfigError, match=r"depth: must be in \[1, 1024\], got 0"):
        decode(StackConfig, {"depth": 0})
    rule = StackConfig(depth=2, block=SMALL, rules=(LayerRule(every=2, at=2, ffn=Dense.Config()),))
    assert "stack.rules.0: at=2 is outside the period every=2" in str(Stack.check(rule, dims(width=8), "stack")[0])
    differs = StackConfig(depth=2, block=SMALL, rules=(LayerRule(at=0, every=2, mixer=Fourier.Config()),))
    (problem,) = Stack.check(differs, dims(width=8), "stack")
    assert "block 0" in problem.path

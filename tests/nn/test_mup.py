"""muP (Yang et al. 2022): table 8 by parameter, the coordinate check over widths, and what is refused."""

import math
import re
from typing import Any

import pytest
import torch

from tests.parallel.against_one import VOCABULARY, asked
from xscale.convert.hf.architecture import Requirements, require_features
from xscale.nn.materialize import materialize
from xscale.nn.module import parameter_inits
from xscale.nn.tokens import Tokens
from xscale.optim.optimizer.optimizer import OPTIMIZERS, LocalParameter
from xscale.parallel.engine.fsdp import optimizer_weights
from xscale.parallel.shard.sharded import sharded_parameters
from xscale.recipe import Recipe
from xscale.requirements.optimizer import learning_rates_go_by_the_width
from xscale.settings.settings import build_on_meta

BASE = 32


def model(width: int, head_width: int = 16, *, moe: bool = False, **changes: Any) -> dict[str, Any]:
    """A decoder whose widths all grow with `width`."""
    expert = {"kind": "gated", "hidden": width}
    ffn = {"kind": "moe", "experts": 4, "router": "topk", "expert": expert} if moe else {**expert, "bias": True}
    block = {"mixer": {"kind": "attention", "heads": width // head_width, "bias": True}, "ffn": ffn}
    return {"kind": "decoder", "width": width, "stack": {"depth": 2, "block": block}, **changes}


def recipe(width: int, *, scaled: bool = True, optimizer: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    settings = {"mup": {"base_width": BASE}} if scaled else {}
    return asked(model(width, **{**settings, **changes}), {}, optimizer=optimizer or {"kind": "adamw"})


@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights_and_learning_rates_are_those_of_table_8(tied: bool) -> None:
    """At four times the base width, relative to the base width; the table's fan_in is then 4."""
    m = 4.0
    wide, base = (build_on_meta(recipe(width, moe=True, tied=tied), VOCABULARY) for width in (4 * BASE, BASE))
    stds, stds_at_base = ({name: init.std for name, _, init in parameter_inits(one)} for one in (wide, base))
    parameters = sharded_parameters(wide)
    settings = recipe(4 * BASE, moe=True, tied=tied, optimizer={"kind": "adamw", "weight_decay": 0.3})
    optimizer = OPTIMIZERS.build(settings.optimizer, optimizer_weights(parameters))
    # (variance of initial weights, Adam's learning rate) for each kind of parameter.
    hidden, vector, output_without_multiplier = (1 / m, 1 / m), (1.0, 1.0), (1 / m**2, 1 / m)
    expected = {
        "embed.table.weight": vector,
        "stack.blocks.0.mixer.norm.weight": vector,
        "stack.blocks.0.mixer.part.q.bias": vector,
        **dict.fromkeys((f"stack.blocks.1.mixer.part.{name}.weight" for name in "qkvo"), hidden),
        **dict.fromkeys((f"stack.blocks.1.ffn.part.experts.{name}" for name in ("gate", "up", "down")), hidden),
        "stack.blocks.0.ffn.part.router.weight": output_without_multiplier,
        **({} if tied else {"head.weight": vector}),
    }
    rates = dict(zip([parameter.name for parameter in parameters], optimizer.lr_factors, strict=True))
    decays = dict(zip([parameter.name for parameter in parameters], optimizer.weight_decays, strict=True))
    for name, (variance, rate) in expected.items():
        assert (stds[name] / stds_at_base[name]) ** 2 == pytest.approx(variance), name
        assert rates[name] == pytest.approx(rate), name
        assert decays[name] * rates[name] in (pytest.approx(0.3), 0.0), name
    # The table's multiplier of the output.
    assert wide.head.scale == pytest.approx(1 / m)
    assert base.head.scale == 1


def test_scores_are_divided_by_the_width_of_a_head() -> None:
    """Definition 4.1: q.k / d in place of q.k / sqrt(d), equal at the base's d."""
    for head_width in (8, 32):
        built = build_on_meta(recipe(64, head_width=head_width, mup={"base_width": 32, "base_head_width": 8}), 64)
        mixer = built.stack.blocks["0"].mixer.part
        factor = 1.0 if mixer.query_factor is None else mixer.query_factor
        assert factor / math.sqrt(head_width) == pytest.approx(math.sqrt(8) / head_width)


def test_at_the_base_width_nothing_changes() -> None:
    states = []
    for scaled in (True, False):
        network = build_on_meta(recipe(BASE, scaled=scaled), VOCABULARY)
        materialize(network, 0)
        states.append((network, network(tokens())))
    assert torch.equal(states[0][1], states[1][1])
    weights = optimizer_weights(sharded_parameters(states[0][0]))
    assert {weight.width_ratio for weight in weights} == {1.0}


def tokens() -> Tokens:
    return Tokens.from_ids(torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(1)))


def changes(settings: Recipe, lr: float, steps: int = 4) -> dict[str, float]:
    """Root mean square of the change of activations after a few steps: of the residual stream and of the logits."""
    network = build_on_meta(settings, VOCABULARY)
    materialize(network, 0)
    parameters = sharded_parameters(network)
    optimizer = OPTIMIZERS.build(settings.optimizer, optimizer_weights(parameters))
    stream: list[torch.Tensor] = []
    network.stack.blocks["1"].register_forward_hook(lambda module, inputs, output: stream.append(output.detach()))
    targets = torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(2))
    before = network(tokens()).detach()
    for _ in range(steps):
        network.zero_grad()
        (network(tokens(), targets) / targets.numel()).backward()
        optimizer.step([parameter.gradient for parameter in parameters], lr)
    after = network(tokens()).detach()
    return {
        "stream": (stream[-1] - stream[0]).square().mean().sqrt().item(),
        "logits": (after - before).square().mean().sqrt().item(),
    }


OPTIMIZERS_AND_RATES: dict[str, tuple[dict[str, Any], float]] = {
    "adamw": ({"kind": "adamw", "weight_decay": 0.0}, 1e-2),
    "lion": ({"kind": "lion", "weight_decay": 0.0}, 3e-3),
    "muon": ({"kind": "muon", "weight_decay": 0.0, "ns_dtype": "float32"}, 1e-2),
    "muon original": ({"kind": "muon", "weight_decay": 0.0, "ns_dtype": "float32", "adjust_lr_fn": "original"}, 1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS_AND_RATES)
@pytest.mark.parametrize("moe", [False, pytest.param(True, marks=pytest.mark.long)])
def test_coordinate_check(name: str, moe: bool) -> None:
    """Activations change as much at eight times the base width; without muP those of some layer change far more."""
    optimizer, lr = OPTIMIZERS_AND_RATES[name]
    growth = {}
    for scaled in (True, False):
        narrow, wide = (
            changes(recipe(width, scaled=scaled, moe=moe, optimizer=optimizer), lr) for width in (BASE, 8 * BASE)
        )
        growth[scaled] = {key: wide[key] / narrow[key] for key in wide}
    assert all(1 / 2 < ratio < 1.5 for ratio in growth[True].values()), growth
    assert growth[False]["logits"] > 2, growth


def problems(settings: Recipe) -> list[str]:
    return [str(problem) for problem in settings.check()]


@pytest.mark.parametrize(
    ("changed", "optimizer", "text"),
    [
        ({"scale_embeddings": True}, "adamw", r"model\.scale_embeddings: multiplies embeddings by sqrt\(width\)"),
        ({"fix_norm": True}, "adamw", r"model\.fix_norm: makes embeddings smaller with the width"),
        ({}, "adafactor", r"optimizer\.kind: 'adafactor' has no rule .* Take adamw, .*lion or muon, or model.mup=null"),
    ],
)
def test_what_has_no_rule_is_refused(changed: dict[str, Any], optimizer: str, text: str) -> None:
    (problem,) = problems(recipe(64, optimizer={"kind": optimizer}, **changed))
    assert re.match(text, problem), problem


def test_parts_without_a_rule_are_refused_by_name() -> None:
    def with_block(**block: Any) -> list[str]:
        changed = model(64, mup={"base_width": 32})
        changed["stack"]["block"] |= block
        return problems(asked(changed, {}))

    assert with_block() == []
    (problem,) = with_block(mixer={"kind": "synthesizer"})
    assert problem.startswith("model.mup: has no rule for the mixer stack.blocks.0.mixer.part (Synthesizer)")
    core = {"kind": "talking_heads"}
    (problem,) = with_block(mixer={"kind": "attention", "heads": 4, "core": core})
    assert problem.startswith("model.mup: has no rule for stack.blocks.0.mixer.part.core.")
    assert "Take null. Or take parts without such parameters" in problem


def test_deepspeed_is_refused() -> None:
    settings = recipe(64)
    zero = settings.parallel.zero.model_copy(update={"engine": "deepspeed"})
    deepspeed = settings.parallel.model_copy(update={"zero": zero})
    (problem,) = learning_rates_go_by_the_width(settings.model, settings.optimizer, deepspeed)
    assert problem.path == "model.mup"


def test_a_learning_rate_of_a_group_is_multiplied_by_that_of_the_width() -> None:
    config = OPTIMIZERS.get("lion").part.Config(groups=({"match": "a", "lr_factor": 0.5, "since": 0.5},))
    weights = [LocalParameter(name, torch.ones(2, 2), True, True, width_ratio=4.0) for name in "ab"]
    optimizer = OPTIMIZERS.get("lion").part(config, weights)
    assert optimizer.lr_factors == [0.0, 0.25]
    optimizer.set_progress(0.5)
    assert optimizer.lr_factors == [0.125, 0.25]


def test_an_export_is_refused() -> None:
    """The libraries multiply neither logits nor scores."""
    require = Requirements("some library")
    require_features(recipe(64).model, (), require)
    assert [problem.path for problem in require.problems] == ["model.mup"]

"""The figures that follow from a few of the repeated layers are those of a step with all of them."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny import recipe
from xscale.measure.op_tracer import Peak, Segment
from xscale.mesh import axes
from xscale.planning.repeated_layers import LinearFigures, Mark, RepeatedLayers, extrapolate
from xscale.planning.simulate_step import SimulatedStep, simulate_layers, simulate_step

ATTENTION = {"kind": "attention", "heads": 4, "kv_heads": 2}
GATED = {"kind": "gated", "hidden": 48}
MIXTURE = {"kind": "moe", "experts": 4, "router": {"kind": "topk", "top_k": 2}, "expert": GATED}


def stack(depth: int, ffn: Any = GATED, rules: Any = (), mixer: Any = ATTENTION, **keys: Any) -> dict[str, Any]:
    return {"depth": depth, "block": {"mixer": mixer, "ffn": ffn}, "rules": list(rules), **keys}


def decoder(*args: Any, **keys: Any) -> dict[str, Any]:
    return {"kind": "decoder", "width": 32, "stack": stack(*args, **keys)}


def sparse(pattern: dict[str, Any]) -> dict[str, Any]:
    return {**ATTENTION, "kv_heads": 4, "core": {"kind": "block_sparse", "block": 16, "pattern": pattern}}


WINDOW = {"kind": "window", "window": 16, "causal": True}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    # Ranks, the model, section `parallel`, and the layers that are simulated at most.
    "one-rank": (1, decoder(16), {}, 4),
    "zero3": (2, decoder(16), {"zero": {"stage": 3}}, 6),
    "zero3-prefetch": (2, decoder(28), {"zero": {"stage": 3, "prefetch": 2}}, 10),
    "zero2-recompute": (2, decoder(16), {"zero": {"stage": 2}, "recompute": {"every": 1}}, 4),
    "selective": (1, decoder(16), {"recompute": {"every": 1, "granularity": "selective"}}, 4),
    "offload": (1, decoder(16), {"recompute": {"every": 1, "offload": True}}, 4),
    "every-second": (1, decoder(16), {"recompute": {"every": 2}}, 6),
    "mixtures": (2, decoder(16, rules=[{"every": 2, "at": 1, "ffn": MIXTURE}]), {"mesh": {"ep": 2}}, 6),
    "dense-first": (2, decoder(17, MIXTURE, [{"last": 1, "ffn": GATED}]), {"mesh": {"ep": 2}}, 5),
    "odd-end": (1, decoder(17, rules=[{"every": 2, "at": 1, "ffn": MIXTURE}]), {}, 7),
    "tp": (2, decoder(16), {"mesh": {"tp": 2}, "tensor": {"sequence": True}}, 4),
    "cp": (2, decoder(16), {"mesh": {"cp": 2}}, 4),
    "pp": (2, decoder(32), {"mesh": {"pp": 2}}, 4),
    "pp-interleaved": (2, decoder(64), {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b"}}, 64),
    "post-norm": (1, decoder(16) | {"stack": {**stack(16), "block": {"residual": {"kind": "post"}}}}, {}, 4),
    "pattern": (1, decoder(16, mixer=sparse(WINDOW)), {}, 4),
    "pattern-grows": (1, decoder(16, mixer=sparse({**WINDOW, "window_growth": 16})), {}, 16),
    "shared": (1, decoder(16, share="all"), {}, 16),
    "two-pieces": (1, decoder(12, rules=[{"first": 6, "ffn": MIXTURE}]), {}, 12),
    "few": (1, decoder(8), {}, 8),
}


def simulated(name: str, folder: Path) -> list[tuple[SimulatedStep, SimulatedStep]]:
    """The step by the rule, and with all layers, of the first rank of each pipeline stage."""
    ranks, network, parallel, _ = CASES[name]
    data = {"sequence_length": 64}
    settings = recipe(folder, model=network, parallel=parallel, data=data, train={"batch_size": 16})
    assert not settings.check(ranks)
    degrees = axes.resolve(settings.parallel.mesh, ranks)
    steps = []
    for rank in degrees.groups_along("pp")[0]:
        arguments = (settings, degrees, rank, 2, 260, lambda work, moved: work + moved)
        steps.append((simulate_step(*arguments), simulate_layers(*arguments, leave_out=0)))
    return steps


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_the_figures_of_a_few_layers_are_those_of_all(name: str, tmp_path: Path) -> None:
    for step, full in simulated(name, tmp_path):
        assert full.left_out == 0
        layers = [repeated.layers for repeated in step.repeated.values()]
        assert max(layers, default=CASES[name][3]) <= CASES[name][3]
        assert bool(layers) == (CASES[name][3] < CASES[name][1]["stack"]["depth"])
        assert step.peak == full.peak
        assert step.state_bytes == full.state_bytes
        assert Counter(step.messages) == Counter(full.messages)
        assert step.groups.keys() == full.groups.keys()
        assert (step.parameters, step.active, step.host_bytes) == (full.parameters, full.active, full.host_bytes)
        for phase, cost in full.costs.items():
            assert vars(step.costs[phase]) == pytest.approx(vars(cost), rel=1e-12), phase


def figures(layers: int, flops: dict[int, float]) -> LinearFigures:
    marks = {
        Mark(0, False, 0, at): Segment(Peak(at, "forward", {"activations": at}), flops.get(at, 1.0))
        for at in range(layers)
    }
    return LinearFigures(marks, {0: RepeatedLayers(0, 1, layers, layers)}, {}, {}, [], layers, layers, 0)


@pytest.mark.parametrize(("different", "extrapolated"), [({}, True), ({0: 2.0, 3: 2.0}, True), ({2: 2.0}, False)])
def test_layers_that_do_not_do_the_same_work_are_not_extrapolated(
    different: dict[int, float], extrapolated: bool
) -> None:
    """The first and the last one have the embedding and the head, and may differ."""
    changes = extrapolate(figures(3, {}), figures(4, different), 10)
    assert (changes is not None) is extrapolated
    if changes is not None:
        assert changes["parameters"] == 13
        assert changes["peak"] == Peak(12, "forward", {"activations": 12})


def test_steps_with_other_marks_are_not_extrapolated() -> None:
    more = figures(4, {})
    recomputed = {**more.segments, Mark(0, False, 1, 0): Segment(Peak())}
    assert extrapolate(figures(3, {}), replace(more, segments=recomputed), 2) is None

"""A recomputation uses the experts that its forward chose, also where rounding would let it choose others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import Pool
from tests.parallel.against_one import LENGTH, SEED, SPECIALS, asked, batch_of, compare, trained
from xscale.mesh.axes import Degrees
from xscale.mesh.environment import RankInfo
from xscale.mesh.mesh import Mesh
from xscale.nn.ffn.moe.router.router import ROUTERS
from xscale.nn.ffn.moe.router.select import LinearScore
from xscale.nn.forward import Choices
from xscale.nn.tokens import Stats, Tokens
from xscale.objective.objective import OBJECTIVES
from xscale.parallel.plan import ParallelPlan
from xscale.settings.settings import build_on_meta

BY_NUMBER = ("hash", "random", "round_robin")
SCORED = [name for name in ROUTERS.names() if name not in (*BY_NUMBER, "noisy_topk")]
"""Routers that choose by scores, of which rounding could change the order; the planted noise is less than `noisy_topk`
draws."""
MOE: dict[str, Any] = {
    "kind": "moe",
    "experts": 4,
    "expert": {"kind": "dense", "hidden": 16},
    "allow_noncausal_routing": True,
}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": {"recompute": {"every": 1}},
    "selective": {"recompute": {"every": 1, "granularity": "selective"}},
}


def decoder(residual: str = "pre", depth: int = 2, **ffn: Any) -> dict[str, Any]:
    block = {
        "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2},
        "ffn": {**MOE, **ffn},
        "residual": residual,
        "dropout": 0.1,
    }
    return {"kind": "decoder", "width": 32, "stack": {"depth": depth, "block": block}}


def flipping(scores: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Scores that are equal up to a rounding error, which in backward has the opposite sign: a recomputation that chose
    by them would choose the experts, or the tokens, that its forward chose last."""

    def logits(self: LinearScore, x: Tensor, tokens: Tokens) -> Tensor:
        learned = scores(self, x, tokens)
        sign = 1 if torch._C._current_graph_task_id() == -1 else -1
        token, expert = (torch.arange(1.0, size + 1, dtype=learned.dtype) for size in learned.shape)
        return learned - learned.detach() + sign * 1e-13 * token[:, None] * expert

    return logits


def gradients(model: dict[str, Any], parallel: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and statistics of a forward and a backward in training."""
    settings = asked(model, parallel)
    mesh = Mesh(RankInfo(0, 1), Degrees(), torch.device("cpu"))
    plan = ParallelPlan(settings.parallel, settings.precision, LENGTH)
    network = plan.apply(build_on_meta(settings, 67), mesh, SEED)
    network.train()
    objective = OBJECTIVES.build(settings.objective, SPECIALS, LENGTH, SEED)
    stats = Stats()
    objective.loss(network, batch_of(objective, 2, 0, 0, stats, True)).backward()
    learnt = {name: one.grad for name, one in network.named_parameters() if one.grad is not None}
    assert any("experts" in name for name in learnt)
    return learnt, stats.means()


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two gradients, over the largest number."""
    assert one.keys() == other.keys()
    return max(
        (value - other[name]).abs().max().item() / max(value.abs().max().item(), 1e-5) for name, value in one.items()
    )


@pytest.mark.parametrize("granularity", RECOMPUTED)
@pytest.mark.parametrize("kind", SCORED)
def test_choices_that_would_flip_are_repeated(kind: str, granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearScore, "logits", flipping(LinearScore.logits))
    model = decoder(router={"kind": kind})
    (kept, statistics), (recomputed, after) = gradients(model, {}), gradients(model, RECOMPUTED[granularity])
    assert apart(kept, recomputed) < 1e-9
    assert statistics.keys() == after.keys()
    for name, value in statistics.items():
        torch.testing.assert_close(after[name], value, msg=name)


@pytest.mark.parametrize("drop_policy", ["probability", "priority"])
def test_dropped_tokens_that_would_flip_are_dropped_again(drop_policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearScore, "logits", flipping(LinearScore.logits))
    model = decoder(router={"kind": "topk"}, drop_policy=drop_policy, capacity_factor=0.5)
    kept, recomputed = (gradients(model, parallel)[0] for parallel in ({}, RECOMPUTED["full"]))
    assert apart(kept, recomputed) < 1e-9


def test_reversible_blocks_repeat_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearScore, "logits", flipping(LinearScore.logits))
    model = decoder("reversible", router={"kind": "topk"})
    kept = gradients(model, {"recompute": {"reversible": False}})[0]
    assert apart(kept, gradients(model, {})[0]) < 1e-9


def test_a_recomputation_that_chooses_anew_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(LinearScore, "logits", flipping(LinearScore.logits))
    monkeypatch.setattr(Choices, "make_or_repeat", lambda self, choice: choice)
    model = decoder(router={"kind": "topk"})
    kept, recomputed = (gradients(model, parallel)[0] for parallel in ({}, RECOMPUTED["full"]))
    assert apart(kept, recomputed) > 1e-3


@pytest.mark.long
def test_a_compiled_block_repeats_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated: list[int] = []
    make_or_repeat = Choices.make_or_repeat

    def counted(self: Choices, choice: Tensor) -> Tensor:
        repeated.append(len(choice))
        return make_or_repeat(self, choice)

    monkeypatch.setattr(Choices, "make_or_repeat", counted)
    model = decoder(router={"kind": "topk"})
    kept = gradients(model, {})[0]
    compiled = gradients(model, {"compile": True, **RECOMPUTED["full"]})[0]
    assert apart(kept, compiled) < 1e-9
    assert len(repeated) == 4, "two blocks, each in its forward and in its recomputation"


LAYOUTS: dict[str, dict[str, Any]] = {
    "pp_1f1b": {"mesh": {"pp": 2}},
    "pp_gpipe": {"mesh": {"pp": 2}, "pipeline": {"schedule": "gpipe"}},
    "pp_interleaved": {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}},
    "tp_sp": {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
    "cp": {"mesh": {"cp": 2}},
    "ep": {"mesh": {"dp_shard": 2, "ep": 2}},
}


def trained_with_flips(*arguments: Any, **sections: Any) -> Any:
    """`trained` on this rank, with scores whose order flips in backward."""
    scores = LinearScore.logits
    LinearScore.logits = flipping(scores)  # type: ignore[method-assign]
    try:
        return trained(*arguments, **sections)
    finally:
        LinearScore.logits = scores  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "cp" else [pytest.mark.long]) for name in LAYOUTS]
)
def test_every_layout_and_schedule_repeats_choices(layout: str, pool: Pool) -> None:
    model = decoder(depth=4, router={"kind": "topk", "aux_loss_weight": 0.1}, capacity_factor=1.0)
    alone = pool.run(trained_with_flips, 1, model, {}, steps=1)[0]
    parallel = {**LAYOUTS[layout], **RECOMPUTED["full"]}
    compare(alone, pool.run(trained_with_flips, 2, model, parallel, steps=1))

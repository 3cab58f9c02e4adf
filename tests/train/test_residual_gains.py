"""Gains of Admin's residual connections: the pass over the first batch, by the equation, on layouts and on resuming."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import Pool
from tests.parallel.against_one import (
    SEED,
    SPECIALS,
    VOCABULARY,
    alone,
    asked,
    batch_of,
    built,
    same,
    sequence_sharding,
)
from tests.parallel.test_tensor import refused
from tests.train.tiny import recipe
from xscale.core.errors import ConfigError
from xscale.objective.objective import OBJECTIVES
from xscale.settings.settings import build_on_meta
from xscale.step.batches import shard_over_cp
from xscale.train.residual_gains import gained_sublayers, profile, set_gains
from xscale.train.run import train

BLOCK = {
    "mixer": {"kind": "attention", "heads": 4},
    "ffn": {"kind": "dense", "hidden": 24},
    "sublayers": [{"part": "mixer"}, {"part": "ffn", "factor": 0.5}],
    "residual": "admin",
    "dropout": 0.1,
}
MODEL: dict[str, Any] = {
    "kind": "decoder", "width": 32, "position": "learned", "init_std": 0.3, "stack": {"depth": 2, "block": BLOCK},
}  # fmt: skip
LAYOUTS: list[dict[str, Any]] = [
    {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}},
    {"mesh": {"cp": 2}},
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
]


def gains_of(model: dict[str, Any], parallel: dict[str, Any]) -> tuple[dict[str, float], list[Tensor]]:
    """The gains on this layout, and this rank's parameters that were set to them."""
    settings, mesh, network, _ = built(model, parallel)
    objective: Any = OBJECTIVES.build(settings.objective, SPECIALS, settings.data.sequence_length, SEED)
    spread, micro = sequence_sharding(settings, mesh), settings.train.micro_batch_size
    batches = [
        shard_over_cp(batch_of(objective, micro, 0, number, None, True, noisy=False), spread)
        for number in range(mesh.data_rank, settings.train.batch_size // micro, mesh.degrees.dp)
    ]
    stacks = gained_sublayers(build_on_meta(settings, VOCABULARY))
    gains = profile(network, objective, batches, stacks, mesh.device)
    set_gains(network, gains)
    set_to = [parameter for name, parameter in network.named_parameters() if "omega" in name]
    return gains, [getattr(parameter, "_local_tensor", parameter).detach().clone() for parameter in set_to]


def literal() -> list[float]:
    """omega_i^2 = 1 + sum_{j < i} Var[f_j(x_{j-1})], with the blocks written out."""
    settings, _, parts, _ = built(MODEL, {})
    network: Any = parts
    objective: Any = OBJECTIVES.build(settings.objective, SPECIALS, settings.data.sequence_length, SEED)
    micro = settings.train.micro_batch_size
    outputs: list[list[Tensor]] = [[] for _ in range(4)]
    for number in range(settings.train.batch_size // micro):
        tokens = batch_of(objective, micro, 0, number, None, True, noisy=False).tokens
        x = network.embed(tokens)
        for layer, block in enumerate(network.stack.blocks.values()):
            for place, (sublayer, factor) in enumerate(((block.mixer, 1.0), (block.ffn, 0.5))):
                f = factor * sublayer.part(x, tokens)
                outputs[2 * layer + place].append(f.detach())
                x = sublayer.norm(x + f)
    variances = [torch.cat(output).var(correction=0).item() for output in outputs]
    return [(1 + sum(variances[:place])) ** 0.5 for place in range(4)]


def test_the_gains_are_the_papers(pool: Pool) -> None:
    (gains, parameters), wanted = gains_of(MODEL, {}), literal()
    assert list(gains) == [f"stack.blocks.{layer}.{name}" for layer in (0, 1) for name in ("mixer", "ffn")]
    assert wanted[0] == 1
    assert wanted[1] > 1.05, "the sublayers must count beside their input"
    torch.testing.assert_close(torch.tensor(list(gains.values())), torch.tensor(wanted))
    for gain, parameter in zip(gains.values(), parameters, strict=True):
        assert torch.equal(parameter, torch.full((32,), gain, dtype=torch.float64))
    for layout in LAYOUTS:
        for other, local in pool.run(gains_of, 2, MODEL, layout):
            assert other.keys() == gains.keys(), layout
            for path, gain in gains.items():
                assert abs(other[path] - gain) < 1e-12, (layout, path)
            known = torch.tensor(list(other.values()), dtype=torch.float64)
            assert all(torch.isin(parameter, known).all() for parameter in local)


@pytest.mark.long
def test_a_layout_has_the_numbers_of_one_process(pool: Pool) -> None:
    expected = alone(pool, MODEL)
    for layout in LAYOUTS:
        same(pool, expected, 2, MODEL, layout)


def run_of(folder: Path, **sections: Any) -> Any:
    model = {**MODEL, "stack": {"depth": 1, "block": BLOCK}}
    return recipe(folder, model=model, **sections)


def losses(folder: Path) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


@pytest.mark.long
def test_the_pass_runs_before_the_first_step_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "initialised 2 residual gains by the first batch: 1.000 to "
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(run_of(whole)) == 0
    assert said in capsys.readouterr().out
    train(run_of(parts, train={"stop_after": 3}))
    assert said in capsys.readouterr().out
    assert train(run_of(parts)) == 0
    assert said not in capsys.readouterr().out, "a resumed run has the gains of its checkpoint"
    assert losses(parts) == losses(whole)


def test_what_cannot_be_is_refused_with_what_would_work() -> None:
    stack: dict[str, Any] = {"depth": 2, "block": BLOCK}
    (problem,) = refused({**MODEL, "stack": {**stack, "share": "all"}}, 1)
    assert "residual 'admin' gives each sublayer the gain of its depth" in problem
    assert "Take none, or model.stack.block.residual=post." in problem
    parallel = {name: value for name, value in BLOCK.items() if name != "sublayers"} | {"residual": "parallel"}
    with pytest.raises(ConfigError, match=r"residual\.placement: must be 'pre', .* got 'admin'"):
        refused({**MODEL, "stack": {**stack, "block": {**parallel, "placement": "admin"}}}, 1)
    deepspeed = {"mesh": {"dp_shard": 2}, "zero": {"stage": 1, "engine": "deepspeed"}}
    (unable,) = [problem for problem in asked(MODEL, deepspeed).check(2) if "admin" in problem.what]
    assert "residual 'admin' sets gains by a pass before the first step" in str(unable)
    assert "Take torch, or model.stack.block.residual=post." in str(unable)

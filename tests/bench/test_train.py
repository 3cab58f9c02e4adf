"""The training benchmark: sides that alternate, ratios over pairs, and a dense twin of equal active FLOPs."""

import gzip
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tiny import MIXTURE, recipe
from xscale.bench.harness.timing import Sample, Timings
from xscale.bench.llama import PlainLlama, TransformersLlama, llama_sizes
from xscale.bench.train import bench_train, measure_side, speed_ratio, time_steps
from xscale.bench.train_sides import TrainingSide, dense_twin, training_sides
from xscale.core.errors import ConfigError
from xscale.data.corpus.prepare import prepare
from xscale.measure.flops import size
from xscale.nn.materialize import materialize
from xscale.nn.tokens import Tokens
from xscale.settings.settings import build_on_meta


def side(name: str, step: Callable[[int], dict[str, float]] = lambda number: {}) -> TrainingSide:
    return TrainingSide(name, step, tokens=100, flops=1.0)


def test_ratios_are_of_steps_of_one_round() -> None:
    seconds = {"a": [1.0, 2.0, 10.0], "b": [2.0, 4.0, 20.0]}
    timings = Timings({name: [Sample(each, result={}) for each in values] for name, values in seconds.items()})
    assert speed_ratio(timings, side("a"), side("b")) == 2.0
    row = replace(side("a"), peak=0.25, flops_6n=2.0).row(timings)
    assert (row["mfu"], row["mfu_6n"]) == (2.0, 4.0)
    assert side("a").row(timings)["mfu"] is None


def test_sides_alternate() -> None:
    order: list[str] = []

    def step(name: str, number: int) -> dict[str, float]:
        order.append(f"{name}{number}")
        return {}

    timings = time_steps([side(name, partial(step, name)) for name in "ab"], 2)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [len(timings.samples[name]) for name in "ab"] == [2, 2]


def test_a_mistake_that_no_side_survives_is_the_users(tmp_path: Path) -> None:
    settings = recipe(tmp_path, data={"source": {"kind": "text", "paths": [str(tmp_path / "none")]}})
    with pytest.raises(ConfigError, match="none"):
        bench_train(settings, 1)


def test_the_dense_twin_has_the_active_flops(tmp_path: Path) -> None:
    settings = recipe(tmp_path)
    twin = build_on_meta(dense_twin(settings), 300)
    mixture = build_on_meta(settings, 300)
    # The twin lacks only the router.
    assert 0 < size(mixture).multiplied - size(twin).multiplied == 4 * MIXTURE["width"]  # type: ignore[operator]
    assert size(twin).parameters == size(twin).active


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    settings = recipe(tmp_path)
    prepare(settings.data)
    found = bench_train(settings, 2)
    measured = ["xscale", "xscale, balanced", "xscale, dense", "same modules"]
    assert [row["name"] for row in found["rows"] if "reason" not in row] == measured
    reasons = {row["name"]: row["reason"] for row in found["rows"] if "reason" in row}
    assert reasons.keys() == {"plain PyTorch", "transformers"}
    assert "no Llama and no Mixtral: its layers differ" in reasons["plain PyTorch"]
    assert set(found["tokens_per_second_ratios"]) == {f"xscale / {name}" for name in measured[1:]}
    rows = {row["name"]: row for row in found["rows"]}
    assert all(rows[name]["tokens_per_second"] > 0 for name in measured)
    assert set(rows["xscale"]["split"]) >= {"forward", "backward", "optimizer"}
    # The Switch router without training sends far more than the mean to one of its four experts.
    assert rows["xscale, balanced"]["overload"] == pytest.approx(1.0, abs=0.02)
    assert rows["xscale"]["overload"] > 1.1
    assert rows["xscale, dense"]["overload"] is None
    with pytest.raises(ConfigError, match="there is no side 'pytorch'"):
        bench_train(settings, 1, ["pytorch"])


LLAMA: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "tied": True,
    "position": "rope",
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2},
            "ffn": {"kind": "gated", "hidden": 48},
            "norm": "rms",
        },
    },
}
EXPERTS = {
    "kind": "moe",
    "experts": 4,
    "router": {"kind": "topk", "top_k": 2},
    "expert": {"kind": "gated", "hidden": 48},
}


def mixtral() -> dict[str, Any]:
    stack = LLAMA["stack"]
    return {**LLAMA, "stack": {**stack, "block": {**stack["block"], "ffn": EXPERTS}}}


@pytest.mark.parametrize("model", [LLAMA, mixtral()], ids=["llama", "mixtral"])
def test_the_baselines_are_the_same_model(tmp_path: Path, model: dict[str, Any]) -> None:
    """Plain PyTorch and transformers have xscale's parameters and loss, with the weights of the plain model."""
    settings = recipe(tmp_path, model=model)
    sizes = llama_sizes(settings, 300)
    torch.manual_seed(0)
    plain = PlainLlama(sizes).double()
    ids, targets = torch.randint(0, 300, (2, 2, 16)).unbind()
    wanted = plain(ids, targets)
    xscale_model = build_on_meta(settings, 300)
    materialize(xscale_model, 0, "cpu", torch.float64)
    counts = [sum(value.numel() for value in each.parameters()) for each in (plain, xscale_model)]
    assert counts[0] == counts[1]
    with torch.no_grad():
        for name, value in xscale_model.named_parameters():
            value.copy_(plain_weight(plain, name))
    loss = xscale_model.eval()(Tokens.from_ids(ids), targets)
    # The baselines rotate, and take the loss, in float32.
    torch.testing.assert_close(loss.sum(), wanted.double(), rtol=1e-5, atol=1e-5)
    hf = TransformersLlama(sizes)
    assert sum(value.numel() for value in hf.parameters()) == counts[0]
    assert hf(ids, targets).isfinite()


def plain_weight(plain: PlainLlama, name: str) -> torch.Tensor:
    """The plain model's parameter of xscale's name."""
    parameters = dict(plain.named_parameters())
    for ours, theirs in (
        ("embed.table.weight", "table.weight"),
        ("stack.norm", "norm"),
        ("stack.blocks", "blocks"),
        ("mixer.norm", "attention_norm"),
        ("ffn.norm", "mlp_norm"),
        ("mixer.part", "attention"),
        ("ffn.part", "mlp"),
        ("mlp.experts", "mlp"),
        ("router.weight", "router.weight"),
    ):
        name = name.replace(ours, theirs)
    return parameters[name]


@pytest.mark.slow
@pytest.mark.long
def test_one_side_after_another_and_a_profile(tmp_path: Path) -> None:
    """A GPU measures so; each side's process group and model are gone before the next."""
    settings = recipe(tmp_path, model=LLAMA)
    prepare(settings.data)
    sides = training_sides(settings)
    assert set(sides) == {"xscale", "same modules", "plain PyTorch", "transformers"}
    file = tmp_path / "profile.json.gz"
    rows = {name: measure_side(build, 1, file if name == "xscale" else None) for name, build in sides.items()}
    assert all(row["tokens_per_second"] > 0 and math.isfinite(row["loss"]) for row in rows.values())
    trace = gzip.decompress(file.read_bytes()).decode()
    assert '"forward"' in trace

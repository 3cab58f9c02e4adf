"""8-bit AdamW: block-wise codes by a literal reference, torchao's optimizer, every layout, and what is refused."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import drawn
from tests.distributed import Pool
from tests.train.test_resume import equal
from tests.train.tiny import losses, recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.optim.optimizer.adamw_8bit import AdamW8bit
from xscale.optim.optimizer.optimizer import LocalParameter
from xscale.planning.memory import states_per_element
from xscale.settings.settings import build_on_meta

BETA1, BETA2, EPS, DECAY, LR, BLOCK, STEPS = 0.9, 0.95, 1e-8, 0.1, 1e-2, 16, 6
NEEDS = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


def gradient(step: int, shape: tuple[int, ...]) -> Tensor:
    return drawn(*shape, seed=step).float()


def codes(signed: bool) -> list[float]:
    """Dettmers et al. 2022, section 1.3: a sign if any, zeros for the exponent, an indicator, a linear fraction.

    With e zeros the fraction has the bits that are left; its values are the middles of equal parts of [0.1, 1], times
    10^-e. 0 and 1 are codes of their own.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        parts = 2 ** (6 - exponent) if signed else 2 ** (7 - exponent)
        for part in range(parts):
            middle = 0.1 + 0.9 * (part + 0.5) / parts
            values += [sign * middle * 10.0**-exponent for sign in ((1, -1) if signed else (1,))]
    assert len(values) == 256
    return sorted(values)


def quantized(values: list[float], signed: bool) -> list[float]:
    """A block's values after a round trip: each becomes the nearest code times the block's greatest magnitude."""
    table, scale = codes(signed), max(max(abs(value) for value in values), 1e-12)
    return [scale * min(table, key=lambda code: abs(value / scale - code)) for value in values]


def by_elements(start: Tensor) -> Tensor:
    """AdamW whose moments are quantised after each step by blocks; the update takes them before."""
    rows, columns = start.shape
    weight = start.double().tolist()
    m, v = ([[0.0] * columns for _ in range(rows)] for _ in range(2))
    for t in range(1, STEPS + 1):
        g = gradient(t, tuple(start.shape)).double().tolist()
        for i in range(rows):
            for j in range(columns):
                m[i][j] = BETA1 * m[i][j] + (1 - BETA1) * g[i][j]
                v[i][j] = BETA2 * v[i][j] + (1 - BETA2) * g[i][j] ** 2
                update = m[i][j] / (1 - BETA1**t) / ((v[i][j] / (1 - BETA2**t)) ** 0.5 + EPS)
                weight[i][j] -= LR * (update + DECAY * weight[i][j])
            for first in range(0, columns, BLOCK):
                block = slice(first, first + BLOCK)
                m[i][block], v[i][block] = quantized(m[i][block], True), quantized(v[i][block], False)
    return torch.tensor(weight)


def stepped(start: Tensor, block: int = BLOCK) -> tuple[Tensor, AdamW8bit]:
    weight = LocalParameter("w", start.clone(), decays=True, linear_map=True)
    config = AdamW8bit.Config(weight_decay=DECAY, beta1=BETA1, beta2=BETA2, eps=EPS, block_size=block)
    optimizer = AdamW8bit(config, [weight])
    for t in range(1, STEPS + 1):
        optimizer.step([gradient(t, tuple(start.shape))], LR)
    return weight.value, optimizer


@NEEDS
def test_the_update_is_that_of_the_paper() -> None:
    start = drawn(3, 2 * BLOCK).float()
    value, optimizer = stepped(start)
    assert optimizer.quantized == [0]
    expected = by_elements(start)
    # A rounding to the nearest code may go either way in single precision.
    close = torch.isclose(value, expected, rtol=1e-5, atol=1e-6)
    assert close.double().mean() > 0.97
    assert torch.allclose(value, expected, atol=LR / 10)
    full = torch.optim.AdamW([plain := torch.nn.Parameter(start.clone())], LR, (BETA1, BETA2), EPS, DECAY)
    for t in range(1, STEPS + 1):
        plain.grad = gradient(t, tuple(start.shape))
        full.step()
    assert not torch.isclose(value, plain.detach(), rtol=1e-5, atol=1e-6).double().mean() > 0.5


@NEEDS
@pytest.mark.long
def test_torchaos_optimizer_does_the_same() -> None:
    """Its blocks are those of rows too, where a row is whole blocks. It compiles its step."""
    from torchao.optim import AdamW8bit as Reference

    start = drawn(32, 256).float()
    parameter = torch.nn.Parameter(start.clone())
    reference = Reference([parameter], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, block_size=128)
    for t in range(1, STEPS + 1):
        parameter.grad = gradient(t, tuple(start.shape))
        reference.step()
    value, _ = stepped(start, 128)
    assert torch.isclose(parameter.detach(), value, rtol=1e-5, atol=1e-6).double().mean() > 0.999


MODEL = {
    "kind": "decoder",
    "width": 64,
    "stack": {
        "depth": 2,
        "block": {"mixer": {"kind": "attention", "heads": 4, "kv_heads": 2}, "ffn": {"kind": "gated", "hidden": 96}},
    },
}
TRAIN: dict[str, Any] = {"steps": 4, "batch_size": 8, "micro_batch_size": 2, "eval_every": 0, "baseline": False}


def trained(folder: Path, name: str, train: dict[str, Any] | None = None, **sections: Any) -> int:
    defaults = {
        "model": MODEL,
        "precision": {"compute": "float64", "master": "float64"},
        "optimizer": {"kind": "adamw_8bit", "block_size": 16},
        "data": {"validation": 0.0},
    }
    return run(recipe(folder, name, **{**defaults, "train": {**TRAIN, **(train or {})}, **sections}))


def saved(folder: Path, name: str) -> dict[str, Tensor]:
    return load_tensors(folder / name / "checkpoints" / "step-00000004")


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, {"zero": {"stage": 3}}),
    "zero1": (2, {"zero": {"stage": 1}}),
    "tp2": (2, {"mesh": {"tp": 2}}),
    "tp2 x dp2": (4, {"mesh": {"tp": 2}, "zero": {"stage": 2}}),
    "pp2": (2, {"mesh": {"pp": 2}}),
}


@NEEDS
@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_train_as_one_process_does(name: str, tmp_path: Path, pool: Pool) -> None:
    """Blocks are the same on all; a code on the edge between two may differ by the rounding of a gradient."""
    ranks, parallel = LAYOUTS[name]
    assert trained(tmp_path, "single") == EXIT_DONE
    assert pool.run(trained, ranks, tmp_path, name, parallel=parallel) == [EXIT_DONE] * ranks
    alone, sharded = saved(tmp_path, "single"), saved(tmp_path, name)
    assert alone.keys() == sharded.keys()
    scales = [key for key in alone if key.startswith("optimizer.mean_scales.")]
    assert len(scales) == 2 * 7
    assert alone["optimizer.mean_codes.stack.blocks.0.ffn.part.down.weight"].dtype == torch.uint8
    for key, value in alone.items():
        assert value.shape == sharded[key].shape
        if key.startswith("model."):
            assert torch.allclose(value, sharded[key], rtol=1e-6, atol=1e-7), key
        if "_codes." in key:
            assert (value == sharded[key]).double().mean() > 0.999, key
    assert losses(tmp_path, name) == pytest.approx(losses(tmp_path, "single"), rel=1e-6)


@NEEDS
@pytest.mark.parametrize(
    ("ranks", "parallel"), [(1, {}), pytest.param(2, {"zero": {"stage": 3}}, marks=pytest.mark.long)]
)
def test_a_resumed_run_is_bitwise_the_same(ranks: int, parallel: dict[str, Any], tmp_path: Path, pool: Pool) -> None:
    layout = {"parallel": parallel, "precision": {}}
    assert pool.run(trained, ranks, tmp_path, "whole", **layout) == [EXIT_DONE] * ranks
    assert pool.run(trained, ranks, tmp_path, "stopped", {"stop_after": 2}, **layout) == [EXIT_REQUEUE] * ranks
    assert pool.run(trained, ranks, tmp_path, "stopped", **layout) == [EXIT_DONE] * ranks
    equal(tmp_path, "stopped", "whole", last=4)


def test_a_shard_that_cuts_a_block_is_refused() -> None:
    weight = LocalParameter("up", torch.zeros(8, 24), True, True, full_shape=(8, 48))
    with pytest.raises(
        ConfigError, match=r"optimizer\.block_size: the rows of up have 24 elements on a rank, which 16"
    ):
        AdamW8bit(AdamW8bit.Config(block_size=16), [weight])


def test_it_is_refused_without_torchao_and_with_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zero = {"zero": {"engine": "deepspeed", "stage": 2}}
    settings = recipe(tmp_path, model=MODEL, optimizer={"kind": "adamw_8bit"}, parallel=zero)
    monkeypatch.setattr("xscale.requirements.optimizer.find_spec", lambda name: None)
    missing, flat = [problem for problem in settings.check() if problem.path == "optimizer.kind"]
    assert str(missing) == (
        "optimizer.kind: 'adamw_8bit' needs torchao, which is not installed. "
        "Take adamw. Or run: pip install 'torchao>=0.18,<0.19'."
    )
    assert "has blocks of rows, and DeepSpeed flattens" in str(flat)


def test_a_plan_counts_a_byte_for_each_code(tmp_path: Path) -> None:
    """Moments of float32 weights are two codes of a byte, and two scales of four bytes for each block."""
    settings = recipe(tmp_path, model=MODEL, optimizer={"kind": "adamw_8bit", "block_size": 16})
    values = states_per_element(settings, build_on_meta(settings, 260))
    assert values["stack.blocks.0.mixer.part.q.weight"] == pytest.approx(2 / 4 + 2 / 16)
    assert values["embed.table.weight"] == 2
    assert values["stack.norm.weight"] == 2

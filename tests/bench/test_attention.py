"""`xscale bench attention`: exponents of known growth, linear and quadratic cases, and invalid arguments."""

import json
from collections.abc import Callable

import pytest
import torch

from xscale.bench.attention import (
    cases,
    core_run,
    exponent,
    inputs,
    measure_growth,
    multiply_adds,
    savings,
    sdpa_sides,
)
from xscale.bench.harness.machine import BenchDevice
from xscale.bench.positions import RELATIVE_POSITIONS, WINDOW, measure_position_growth, measure_positions
from xscale.cli.main import main
from xscale.core.errors import ConfigError
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.pattern.window import Window
from xscale_kernels.select import UnusableError

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str, status: int = 0) -> str:
        monkeypatch.setattr("sys.argv", ["xscale", "bench", "attention", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert (stopped.value.code or 0) == status
        said = capsys.readouterr()
        return said.err if status else said.out

    return call


def test_the_exponent_of_a_power_is_the_power() -> None:
    assert exponent([10, 20, 80], [3 * 10**1.5, 3 * 20**1.5, 3 * 80**1.5]) == pytest.approx(1.5)


def test_linear_patterns() -> None:
    """The patterns whose FLOPs are linear in the length with default configs."""
    lengths = [4096, 32768]
    linear = {
        name
        for name, config, causal in cases()
        if name.startswith("block_sparse") and flops_exponent(config, causal, lengths) <= 1.1
    }
    assert {name.removeprefix("block_sparse ") for name in linear} == {
        "axial", "band", "bigbird", "block_local", "dilated", "global_blocks", "image_1d", "image_2d", "intersection",
        "local_2d", "longformer", "multi_scale", "random", "star", "union", "variable", "window",
    }  # fmt: skip


def test_linear_mixers() -> None:
    """The mixers without a core whose FLOPs are linear in the length; the others have weights by pairs of positions."""
    mixers = {name.removeprefix("mixer "): (config, causal) for name, config, causal in cases() if name[:6] == "mixer "}
    linear = {
        name
        for name, (config, causal) in mixers.items()
        if exponent([4096, 32768], [multiply_adds(config, length, causal, 8) for length in (4096, 32768)]) <= 1.15
    }
    assert linear == {
        "average_attention", "axial", "evolved_branches", "gated_delta_net", "gated_linear_attention",
        "hard_coded_gaussian", "lightweight_conv", "local_rnn", "mamba2", "mlp_mixer", "rwkv7", "s4", "star",
    }  # fmt: skip
    assert mixers.keys() - linear == {
        "gmlp", "long_short_range", "multi_linear", "prior_only", "reused_attention", "synthesizer",
    }  # fmt: skip


def test_a_linear_mixer_is_timed() -> None:
    known = {name: (config, causal) for name, config, causal in cases()}
    row = measure_growth("lightweight_conv", *known["mixer lightweight_conv"], [64, 128], 1)
    assert row.flops == pytest.approx(1)
    assert row.seconds is not None


def flops_exponent(config: BlockSparse.Config, causal: bool, lengths: list[int]) -> float:
    from xscale.bench.attention import core_of

    return exponent(
        lengths, [core_of(config, length, causal, 1).multiply_adds(length, length, 1, 64) for length in lengths]
    )


def test_a_quadratic_core_is_not_timed() -> None:
    known = {name: (config, causal) for name, config, causal in cases()}
    row = measure_growth("softmax", *known["softmax"], [64, 128], 1)
    assert row.flops == pytest.approx(2)
    assert row.time is None


def test_it_prints_a_line_for_each(run: Run) -> None:
    lines = run("linear", "softmax", "--lengths", "128,256").splitlines()
    assert "FLOPs T^1.00  time T^" in lines[0]
    assert lines[1].split() == ["softmax", "causal", "FLOPs", "T^2.00"]
    found = json.loads(run("block_sparse window", "--lengths=256,512", "--json"))
    assert found["growth"][0]["flops"] < 1.2
    assert found["savings"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["linaer"], "Did you mean 'linear'?"),
        (["linear", "--lengths", "4096"], "two different lengths"),
        (["linear", "--lengths", "4096,many"], "must be sequence lengths separated by commas"),
    ],
)
def test_invalid_arguments(words: list[str], said: str, run: Run) -> None:
    assert said in run(*words, status=2)


@pytest.mark.nightly
def test_block_sparse_stores_no_scores() -> None:
    """At 11 to 12 % density, against dense attention of the same run, fused and with stored scores."""
    by_baseline = {
        (saving.against, saving.causal): saving for saving in savings(Window.Config(window=7), heads=2, repeats=3)
    }
    for causal in (False, True):
        fused, stored = by_baseline["fused", causal], by_baseline["stored scores", causal]
        assert fused.density < 0.125
        assert stored.memory < 0.25
        # Fused attention stores no scores either; both store outputs and gradients.
        assert fused.memory < 2


def test_positions_are_measured_beside_plain_attention() -> None:
    (both, causal) = measure_positions(["relative"], 64, 1, rounds=1)
    assert (both.causal, causal.causal) == (False, True)
    assert both.time > 0
    assert both.memory > 0
    assert "of the memory of plain attention" in str(both)


@pytest.mark.parametrize("kind", RELATIVE_POSITIONS)
def test_positions_are_measured_through_block_sparse_attention(kind: str) -> None:
    (cost, causal) = measure_positions([kind], 64, 1, rounds=1, core=WINDOW)
    assert (cost.core, cost.causal, causal.causal) == ("block_sparse", False, True)
    assert "of the memory of the core without a position" in str(cost)
    rows = list(measure_position_growth([kind], (64, 128), 1))
    assert [(row.position, row.causal) for row in rows] == [(kind, False), (kind, True)]


@pytest.mark.long
@pytest.mark.parametrize("kind", RELATIVE_POSITIONS)
def test_memory_of_a_position_grows_no_faster_than_the_length(kind: str) -> None:
    for row in measure_position_growth([kind], (1024, 4096), 1):
        assert row.memory < 1.05


def test_an_unknown_position_has_the_nearest_one(run: Run) -> None:
    assert "Did you mean 'shaw'?" in run("--positions", "shew", status=2)


def test_the_backend_of_torchs_attention_is_named() -> None:
    """Each side gives the same; a backend that cannot run on a CPU refuses by its name."""
    sides = sdpa_sides()
    assert list(sides) == ["fused", "fused, flash", "fused, cudnn", "fused, efficient"]
    q, k, v = (x.detach() for x in inputs(64, 2))
    assert torch.equal(sides["fused, flash"](q, k, v), sides["fused"](q, k, v))
    with pytest.raises(UnusableError, match="CUDNN_ATTENTION cannot run this call"):
        sides["fused, cudnn"](q, k, v)


def test_a_device_is_refused_with_the_reason() -> None:
    assert BenchDevice.of("cpu", "bfloat16").dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="must be cpu or cuda, got 'tpu'"):
        BenchDevice.of("tpu", "float32")
    with pytest.raises(ConfigError, match="there is no 'int8'"):
        BenchDevice.of("cpu", "int8")


def test_cores_run_in_bfloat16_on_their_device() -> None:
    config = {name: config for name, config, _ in cases()}["linear"]
    run = core_run(config, 64, True, 1, BenchDevice.of("cpu", "bfloat16"))
    gradients = run()
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)  # type: ignore[attr-defined]

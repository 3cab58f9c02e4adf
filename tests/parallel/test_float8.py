"""Float8: its numbers on the CPU, which multiplies what a GPU would, and where it is refused."""

import bisect
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parallel.against_one import built, trained
from tests.parallel.models import DENSE, changed
from tests.train.tiny import recipe
from xscale.core.errors import ConfigError
from xscale.mesh.axes import Degrees
from xscale.mesh.environment import RankInfo
from xscale.parallel.config import Float8Scaling, PrecisionConfig
from xscale.parallel.precision import float8, float8_matmul
from xscale.parallel.precision.float8 import Float8Map
from xscale.planning.simulate_step import simulate_step
from xscale.train.setup import set_up

BLOCK = {"mixer": {"kind": "attention", "heads": 3}, "ffn": {"kind": "dense", "hidden": 24}}
NARROW: dict[str, Any] = {"kind": "decoder", "width": 24, "stack": {"block": BLOCK}}
HALF: dict[str, Any] = {"compute": "bfloat16", "master": "float32"}
NEW = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="torch 2.11 multiplies on a CPU with a scale per tensor alone"
)
WAYS = [
    ("tensor", "torch"),
    pytest.param("row", "torch", marks=NEW),
    ("tensor", "emulated"),
    ("row", "emulated"),
    ("mx", "emulated"),
]
"""Scaling and kernel."""
TENSOR, BY_ROW, MX = (Float8Map(scaling, "emulated") for scaling in ("tensor", "row", "mx"))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def apart(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def magnitudes(exponent_bits: int, mantissa_bits: int, largest: float) -> list[float]:
    """The numbers from 0 to `largest` of a format: an exponent of 0 has no leading one."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for exponent in range(2**exponent_bits):
        for fraction in range(2**mantissa_bits):
            leading, power = (1, exponent - bias) if exponent else (0, 1 - bias)
            values.append((leading + fraction / 2**mantissa_bits) * 2.0**power)
    return [value for value in values if value <= largest]


# e4m3 has no infinity, and its last code is NaN; the last exponent of e5m2 is infinities and NaNs.
E4M3, E5M2 = magnitudes(4, 3, 448.0), magnitudes(5, 2, 57344.0)


def nearest(value: float, numbers: list[float]) -> float:
    """The nearest number; of two that are equally near, the one whose last bit is 0."""
    above = bisect.bisect_left(numbers, abs(value))
    near = range(max(above - 1, 0), min(above + 1, len(numbers)))
    index = min(near, key=lambda code: (abs(abs(value) - numbers[code]), code % 2))
    return numbers[index] if value >= 0 else -numbers[index]


def rounded(x: Tensor, scaling: Float8Scaling, numbers: list[float]) -> Tensor:
    """Numbers that float8 of x [N, K] stands for: each over its group's scale is rounded, and multiplied back."""
    width = {"tensor": x.numel(), "row": x.shape[1], "mx": 32}[scaling]
    values = x.double().flatten().tolist()
    result: list[float] = []
    for at in range(0, len(values), width):
        group = values[at : at + width]
        largest = max(abs(value) for value in group)
        if scaling == "mx":
            exponent = -127
            while largest > numbers[-1] * 2.0**exponent:
                exponent += 1
            scale = 2.0**exponent
        else:
            scale = largest / numbers[-1]
        result += [scale * nearest(value / scale, numbers) for value in group]
    return torch.tensor(result, dtype=torch.float64).view(x.shape)


@pytest.mark.parametrize("scaling", ["tensor", "row", "mx"])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_are_those_of_the_formats(scaling: Float8Scaling, kind: torch.dtype) -> None:
    x = drawn(3, 64) * torch.tensor([1e-4, 1.0, 300.0]).unsqueeze(1)
    x[0, :32] *= 1e-3  # subnormal beside the largest of the row, and not in a block of its own
    x[1, 40] = 448.0 * 2.0**-3  # a block whose largest number is a format's largest times a power of two
    x[1, 41:64] *= 0.01
    found = float8_matmul.dequantize(*float8_matmul.quantize(x, scaling, kind))
    wanted = rounded(x, scaling, E4M3 if kind == torch.float8_e4m3fn else E5M2)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


def test_blocks_of_zeros_and_of_what_is_not_finite() -> None:
    x = torch.zeros(2, 64)
    x[1, 0], x[1, 40] = torch.inf, 1.0
    values, scales = float8_matmul.quantize(x, "mx", torch.float8_e4m3fn)
    numbers = float8_matmul.dequantize(values, scales)
    assert torch.equal(numbers[0], x[0])
    assert numbers[1, :32].isnan().all(), "an infinity is not hidden"
    assert torch.equal(numbers[1, 32:], x[1, 32:])


@pytest.mark.parametrize(("scaling", "kernel"), WAYS)
def test_values_that_float8_has_are_multiplied_to_the_scale_s_rounding(scaling: Float8Scaling, kernel: str) -> None:
    matmul = Float8Map(scaling, kernel)
    x, weight = drawn(24, 32).sign() * 2.0, drawn(64, 32, seed=1).sign() * 0.5
    assert torch.allclose(matmul(x, weight, None), F.linear(x, weight), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("scaling", "kernel"), WAYS)
def test_a_product_and_its_gradients_are_near_the_wide_ones(scaling: Float8Scaling, kernel: str) -> None:
    x, weight, bias = drawn(3, 7, 64), drawn(96, 64, seed=1) * 1e-3, drawn(96, seed=2)
    seed = drawn(3, 7, 96, seed=3) * 1e-4
    results = []
    for multiply in (F.linear, Float8Map(scaling, kernel)):
        leaves = [one.clone().requires_grad_() for one in (x, weight, bias)]
        y = multiply(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, seed)])
    for wanted, found in zip(*results, strict=True):
        assert found.shape == wanted.shape
        # Three bits of mantissa forward; two in gradients with one scale a tensor.
        assert apart(found, wanted) < 0.08
    assert apart(results[1][2], results[0][2]) > 1e-4, "this was float8"


@pytest.mark.parametrize(("scaling", "kernel"), WAYS)
def test_what_float8_stands_for_is_multiplied(scaling: Float8Scaling, kernel: str) -> None:
    """Forward and both gradients from the casts of the literal reference."""
    x, weight, seed = drawn(32, 64), drawn(32, 64, seed=1), drawn(32, 32, seed=2)
    numbers = E5M2 if scaling == "tensor" else E4M3
    y = rounded(x, scaling, E4M3) @ rounded(weight, scaling, E4M3).t()
    to_x = rounded(seed, scaling, numbers) @ rounded(weight.t(), scaling, E4M3).t()
    to_weight = rounded(seed.t(), scaling, numbers) @ rounded(x.t(), scaling, E4M3).t()
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = Float8Map(scaling, kernel)(*leaves, None)
    for one, wanted in zip((found, *torch.autograd.grad(found, leaves, seed)), (y, to_x, to_weight), strict=True):
        assert apart(one, wanted) < 1e-5


def test_a_scale_for_each_row_keeps_small_rows() -> None:
    """Negative control too: with one scale a tensor the rows beside a huge one lose their numbers."""
    x, weight = drawn(16, 32), drawn(16, 32, seed=1)
    x[0] *= 1e7
    wanted = F.linear(x, weight)[1:]
    assert apart(BY_ROW(x, weight, None)[1:], wanted) < 0.08
    assert apart(TENSOR(x, weight, None)[1:], wanted) > 0.5


def test_a_scale_for_each_block_keeps_small_blocks() -> None:
    """Negative control too: with one scale a row the numbers beside a huge one are lost."""
    x, weight = drawn(16, 64), drawn(32, 64, seed=1)
    x[:, 0], weight[:, 0] = 1e7, 0.0
    second_block = F.linear(x[:, 32:], weight[:, 32:])
    assert apart(MX(x, weight, None), second_block) < 0.08
    assert apart(BY_ROW(x, weight, None), second_block) > 0.9


def test_zeros_and_sizes_that_do_not_fit() -> None:
    assert torch.equal(BY_ROW(torch.zeros(4, 32), drawn(16, 32), None), torch.zeros(4, 16))
    x, weight = drawn(4, 20), drawn(6, 20, seed=1)
    assert torch.equal(TENSOR(x, weight, None), F.linear(x, weight))
    x, weight = drawn(4, 48), drawn(16, 48, seed=1)
    assert torch.equal(MX(x, weight, None), F.linear(x, weight)), "32 does not divide 48"


@pytest.mark.parametrize(("scaling", "kernel"), WAYS)
def test_a_model_learns_as_in_bfloat16(scaling: str, kernel: str) -> None:
    model = changed(DENSE, stack__depth=1)
    plain = trained(model, {}, precision=HALF, steps=2)
    calls = 0
    true = float8_matmul.quantize

    def counting(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return true(*given, **named)

    with patch("xscale.parallel.precision.float8_matmul.quantize", counting):
        found = trained(model, {}, precision={**HALF, "float8": scaling, "float8_kernel": kernel}, steps=2)
    assert calls > 0
    assert found.numbers != plain.numbers
    for number, wanted in zip(found.numbers, plain.numbers, strict=True):
        assert number == pytest.approx(wanted, rel=0.05)


def test_routers_experts_and_the_head_stay_as_they_are() -> None:
    moe = {"kind": "moe", "experts": 4}
    network = built(changed(DENSE, stack__depth=1, stack__block__ffn=moe), {}, precision={**HALF, "float8": "row"})[2]
    changed_ones = {one.path.rsplit(".", 1)[-1] for one in float8.float8_linears(network)}
    assert {"q", "k", "v"} <= changed_ones
    assert not {"router", "experts", "head"} & changed_ones


@pytest.mark.parametrize(
    ("precision", "model", "says"),
    [
        ({"float8": "row"}, DENSE, "compute is float32"),
        ({**HALF, "float8": "tensor"}, NARROW, "no linear map"),
        ({**HALF, "float8": "mx"}, DENSE, "float8_kernel=torch has a scale per tensor or per row"),
        ({**HALF, "float8_kernel": "torchao"}, DENSE, "float8 is null"),
    ],
)
def test_what_cannot_be_is_refused(precision: dict[str, Any], model: dict[str, Any], says: str) -> None:
    found = [str(one) for one in recipe(Path("nowhere"), model=model, precision=precision).check(1)]
    assert len(found) == 1, found
    assert says in found[0]
    assert "Take" in found[0] or "take" in found[0]


def test_hardware_without_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a cpu does not support float8 matmuls. Take null, or .*8\.9 or newer"):
        set_up(recipe(tmp_path, precision={**HALF, "float8": "tensor"}), RankInfo())
    device = torch.device("cuda", 0)
    refused = {
        (8, 0): {"tensor", "row", "mx"},
        (8, 9): {"row", "mx"},
        (9, 0): {"mx"},
        (10, 0): set[str](),
    }
    for capability, scalings in refused.items():
        with (
            patch("torch.cuda.get_device_capability", lambda _, capability=capability: capability),
            patch("importlib.util.find_spec", lambda _: object()),
        ):
            for scaling in ("tensor", "row", "mx"):
                config = partial(PrecisionConfig, compute="bfloat16", float8=scaling)
                problem = float8.unsupported_device(config(float8_kernel="torchao"), device)
                assert (problem is not None) == (scaling in scalings), (capability, scaling)
                assert problem is None or not scalings & set(re.findall(r"\w+", problem.advice))
                assert float8.unsupported_device(config(float8_kernel="emulated"), device) is None


def test_an_emulation_runs_on_a_cpu(tmp_path: Path) -> None:
    set_up(recipe(tmp_path, precision={**HALF, "float8": "mx", "float8_kernel": "emulated"}), RankInfo())


@pytest.mark.parametrize(("scaling", "instead"), [("row", "Take torch."), ("mx", "Take emulated.")])
def test_a_missing_torchao_is_named_with_the_command_that_installs_it(scaling: Float8Scaling, instead: str) -> None:
    config = PrecisionConfig(compute="bfloat16", float8=scaling, float8_kernel="torchao")
    with (
        patch("torch.cuda.get_device_capability", lambda _: (10, 0)),
        patch("importlib.util.find_spec", lambda _: None),
    ):
        problem = float8.unsupported_device(config, torch.device("cuda", 0))
    assert problem is not None
    assert "torchao is not installed" in problem.what
    assert "pip install 'torchao>=0.18,<0.19'" in problem.advice
    assert instead in problem.advice


@pytest.mark.parametrize("scaling", ["tensor", "mx"])
def test_a_plan_simulates_torchao_by_torch_s_products(scaling: str, tmp_path: Path) -> None:
    """It needs no torchao, whose kernels take no fake tensors."""
    costs = []
    for name, kernel in ((scaling, "torchao"), ("row" if scaling == "mx" else scaling, "torch")):
        settings = recipe(tmp_path, model=DENSE, precision={**HALF, "float8": name, "float8_kernel": kernel})
        simulated = simulate_step(settings, Degrees(), 0, 1, 260)
        costs.append((simulated.costs, simulated.peak))
    assert costs[0] == costs[1]

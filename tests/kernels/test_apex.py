"""The adapters of apex against a stand-in with apex's functions and signatures, since apex itself is built from source.

The stand-in computes on the CPU what apex documents, so a wrong function, order or unit of arguments shows as a number.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.conformance import fixed
from xscale_kernels import refusals
from xscale_kernels.adamw.hyperparameters import AdamWHyperparameters
from xscale_kernels.adamw.libraries import apex_step_
from xscale_kernels.adamw.op import reference_step_
from xscale_kernels.layernorm.libraries import apex_layernorm
from xscale_kernels.rmsnorm.libraries import apex_rmsnorm
from xscale_kernels.squared_norm.libraries import apex_squared_norm

Lists = list[list[torch.Tensor]]


def multi_tensor_applier(op: Any, overflow: torch.Tensor, lists: Lists, *args: Any) -> Any:
    assert overflow.dtype is torch.int32
    assert len({len(each) for each in lists}) == 1
    return op(2048 * 32, overflow, lists, *args)


def multi_tensor_adam(
    chunk: int, overflow: Any, lists: Lists, lr: float, beta1: float, beta2: float, eps: float, step: int, mode: int,
    bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """mode: 0 adds the decay to the gradient, 1 decouples it."""
    assert mode == 1
    for g, p, m, v in zip(*lists, strict=True):
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        c1, c2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        p.sub_(lr * (m / c1 / ((v / c2).sqrt() + eps) + weight_decay * p))


def multi_tensor_l2norm(chunk: int, overflow: Any, lists: Lists, per_tensor: bool) -> tuple[torch.Tensor, torch.Tensor]:
    each = torch.stack([one.float().norm() for one in lists[0]])
    return each.norm()[None], each if per_tensor else torch.empty(0)


def fused_rms_norm(x: Any, shape: Any, eps: float = 1e-6, memory_efficient: bool = False) -> torch.Tensor:
    return F.rms_norm(x, shape, None, eps)


def fused_rms_norm_affine(x: Any, weight: Any, shape: Any, eps: float = 1e-6) -> torch.Tensor:
    assert weight.dtype == x.dtype
    return F.rms_norm(x, shape, weight, eps)


def mixed_dtype_fused_rms_norm_affine(x: Any, weight: Any, shape: Any, eps: float = 1e-6) -> torch.Tensor:
    return F.rms_norm(x.to(weight.dtype), shape, weight, eps)


def fused_layer_norm(x: Any, shape: Any, eps: float = 1e-6) -> torch.Tensor:
    return F.layer_norm(x, shape, None, None, eps)


def fused_layer_norm_affine(x: Any, weight: Any, bias: Any, shape: Any, eps: float = 1e-6) -> torch.Tensor:
    return F.layer_norm(x, shape, weight, bias, eps)


def mixed_dtype_fused_layer_norm_affine(x: Any, weight: Any, bias: Any, shape: Any, eps: float = 1e-6) -> torch.Tensor:
    return F.layer_norm(x.to(weight.dtype), shape, weight, bias, eps)


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {
        "apex": (),
        "apex.multi_tensor_apply": (multi_tensor_applier,),
        "amp_C": (multi_tensor_adam, multi_tensor_l2norm),
        "apex.normalization": (),
        "apex.normalization.fused_layer_norm": (
            fused_rms_norm, fused_rms_norm_affine, mixed_dtype_fused_rms_norm_affine,
            fused_layer_norm, fused_layer_norm_affine, mixed_dtype_fused_layer_norm_affine,
        ),
        "fused_layer_norm_cuda": (),
    }  # fmt: skip
    for name, there in functions.items():
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name, origin=None)  # type: ignore[assignment]
        module.__path__ = []
        for each in there:
            setattr(module, each.__name__, each)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            above, _, last = name.rpartition(".")
            setattr(sys.modules[above], last, module)
    refusals._without.cache_clear()


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.usefixtures("apex")
def test_adam(scaled: bool) -> None:
    drawn = [[torch.randn(size, dtype=torch.float64) for size in (3, 70, 1)] for _ in range(3)]
    drawn.append([torch.rand(size, dtype=torch.float64) for size in (3, 70, 1)])
    ours, theirs = ([[each.clone() for each in role] for role in drawn] for _ in range(2))
    scale = torch.tensor(0.3, dtype=torch.float64) if scaled else None
    hyper = AdamWHyperparameters(7, 0.01, 0.8, 0.9, 1e-6, 0.1)
    apex_step_(*ours, scale, hyper)
    reference_step_(*theirs, scale, hyper)
    for at in (0, 2, 3):
        torch.testing.assert_close(ours[at], theirs[at])


@pytest.mark.usefixtures("apex")
def test_norm_of_many_tensors() -> None:
    tensors = [torch.randn(5, 3), torch.randn(70)]
    expected = sum(each.double().square().sum() for each in tensors)
    torch.testing.assert_close(apex_squared_norm(tensors), expected, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("apex")
@pytest.mark.parametrize("weight", [None, torch.float32, torch.bfloat16])
def test_norms(weight: torch.dtype | None) -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    w, b = (None if weight is None else torch.randn(8).to(weight) for _ in range(2))
    for ours, exact in (
        (apex_rmsnorm(x, w, 1e-3), F.rms_norm(x.double(), (8,), None if w is None else w.double(), 1e-3)),
        (
            apex_layernorm(x, w, b, 1e-3),
            F.layer_norm(x.double(), (8,), *(None if each is None else each.double() for each in (w, b)), 1e-3),
        ),
    ):
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours.double(), exact, rtol=2e-2, atol=2e-2)


OnGpu: Any = SimpleNamespace(is_cuda=True)


@pytest.mark.usefixtures("apex")
def test_it_is_usable_where_it_can_be_imported() -> None:
    assert refusals.unless_apex("amp_C", OnGpu) is None
    assert refusals.unless_apex("fused_layer_norm_cuda", OnGpu) is None
    assert refusals.unless_apex("another", OnGpu) == (
        "apex is installed without its extension another (build it with its CUDA extensions)"
    )
    assert refusals.unless_apex("amp_C", torch.zeros(1)) == "the tensors are on cpu, apex needs a GPU"


def test_it_says_why_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals._without.cache_clear()
    monkeypatch.setattr(refusals.importlib.util, "find_spec", lambda name: None)
    assert refusals.unless_apex("amp_C", OnGpu) == "apex is not installed (build it from source, see docker/)"
    refusals._without.cache_clear()


def test_the_stand_in_is_not_used_without_being_asked_for() -> None:
    example = fixed("rmsnorm")
    with pytest.raises(ValueError, match="apex needs a GPU"):
        example.run(*example.tensors, implementation="apex")

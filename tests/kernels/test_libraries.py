"""Adapters of QuACK and flash-linear-attention against stand-ins with the functions and checks of their sources.

The stand-ins compute on the CPU what the libraries document, so a wrong function, layout or unit shows as a number.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from xscale_kernels import refusals, triton_runtime
from xscale_kernels.cross_entropy import LossTerms
from xscale_kernels.cross_entropy import op as cross_entropy
from xscale_kernels.layernorm import op as layernorm
from xscale_kernels.linear_attention import chunked
from xscale_kernels.linear_attention import op as linear_attention
from xscale_kernels.linear_cross_entropy import op as linear_cross_entropy
from xscale_kernels.rmsnorm import op as rmsnorm


def quack_rmsnorm(
    x: torch.Tensor, weight: Any = None, bias: Any = None, residual: Any = None, out_dtype: Any = None,
    residual_dtype: Any = None, eps: float = 1e-6, prenorm: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert x.is_contiguous()

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return dy.view(-1, dy.shape[-1]).view(dy.shape)

    return Rows.apply(F.rms_norm(x, x.shape[-1:], weight, eps))  # type: ignore[no-untyped-call, no-any-return]


def cross_entropy_fwd(
    x: torch.Tensor, target: torch.Tensor, target_logit: Any = None, weight: Any = None, ignore_index: int = -100,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    assert target_logit is None
    assert weight is None
    loss = F.cross_entropy(x.float(), target, ignore_index=ignore_index, reduction="none")
    return (loss, x.float().logsumexp(1)) if return_lse else loss


def cross_entropy_bwd(
    x: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, lse: torch.Tensor, weight: Any = None,
    ignore_index: int = -100, inplace_backward: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert dloss.dtype == lse.dtype == torch.float32
    assert x.dim() == 2
    assert target.dim() == dloss.dim() == lse.dim() == 1
    gradient = (x.float() - lse[:, None]).exp() - F.one_hot(target.clamp(min=0), x.shape[1])
    return (gradient * torch.where(target == ignore_index, 0.0, dloss)[:, None]).to(x.dtype)


def chunk_simple_gla(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: Any = None, g_gamma: Any = None, scale: Any = None,
    initial_state: Any = None, output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    (B, T, H, K), M = q.shape, v.shape[3]
    assert k.shape == q.shape
    assert v.shape[:3] == q.shape[:3]
    assert g is None or g.shape == (B, T, H)
    assert initial_state is None or initial_state.shape == (B, H, K, M)
    assert output_final_state
    state = torch.zeros(B, H, K, M) if initial_state is None else initial_state
    outputs = []
    for t in range(T):
        if g is not None:
            state = state * g[:, t, :, None, None].exp()
        state = state + k[:, t, :, :, None].float() * v[:, t, :, None, :].float()
        outputs.append((q[:, t, :, None].float() @ state)[:, :, 0] * (K**-0.5 if scale is None else scale))
    return torch.stack(outputs, 1).to(q.dtype), state


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("quack", "quack.rmsnorm", "quack.cross_entropy", "fla", "fla.ops", "fla.ops.simple_gla"):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    sys.modules["quack.rmsnorm"].rmsnorm = quack_rmsnorm  # type: ignore[attr-defined]
    sys.modules["quack.cross_entropy"].cross_entropy_fwd = cross_entropy_fwd  # type: ignore[attr-defined]
    sys.modules["quack.cross_entropy"].cross_entropy_bwd = cross_entropy_bwd  # type: ignore[attr-defined]
    sys.modules["fla.ops.simple_gla"].chunk_simple_gla = chunk_simple_gla  # type: ignore[attr-defined]


@pytest.mark.parametrize("weighted", [False, True])
def test_quacks_rmsnorm(weighted: bool) -> None:
    from xscale_kernels.rmsnorm.libraries import quack_rmsnorm as ours

    x, weight = torch.randn(2, 5, 12, requires_grad=True), torch.randn(12, requires_grad=True)
    inputs = (x, weight) if weighted else (x,)
    results = [run(x, weight if weighted else None, 1e-5) for run in (ours, rmsnorm.reference_rmsnorm)]
    torch.testing.assert_close(*results)
    # A gradient that is not contiguous, as of a transposed use.
    dy = torch.randn(12, 5, 2).transpose(0, 2)
    for got, wanted in zip(*(torch.autograd.grad(result, inputs, dy) for result in results), strict=True):
        torch.testing.assert_close(got, wanted)


def test_quacks_cross_entropy() -> None:
    from xscale_kernels.cross_entropy.libraries import quack_backward, quack_forward

    logits, targets, terms = torch.randn(7, 19), torch.randint(0, 19, (7,)), LossTerms(ignore_index=-1)
    targets[2] = -1
    loss, lse = quack_forward(logits, targets, terms)
    exact = logits.clone().requires_grad_()
    theirs = cross_entropy.reference_cross_entropy(exact, targets, terms)
    torch.testing.assert_close(loss, theirs)
    seed = torch.randn(7)
    (wanted,) = torch.autograd.grad(theirs, exact, seed)
    torch.testing.assert_close(quack_backward(logits, targets, lse, seed, terms), wanted)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_flas_scan(reverse: bool, gated: bool) -> None:
    from xscale_kernels.linear_attention.libraries import fla_scan

    B, H, T, K, M = 2, 3, 21, 5, 4
    q, k, v = (torch.randn(B, H, T, width) for width in (K, K, M))
    gates, state = -torch.rand(B, H, T) if gated else None, torch.randn(B, H, K, M) if gated else None
    ours = fla_scan(q, k, v, gates, None, state, reverse, 16)
    theirs = chunked.scan(q, k, v, gates, None, state, reverse, 16)
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted)
        assert got.is_contiguous()


def test_what_they_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 1, 9, 64))
    gpu.numel = lambda: 9
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(refusals, "_absent", lambda package: None)
    assert rmsnorm.IMPLEMENTATIONS[1].refusal(False, gpu) is None
    assert cross_entropy.IMPLEMENTATIONS[0].refusal(False, gpu, LossTerms()) is None
    assert linear_attention.IMPLEMENTATIONS[0].refusal(False, gpu, gpu, None, None, 64) is None
    assert "soft cap" in str(cross_entropy.IMPLEMENTATIONS[0].refusal(False, gpu, LossTerms(softcap=3.0)))
    assert "documents" in str(linear_attention.IMPLEMENTATIONS[0].refusal(False, gpu, gpu, None, torch.zeros(1, 9), 64))
    decay = torch.zeros(1, 1, 9)
    monkeypatch.setattr(triton_runtime, "version", lambda: (3, 7, 0))
    assert "before Triton 3.7.1" in str(linear_attention.IMPLEMENTATIONS[0].refusal(False, gpu, gpu, decay, None, 64))
    monkeypatch.setattr(triton_runtime, "version", lambda: (3, 7, 1))
    assert linear_attention.IMPLEMENTATIONS[0].refusal(False, gpu, gpu, decay, None, 64) is None
    assert "one dtype" in str(linear_attention.IMPLEMENTATIONS[0].refusal(False, gpu, torch.ones(2), None, None, 64))
    gpu.shape = (1, 1, 9, 65)
    assert "even widths" in str(linear_attention.IMPLEMENTATIONS[0].refusal(False, gpu, gpu, None, None, 64))
    gpu.dtype = torch.float32
    assert "TF32" in str(linear_attention.IMPLEMENTATIONS[0].refusal(False, gpu, gpu, None, None, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "compute capability 9.0" in str(rmsnorm.IMPLEMENTATIONS[1].refusal(False, gpu))
    assert "needs a GPU" in str(rmsnorm.IMPLEMENTATIONS[1].refusal(False, torch.zeros(3)))


@pytest.mark.parametrize(
    ("operator", "arguments"), [(rmsnorm, (None,)), (layernorm, (torch.ones(8),) * 2), (linear_cross_entropy, (None,))]
)
def test_liger_says_how_it_is_installed(
    operator: ModuleType, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.bfloat16, shape=(9, 8))
    gpu.numel = lambda: 72
    (liger,) = (each for each in operator.IMPLEMENTATIONS if each.name == "liger")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    refusals._absent.cache_clear()
    monkeypatch.setattr(refusals.importlib.util, "find_spec", lambda name: None)
    missing = "liger_kernel is not installed (pip install 'liger-kernel>=0.8.5,<0.9')"
    assert liger.refusal(True, gpu, *arguments) == missing
    refusals._absent.cache_clear()
    gpu.dtype = torch.float64
    assert "bfloat16, float16 or float32" in str(liger.refusal(True, gpu, *arguments))


def test_fla_runs_outside_of_the_operator_with_its_own_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in takes part in autograd, which reaches it once: three more scans would call it again."""
    monkeypatch.setattr(refusals, "unless_library", lambda x, package, capability: None)
    calls: list[int] = []
    monkeypatch.setattr(
        sys.modules["fla.ops.simple_gla"],
        "chunk_simple_gla",
        lambda *args, **named: (calls.append(1), chunk_simple_gla(*args, **named))[1],
    )
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out, last = linear_attention.linear_attention(q, k, v)
    (out.sum() + last.sum()).backward()
    assert len(calls) == 1
    assert q.grad is not None

"""delta_rule's chunks against the token-by-token definition, and its adapter of flash-linear-attention."""

import inspect
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from xscale_kernels.delta_rule import delta_rule
from xscale_kernels.delta_rule.libraries import fla_scan
from xscale_kernels.delta_rule.op import reference_scan
from xscale_kernels.select import UnusableError


def inputs(T: int) -> list[torch.Tensor]:
    q, k, v = (torch.randn(2, 3, T, width, dtype=torch.float64) for width in (5, 5, 4))
    strength, decay = (torch.rand(2, 3, T, dtype=torch.float64) for _ in range(2))
    return [q, F.normalize(k, dim=-1), v, strength, -decay]


def test_two_halves_with_the_state_between_are_the_whole() -> None:
    *tensors, decay = inputs(12)
    whole, last = delta_rule(*tensors, log_decay=decay, chunk=4)
    first, state = delta_rule(*(x[:, :, :7] for x in tensors), log_decay=decay[..., :7], chunk=4)
    second, end = delta_rule(*(x[:, :, 7:] for x in tensors), log_decay=decay[..., 7:], state=state, chunk=4)
    torch.testing.assert_close(torch.cat((first, second), 2), whole)
    torch.testing.assert_close(end, last)


def test_full_strength_and_strong_decay_leave_the_last_value() -> None:
    """Each write replaces all that is stored at its key, and a strong decay empties the rest."""
    q, k, v, strength, decay = (x.float() for x in inputs(12))
    out, _ = delta_rule(q, k, v, torch.ones_like(strength), log_decay=torch.full_like(decay, -200.0), chunk=4)
    torch.testing.assert_close(out, (q * k).sum(-1, keepdim=True) * v)
    read, _ = delta_rule(k, k, v, torch.ones_like(strength), chunk=4)
    torch.testing.assert_close(read, v)


def test_faults_are_named() -> None:
    q, k, v, strength, decay = inputs(6)
    with pytest.raises(ValueError, match=r"strength is \[B, H, T\]"):
        delta_rule(q, k, v, strength[..., :2])
    with pytest.raises(ValueError, match=r"log_decay is \[B, H, T\]"):
        delta_rule(q, k, v, strength, log_decay=decay[:, :1])
    with pytest.raises(UnusableError, match=r"These can: torch, reference"):
        delta_rule(q.float(), k.float(), v.float(), strength, implementation="fla")


@pytest.mark.parametrize("gated", [False, True])
def test_the_adapter_passes_what_flas_function_takes(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of the same names: tensors [B, T, H, K], logarithms of decays, queries as they are."""

    def chunk_gated_delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, **more: Any) -> Any:
        assert more["output_final_state"]
        assert all(x.is_contiguous() for x in (q, k, v, g, beta))
        turned = (x.transpose(1, 2) for x in (q * scale, k, v, beta, g))
        out, last = reference_scan(*turned, None, more["initial_state"])
        return out.transpose(1, 2), last

    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    q, k, v, strength, decay = (x.float() for x in inputs(9))
    log_decay, state = decay if gated else None, torch.randn(2, 3, 5, 4)
    results = fla_scan(q, k, v, strength, log_decay, None, state, 64)
    expected = reference_scan(q, k, v, strength, log_decay, None, state)
    for computed, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(computed, wanted)


@pytest.mark.long
def test_the_stand_in_has_the_parameters_of_the_installed_function() -> None:
    module = pytest.importorskip("fla.ops.gated_delta_rule", reason="flash-linear-attention is not installed")
    parameters = inspect.signature(module.chunk_gated_delta_rule).parameters
    assert list(parameters)[:5] == ["q", "k", "v", "g", "beta"]
    assert {"scale", "initial_state", "output_final_state"} <= parameters.keys()

"""FLOPs of torch's fused attention on the CPU, which torch itself does not count."""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _attention(
    q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, **_: Any
) -> float:
    """FLOPs of the CPU's fused attention, which torch does not count: two matmuls."""
    batch, heads, queries, width = q.shape
    return float(
        2 * batch * heads * queries * k.shape[2] * (width + v.shape[3]) / (2 if causal else 1)
    )


def _attention_backward(
    gradient: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    sums: Any,
    dropout: float,
    causal: bool,
    **named: Any,
) -> float:
    """FLOPs of its backward: five matmuls instead of two."""
    return 2.5 * _attention(q, k, v, dropout, causal)


FORMULAS: dict[Any, Callable[..., float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}

"""Every private name of torch that the operators use, so that an upgrade has one file to check (seen in torch 2.13.0).

Triton is used through its documented names only, `triton.knobs` among them (seen in triton 3.7.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = [
    "FakeTensor",
    "accumulate_product_",
    "allow_graphs",
    "calls_directly",
    "constant_in_graphs",
    "cpu_flash_attention",
    "cpu_flash_attention_backward",
    "flash_varlen",
    "flash_varlen_backward",
    "foreach_add_",
    "foreach_addcdiv_",
    "foreach_addcmul_",
    "foreach_div_",
    "foreach_lerp_",
    "foreach_mul",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sqrt",
    "fused_adamw_",
    "keeps_graph",
    "too_many_graphs",
]


T = TypeVar("T")


def accumulate_product_(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: float
) -> None:
    """total = beta * total + left @ right within the product, left and right in half precision (CUDA only)."""
    torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)


def constant_in_graphs(function: Callable[[], T]) -> Callable[[], T]:
    """Mark a function whose result a graph takes for a constant, as `torch.compiler.assume_constant_result` does.

    That imports the compiler, which a module that is imported to check a config must not.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def allow_graphs(count: int) -> None:
    """Let torch.compile make `count` graphs of one function. The oldest torch we support has no argument for it."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, count)


def too_many_graphs() -> type[Exception]:
    """Return what torch.compile raises with `fullgraph` where a function needs more graphs than it may have."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return FailOnRecompileLimitHit


def calls_directly(x: torch.Tensor) -> bool:
    """Whether an operator's function may be called without torch's dispatcher, which costs more than a few rows do.

    True on a CPU if neither autograd nor the compiler, a dispatch mode or a subclass of Tensor has to see the call.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.is_cpu
        and torch._C._len_torch_dispatch_stack() == 0
    )


def flash_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    longest: int,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention on a GPU in documents cut at `offsets` [N + 1]: q [T, H, K], k and v [T, G, K] -> output and the
    log-sum-exp of the scores [H, T]. A query sees `window` tokens before and behind it; -1: all."""
    left, right = window
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, offsets, offsets, longest, longest, 0.0, False, False),
        window_size_left=left,
        window_size_right=right,
    )
    return out, lse


def flash_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    offsets: torch.Tensor,
    longest: int,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v of `flash_varlen`."""
    # Without dropout the state of the generator is not read.
    rng_state, unused = (
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.empty(0, device=q.device),
    )
    left, right = window
    to_q, to_k, to_v = torch.ops.aten._flash_attention_backward(
        *(
            dout,
            q,
            k,
            v,
            out,
            lse,
            offsets,
            offsets,
            longest,
            longest,
            0.0,
            False,
            rng_state,
            unused,
        ),
        window_size_left=left,
        window_size_right=right,
    )
    return to_q, to_k, to_v


def cpu_flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fused attention on a CPU: q [B, H, T, K], k and v [B, G, S, K] -> output and log-sum-exp of the scores.

    The mask [T, S] is added to the scores.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask
    )
    return out, lse


def cpu_flash_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v of `cpu_flash_attention`."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    to_q, to_k, to_v = backward(dout, q, k, v, out, lse, 0.0, False, attn_mask=mask)
    return to_q, to_k, to_v


def keeps_graph() -> bool:
    """Whether the present backward pass may run again (retain_graph)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


# The multi-tensor operators behind torch.optim and clip_grad_norm_.
foreach_add_ = torch._foreach_add_
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt
# The kernel of torch.optim.AdamW(fused=True).
fused_adamw_ = torch._fused_adamw_

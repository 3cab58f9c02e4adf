"""packed_attention over several blocks of queries, and what it never makes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from xscale_kernels import torch_private
from xscale_kernels.packed_attention import packed_attention


def packed(*lengths: int) -> torch.Tensor:
    """Documents [1, T] of these lengths."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def drawn(T: int, dtype: torch.dtype = torch.float64, B: int = 1) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(B, heads, T, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))


DOCUMENTS = {
    "one": packed(700),
    "short and long": packed(3, 255, 1, 300, 141),
    "at the blocks' ends": packed(256, 256, 188),
    "two sequences": torch.cat((packed(650, 50), packed(10, 690))),
    "ids in any order": (packed(100, 200, 100, 300) * 7919) % 5,
    "a document in two places": packed(300, 100, 300) % 2,
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_blocks_of_queries_give_the_definition(name: str, causal: bool) -> None:
    documents = DOCUMENTS[name]
    qkv = drawn(documents.shape[1], B=len(documents))
    above = torch.randn_like(qkv[0])

    def both(implementation: str) -> tuple[torch.Tensor, ...]:
        out = packed_attention(*qkv, documents, causal=causal, implementation=implementation)
        return out, *torch.autograd.grad(out, qkv, above)

    for ours, exact in zip(both("cpu"), both("reference"), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11)


def test_a_block_reads_the_keys_of_its_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the size of the largest tensor of a call: a block's mask."""
    calls: list[tuple[int, int, bool]] = []
    real: Callable[..., Any] = torch_private.cpu_flash_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> Any:
        calls.append((q.shape[2], k.shape[2], mask is not None))
        return real(q, k, v, mask)

    monkeypatch.setattr(torch_private, "cpu_flash_attention", attend)
    packed_attention(*drawn(1024), packed(256, 512, 256), causal=False)
    assert calls == [(256, 256, False), (256, 512, False), (256, 512, False), (256, 256, False)]
    calls.clear()
    packed_attention(*drawn(1024), packed(300, 724), causal=True)
    assert calls == [(256, 256, True), (256, 512, True), (256, 468, True), (256, 724, True)]


def test_other_documents_have_no_influence() -> None:
    """Also on gradients: those of another document are exactly 0."""
    qkv = drawn(600, torch.float32)
    out = packed_attention(*qkv, packed(350, 250), causal=False)
    for gradient in torch.autograd.grad(out[:, :, 350:].square().sum(), qkv):
        assert (gradient[:, :, :350] == 0).all()
        assert (gradient[:, :, 350:] != 0).any()


def test_flops_are_those_of_one_document() -> None:
    with FlopCounterMode(display=False) as counter:
        packed_attention(*drawn(512), packed(100, 412), causal=True).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * 8 * 4 * 512 * 513 // 2


def test_shapes_that_do_not_fit() -> None:
    q, k, v = drawn(20)
    with pytest.raises(ValueError, match=r"documents \[B, T\], got \[1, 4, 20, 8\].* and \[1, 19\]"):
        packed_attention(q, k, v, packed(19), causal=True)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 kv_heads"):
        packed_attention(q[:, :3], k, v, packed(20), causal=True)

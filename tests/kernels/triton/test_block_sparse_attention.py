"""block_sparse_attention's Triton kernels against the definition, forward and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from xscale_kernels.block_sparse_attention import block_sparse_attention, layout_from_mask
from xscale_kernels.block_sparse_attention.op import ScoreModifier
from xscale_kernels.select import UnusableError
from xscale_kernels.triton_runtime import interpreting

# The interpreter multiplies bfloat16 as integers (test_grouped_gemm.py); the GPU has no float64 kernel.
OTHERS = [(torch.float16, 2e-3), (torch.float64, 1e-7) if interpreting() else (torch.bfloat16, 2e-2)]
SETTINGS: list[dict[str, Any]] = [
    {"causal": False},
    {"causal": True},
    {"causal": True, "softcap": 2.0, "documents": True},
    {"causal": False, "softcap": 2.0, "slopes": True, "documents": True},
    {"causal": True, "documents": True, "sinks": True},
]
CASES = [(settings, torch.float32, 2e-6, 37, 37, 4) for settings in SETTINGS]
CASES += [(settings, torch.float32, 2e-6, 20, 50, 1) for settings in SETTINGS[1:]]
CASES += [(SETTINGS[2], dtype, bound, 37, 37, 4) for dtype, bound in OTHERS]


@pytest.mark.parametrize(("settings", "dtype", "bound", "T", "S", "heads"), CASES)
def test_forward_and_gradients(
    agree: Callable[..., None],
    device: str,
    settings: dict[str, Any],
    dtype: torch.dtype,
    bound: float,
    T: int,
    S: int,
    heads: int,
) -> None:
    mask = torch.rand(heads, -(-T // 16), -(-S // 16)) < 0.6
    mask[:, 0] = False
    layout = layout_from_mask(mask.to(device), 16)
    rest = dict(settings)
    if rest.pop("documents", False):
        ids = torch.randint(0, 2, (2, S), device=device).sort(1).values
        rest |= {"query_documents": ids[:, S - T :], "key_documents": ids}
    if rest.pop("slopes", False):
        rest["slopes"] = torch.rand(4, device=device)
    sinks = (torch.randn(4, device=device),) if rest.pop("sinks", False) else ()
    q = torch.randn(2, T, 4, 20, device=device)
    k, v = torch.randn(2, S, 2, 20, device=device), torch.randn(2, S, 2, 9, device=device)

    def run(name: str) -> Callable[..., torch.Tensor]:
        return lambda q, k, v, *sinks: block_sparse_attention(
            *(each.transpose(1, 2) for each in (q, k, v)),
            layout,
            implementation=name,
            **rest,
            sinks=sinks[0] if sinks else None,
        )

    agree(run("triton"), run("reference"), (q, k, v, *sinks), dtype, bound)


# Of 96 tokens in blocks of 16: ends of documents at ends of blocks and within them, several in a block, one that comes
# back, and documents in no order.
PACKED = {
    "ends of blocks": [0] * 32 + [1] * 48 + [2] * 16,
    "within blocks": [3] * 5 + [4] * 45 + [7] * 46,
    "several in a block": [0] * 20 + [1, 2, 3] + [4] * 73,
    "comes back": [2] * 34 + [1] * 30 + [2] * 32,
    "no order": [9] * 16 + [0] * 40 + [5] * 24 + [-3] * 16,
}
QUICK = [("within blocks", True), ("comes back", False)]


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        pytest.param(name, causal, marks=[] if (name, causal) in QUICK else pytest.mark.long)
        for name in PACKED
        for causal in (True, False)
    ],
)
def test_packed_documents(agree: Callable[..., None], device: str, name: str, causal: bool) -> None:
    layout = layout_from_mask((torch.rand(1, 6, 6) < 0.8).to(device), 16)
    documents = torch.tensor([PACKED[name], PACKED["within blocks"]], device=device)
    q, k, v = (torch.randn(2, 96, heads, 16, device=device) for heads in (2, 1, 1))

    def run(implementation: str) -> Callable[..., torch.Tensor]:
        return lambda *qkv: block_sparse_attention(
            *(each.transpose(1, 2) for each in qkv), layout, causal=causal, implementation=implementation,
            query_documents=documents, key_documents=documents,
        )  # fmt: skip

    agree(run("triton"), run("reference"), (q, k, v), torch.float32, 2e-6)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_blocks_of_other_documents_are_not_read(device: str, causal: bool) -> None:
    """A hidden NaN is NaN times a weight of 0, unless its block is left out."""
    documents = torch.tensor([PACKED["ends of blocks"]], device=device)
    layout = layout_from_mask(torch.ones(1, 6, 6, dtype=torch.bool, device=device), 16)
    first, second, third = documents == 0, documents == 1, documents == 2
    for hidden in (first, third):
        q, k, v, slope = (torch.randn(1, 1, 96, 16, device=device) for _ in range(4))
        for each in (q, k, v, slope):
            each[hidden[:, None].expand(1, 1, 96)] = float("nan")
        leaves = [each.requires_grad_() for each in (q, k, v)]
        out = block_sparse_attention(
            *leaves, layout, causal=causal, implementation="triton", query_documents=documents, key_documents=documents
        )
        for result in (out, *torch.autograd.grad(out, leaves, slope)):
            assert result[second[:, None].expand(1, 1, 96)].isfinite().all()


# In float32, blocks of 128 with heads 128 wide do not fit into shared memory, and are refused.
@pytest.mark.parametrize(("dtype", "width", "bound"), [(torch.float32, 64, 2e-6), (torch.float16, 128, 2e-3)])
def test_a_wide_block_is_taken_in_steps(
    agree: Callable[..., None], device: str, dtype: torch.dtype, width: int, bound: float
) -> None:
    layout = layout_from_mask(torch.tensor([[[True, False], [True, True]]], device=device), 128)
    qkv = tuple(torch.randn(1, 2 if at == 0 else 1, 190, width, device=device) for at in range(3))

    def run(name: str) -> Callable[..., torch.Tensor]:
        return lambda q, k, v: block_sparse_attention(q, k, v, layout, causal=True, implementation=name)

    agree(run("triton"), run("reference"), qkv, dtype, bound)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_registration(device: str, has_sinks: bool) -> None:
    q, k, v = (torch.randn(1, 2, 20, 16, device=device, requires_grad=True) for _ in range(3))
    layout = layout_from_mask(torch.ones(1, 2, 2, dtype=torch.bool, device=device), 16)
    sinks = torch.randn(2, device=device, requires_grad=True) if has_sinks else None
    arguments = (q, k, v, None, None, None, sinks, layout.tensors(), layout.sizes(), 0.25, True, 0.0, "triton")
    torch.library.opcheck(torch.ops.xscale.block_sparse_attention.default, arguments)


@pytest.mark.parametrize("per_head", [False, True])
def test_a_long_column_is_split(agree: Callable[..., None], device: str, per_head: bool) -> None:
    """A first column that all rows see, in jobs whose sums are added; rows of unequal length, and one without keys."""
    rows = 40
    mask = torch.eye(rows, dtype=torch.bool)[None].repeat(2 if per_head else 1, 1, 1)
    mask[:, :, 0] = True
    mask[0, 3] = False
    mask[-1, 9, :20] = True
    layout = layout_from_mask(mask.to(device), 16)
    assert layout.slots >= 2
    assert layout.row_order[-rows] == 9
    lengths = layout.jobs[:, 2] - layout.jobs[:, 1]
    assert (lengths.diff() <= 0).all()
    assert int(lengths.sum()) == layout.query_blocks.numel()
    qkv = tuple(torch.randn(1, 2, 16 * rows - 5, 16, device=device) for _ in range(3))

    def run(name: str) -> Callable[..., torch.Tensor]:
        return lambda q, k, v: block_sparse_attention(q, k, v, layout, causal=True, implementation=name)

    agree(run("triton"), run("reference"), qkv, torch.float32, 2e-6)


def test_offsets_past_two_to_the_31(device: str) -> None:
    """Tokens so far apart in memory that a token's offset needs 64 bits; most of the memory is never touched."""
    stride = 2**27 + 64
    torch.use_deterministic_algorithms(False)
    room = torch.empty(20 * stride, dtype=torch.float16, device=device)
    x = room.as_strided((1, 1, 20, 16), (0, 0, stride, 1)).copy_(torch.randn(1, 1, 20, 16))
    layout = layout_from_mask(torch.ones(1, 2, 2, dtype=torch.bool, device=device), 16)
    with pytest.raises(UnusableError, match="pass 2\\^31"):
        block_sparse_attention(x, x, x, layout, implementation="triton")
    from xscale_kernels.block_sparse_attention import triton as kernels

    rule = ScoreModifier(0.25, True)
    near = x.contiguous()
    ours, theirs = kernels.forward(x, x, x, layout, rule), kernels.forward(near, near, near, layout, rule)
    assert torch.equal(ours[0], theirs[0])
    got = kernels.backward(x, x, x, *ours, near, layout, rule)
    for each, other in zip(got, kernels.backward(near, near, near, *theirs, near, layout, rule), strict=True):
        assert torch.equal(each, other)


def test_blocks_that_do_not_fit_into_shared_memory_are_refused(device: str) -> None:
    layout = layout_from_mask(torch.ones(1, 1, 1, dtype=torch.bool), 128)
    q = torch.zeros(1, 1, 128, 256, device=device, dtype=torch.float32)
    with pytest.raises(UnusableError, match="blocks of 128 with heads 256 wide in float32 need 525312 bytes"):
        block_sparse_attention(q, q, q, layout, causal=True, implementation="triton")

"""block_sparse_attention's definition against torch's, its CPU path against the definition, and its layouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from xscale_kernels.block_sparse_attention import block_sparse_attention, layout_from_mask, shared_memory


def test_a_layout_keeps_its_mask() -> None:
    mask = torch.rand(3, 5, 7) < 0.4
    mask[1, 2] = False
    layout = layout_from_mask(mask, 16)
    assert torch.equal(layout.mask(), mask)
    assert layout.density(causal=False) == int(mask.sum()) / mask.numel()
    assert layout.query_blocks.numel() == layout.key_blocks.numel()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "S"), [(37, 37), (20, 37)])
def test_a_full_layout_is_dense_attention(causal: bool, T: int, S: int) -> None:
    q, k, v = (torch.randn(2, heads, length, 5, dtype=torch.float64) for heads, length in ((4, T), (2, S), (2, S)))
    layout = layout_from_mask(torch.ones(1, -(-T // 8), -(-S // 8), dtype=torch.bool), 8)
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T) if causal else None
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    out = block_sparse_attention(q, k, v, layout, causal=causal, implementation="reference")
    torch.testing.assert_close(out, expected)


SETTINGS: list[dict[str, Any]] = [
    {"causal": False},
    {"causal": True},
    {"causal": True, "softcap": 2.0, "documents": True},
    {"causal": False, "softcap": 2.0, "slopes": True, "documents": True},
    {"causal": True, "documents": True, "sinks": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("T", "S", "heads"), [(37, 37, 4), (37, 37, 1), (20, 50, 1)])
def test_cpu_path(
    agree: Callable[..., None],
    settings: dict[str, Any],
    dtype: torch.dtype,
    bound: float,
    T: int,
    S: int,
    heads: int,
) -> None:
    mask = torch.rand(heads, -(-T // 16), -(-S // 16)) < 0.6
    mask[:, 0] = False
    layout = layout_from_mask(mask, 16)
    rest = dict(settings)
    if rest.pop("documents", False):
        ids = torch.randint(0, 2, (2, S)).sort(1).values
        rest |= {"query_documents": ids[:, S - T :], "key_documents": ids}
    if rest.pop("slopes", False):
        rest["slopes"] = torch.rand(4)
    sinks = (torch.randn(4),) if rest.pop("sinks", False) else ()
    q, k, v = torch.randn(2, T, 4, 20), torch.randn(2, S, 2, 20), torch.randn(2, S, 2, 9)

    def run(name: str) -> Callable[..., torch.Tensor]:
        return lambda q, k, v, *sinks: block_sparse_attention(
            *(each.transpose(1, 2) for each in (q, k, v)),
            layout,
            implementation=name,
            **rest,
            sinks=sinks[0] if sinks else None,
        )

    agree(run("cpu"), run("reference"), (q, k, v, *sinks), dtype, bound)


def test_gradcheck_registration_and_compile() -> None:
    q, k, v = (torch.randn(1, heads, 6, 2, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    layout = layout_from_mask(torch.tensor([[[True, False], [True, True]]]), 4)

    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return block_sparse_attention(q, k, v, layout, causal=True, sinks=sinks)

    for inputs in ((q, k, v), (q, k, v, sinks)):
        assert torch.autograd.gradcheck(run, inputs)
        sink_logits = inputs[3] if len(inputs) > 3 else None
        arguments = (q, k, v, None, None, None, sink_logits, layout.tensors(), layout.sizes(), 0.25, True, 0.0, "")
        torch.library.opcheck(torch.ops.xscale.block_sparse_attention.default, arguments)
        whole = torch.compile(run, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(whole(*inputs), run(*inputs))


def test_only_blocks_that_are_there_are_computed() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from xscale_kernels.block_sparse_attention import cpu
    from xscale_kernels.block_sparse_attention.op import ScoreModifier

    q = torch.randn(1, 1, 64, 8)
    layout = layout_from_mask(torch.eye(8, dtype=torch.bool)[None], 8)
    with FlopCounterMode(display=False) as inside:
        cpu.forward(q, q, q, layout, ScoreModifier(1.0, False))
    assert inside.get_total_flops() == 8 * 2 * 2 * 8 * 8 * 8
    with FlopCounterMode(display=False) as counted:
        block_sparse_attention(q, q, q, layout)
    assert counted.get_total_flops() == inside.get_total_flops()


def test_a_query_without_keys_gives_zeros_and_no_gradient() -> None:
    q, k, v = (torch.randn(1, 1, 16, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    layout = layout_from_mask(torch.tensor([[[True, False], [False, False]]]), 8)
    out = block_sparse_attention(q, k, v, layout)
    assert not out[:, :, 8:].any()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_alibi_and_documents() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    layout = layout_from_mask(torch.ones(1, 1, 1, dtype=torch.bool), 8)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    out = block_sparse_attention(
        q, k, v, layout, causal=True, slopes=slopes, query_documents=documents, key_documents=documents
    )
    alone = layout_from_mask(torch.ones(1, 1, 1, dtype=torch.bool), 8)
    second = block_sparse_attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], alone, causal=True, slopes=slopes)
    torch.testing.assert_close(out[:, :, 3:], second)
    distance = torch.arange(5)[:, None] - torch.arange(5)[None, :]
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
    expected = F.scaled_dot_product_attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], attn_mask=bias[None])
    torch.testing.assert_close(second, expected)


def test_sinks_are_a_column_of_the_softmax() -> None:
    """The reference with a loop over heads and queries; the last query sees no key."""
    q, k, v, sinks = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((1, 2, 5, 4), (1, 1, 5, 4), (1, 1, 5, 3), (2,))
    )
    documents = torch.tensor([[0, 0, 0, 0, 1]])
    layout = layout_from_mask(torch.ones(1, 1, 1, dtype=torch.bool), 8)
    out = block_sparse_attention(
        q, k, v, layout, sinks=sinks, query_documents=documents, key_documents=documents * 0, implementation="reference"
    )
    for head in range(2):
        for query in range(4):
            weights = [torch.exp((q[0, head, query] * k[0, 0, key]).sum() / 2) for key in range(5)]
            total = sum(weights) + sinks[head].exp()
            expected = sum(weight * v[0, 0, key] for key, weight in enumerate(weights)) / total
            torch.testing.assert_close(out[0, head, query], expected)
    assert not out[:, :, 4].any()


def test_faults_are_named() -> None:
    q = torch.zeros(1, 2, 20, 4)
    fits = layout_from_mask(torch.ones(1, 3, 3, dtype=torch.bool), 8)
    with pytest.raises(ValueError, match=r"a logit for each of 2 heads, got \[3\]"):
        block_sparse_attention(q, q, q, fits, sinks=torch.zeros(3))
    layout = layout_from_mask(torch.ones(1, 2, 2, dtype=torch.bool), 8)
    with pytest.raises(ValueError, match=r"layout of \[1 or 2, 3, 3\] blocks, this one is \[1, 2, 2\]"):
        block_sparse_attention(q, q, q, layout)


def test_the_benchs_flex_has_the_same_blocks() -> None:
    from xscale_kernels.block_sparse_attention.cases import flex_blocks

    mask = torch.tensor([[[True, False], [True, True]], [[True, False], [False, True]]])
    blocks = flex_blocks(layout_from_mask(mask, 128), 256)
    assert torch.equal(blocks.to_dense()[0].bool(), mask)
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_num_blocks[0].tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize(
    ("block", "width", "itemsize", "limit", "count"),
    [
        (128, 128, 2, shared_memory.HOPPER_BYTES, 2),
        (128, 128, 2, 166_912, 1),
        (128, 256, 2, shared_memory.HOPPER_BYTES, 0),
        (128, 128, 4, shared_memory.HOPPER_BYTES, 0),
        (64, 128, 4, shared_memory.HOPPER_BYTES, 2),
    ],
)
def test_as_many_stages_as_shared_memory_holds(block: int, width: int, itemsize: int, limit: int, count: int) -> None:
    """Hopper's limit and that of an A100."""
    assert shared_memory.stages(block, width, width, itemsize, limit) == count

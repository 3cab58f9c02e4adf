"""Ring attention by fused kernels: the numbers of one process, which calls take them, and what is saved of them."""

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.conformance.made import drawn
from tests.distributed import distributed
from tests.parallel.test_selective_checkpoint import Seen
from xscale.mesh.torch_private import FakeTensorMode
from xscale.nn.attention.ops.dense import dense_attention
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims
from xscale.nn.tokens import SharedValues, Tokens
from xscale.parallel.context.mask import ShardedAttentionMask
from xscale.parallel.context.ring import flash_parts
from xscale.parallel.context.ring.document_runs import FlashPart, document_runs, parts_of_documents, share_document_runs
from xscale.parallel.context.ring.flash_parts import FlashParts, attend, attend_backward, is_supported
from xscale.parallel.context.ring.ring import Ring
from xscale.parallel.context.sequence_sharding import SequenceSharding, shard_tokens
from xscale.parallel.recompute.activation_checkpointing import save_matmul_outputs

FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"
HEADS, WIDTH = 4, 8


@dataclass(frozen=True)
class Case:
    """Shapes of an attention."""

    causal: bool
    queries: int
    keys: int
    groups: int = HEADS
    zigzag: bool = True


CASES = {
    "causal": Case(True, 23, 23),
    "causal, grouped, adjacent": Case(True, 16, 16, groups=2, zigzag=False),
    "bidirectional, grouped": Case(False, 23, 23, groups=2),
    "cross, padded": Case(False, 9, 22, groups=1),
    "less tokens than chunks": Case(True, 3, 3),
}


def ring_of(causal: bool) -> Ring:
    """The ring around a softmax core."""
    dims = Dims(width=32, depth=1, vocabulary=7, length=64, causal=causal)
    return Ring(Softmax(Softmax.Config(), dims, HEADS, WIDTH))


def inputs_of(case: Case) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    shapes = [(case.queries, HEADS), (case.keys, case.groups), (case.keys, case.groups), (case.queries, HEADS)]
    return [drawn(2, length, heads, WIDTH, seed=at).transpose(1, 2) for at, (length, heads) in enumerate(shapes)]


def mask_of(case: Case, documents: Tensor | None = None) -> ShardedAttentionMask:
    """This rank's mask of a sequence that all ranks share."""
    assert dist.group.WORLD is not None
    sharding = SequenceSharding(dist.group.WORLD, balanced=case.zigzag)
    queries, keys = (
        shard_tokens(
            Tokens(ids=torch.zeros(2, length).long(), positions=torch.arange(length)[None], documents=documents),
            sharding,
        )
        for length in (case.queries, case.keys)
    )
    return ShardedAttentionMask(
        queries=queries.ids.shape[1], keys=keys.ids.shape[1], causal=case.causal, query_shard=queries, key_shard=keys
    )


def shard(x: Tensor, sharding: SequenceSharding) -> Tensor:
    """[B, H, T, K] -> [B, H, P, K]."""
    return sharding.shard(x.transpose(1, 2)).transpose(1, 2)


def attended(case: Case, dtype: torch.dtype, documents: Tensor | None = None) -> tuple[list[Tensor], Counter[str]]:
    """This rank's output and gradients by the ring, and the operators that ran."""
    mask = mask_of(case, documents)
    q, k, v, slope = (shard(x, mask.sharding).to(dtype) for x in inputs_of(case))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with Seen() as seen:
        o = ring_of(case.causal)(*leaves, mask)
        gradients = torch.autograd.grad(o, leaves, slope)
    return [o, *gradients], seen.count


def expected(case: Case, dtype: torch.dtype, documents: Tensor | None = None) -> list[Tensor]:
    """This rank's shards of the output and gradients of one process, in float64."""
    sharding = mask_of(case).sharding
    q, k, v, slope = (x.to(dtype).double() for x in inputs_of(case))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    hidden = torch.ones(case.queries, case.keys).triu(1).bool()[None, None] if case.causal else None
    if documents is not None:
        apart = documents[:, None, :, None] != documents[:, None, None, :]
        hidden = apart if hidden is None else apart | hidden
    o = dense_attention(*leaves, hidden)
    return [shard(x, sharding) for x in (o, *torch.autograd.grad(o, leaves, slope))]


def packed(length: int) -> Tensor:
    """Documents [2, T] of two samples: of one token, of many, and in one sample a document that comes back."""
    (first, second), third = (length // 3, length - length // 4), length // 2
    one = [0] * first + [1] + [2] * (second - first - 1) + [3] * (length - second)
    other = [4] * third + [5] * (length - third - 1) + [4]
    return torch.tensor([one, other[:length]])


def check_against_one_process(dtype: torch.dtype, tolerance: float, *, documents: bool = False) -> None:
    """Compare each case on this rank; of the output, the real queries."""
    for name, case in CASES.items():
        if documents and case.queries != case.keys:
            continue
        apart = packed(case.queries) if documents else None
        results, ran = attended(case, dtype, apart)
        # A rank that has only padding attends to no document.
        assert ran[FORWARD] == ran[BACKWARD], name
        assert ran[FORWARD] or (documents and not mask_of(case).query_shard.real().any()), name
        assert ran["aten::bmm"] == 0, "no tile was computed"
        real = mask_of(case).query_shard.real()[:, None, :, None]
        for result, reference in zip(results, expected(case, dtype, apart), strict=True):
            assert result.dtype == dtype
            error = (result.double() - reference) * (real if result.shape[2] == real.shape[2] else 1)
            assert error.abs().max() <= tolerance * max(1.0, reference.abs().max().item()), (name, error.abs().max())


@distributed(ranks=2)
def test_two_ranks_give_the_numbers_of_one_process() -> None:
    check_against_one_process(torch.float64, 1e-13)
    check_against_one_process(torch.bfloat16, 2e-2)


@distributed(ranks=2)
def test_two_ranks_keep_documents_apart_as_one_process_does() -> None:
    check_against_one_process(torch.float64, 1e-13, documents=True)
    check_against_one_process(torch.bfloat16, 2e-2, documents=True)


@pytest.mark.long
@distributed(ranks=4)
def test_four_ranks_give_the_numbers_of_one_process() -> None:
    check_against_one_process(torch.float64, 1e-13)
    check_against_one_process(torch.float64, 1e-13, documents=True)


@distributed(ranks=2)
def test_a_log_sum_exp_of_a_part_alone_is_noticed() -> None:
    """Negative control: backward needs the log-sum-exp over all keys."""
    with (
        patch.object(flash_parts, "attend_backward", lambda *args: attend_backward(*args[:5], args[5] + 0.01, args[6])),
        pytest.raises(AssertionError),
    ):
        check_against_one_process(torch.float64, 1e-13)


@distributed(ranks=2)
def test_positions_and_a_switched_off_kernel_take_tiles() -> None:
    case = CASES["causal"]
    assert FlashParts.of(inputs_of(case)[0], mask_of(case)) is not None
    assert FlashParts.of(inputs_of(case)[0], replace(mask_of(case), position=Mock())) is None, "a position adds scores"
    for documents in (None, packed(case.queries)):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            results, ran = attended(case, torch.float64, documents)
        assert ran[FORWARD] == ran[BACKWARD] == 0
        assert ran["aten::bmm"]
        real = mask_of(case).query_shard.real()[:, None, :, None]
        for result, reference in zip(results, expected(case, torch.float64, documents), strict=True):
            assert ((result - reference) * real).abs().max() < 1e-13


@distributed(ranks=2)
def test_a_selective_checkpoint_saves_the_sum_of_the_parts() -> None:
    """The recomputation neither attends nor sends, and the parts' outputs are not saved."""
    case = CASES["causal"]
    mask = mask_of(case)
    q, k, v, slope = (shard(x, mask.sharding) for x in inputs_of(case))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    ring = ring_of(True)
    with Seen() as seen:
        out = checkpoint(lambda *x: ring(*x, mask).exp(), *leaves, use_reentrant=False, context_fn=save_matmul_outputs)
        forwards, sent = seen.count[FORWARD], seen.count["c10d::send"]
        gradients = torch.autograd.grad(out, leaves, slope)
    assert forwards == seen.count[FORWARD] > 0
    assert sent * 4 == seen.count["c10d::send"], "backward sends keys once and gradients twice"
    plain = torch.autograd.grad(ring(*leaves, mask).exp(), leaves, slope)
    for saved, reference in zip(gradients, plain, strict=True):
        assert torch.equal(saved, reference)


class _Ranks:
    """A process group as a sharding reads it."""

    def __init__(self, count: int, rank: int) -> None:
        self.count, self.number = count, rank

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.number


@pytest.mark.parametrize("zigzag", [True, False], ids=["zig-zag", "adjacent"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_parts_hold_each_visible_pair_of_a_document_once(causal: bool, zigzag: bool) -> None:
    for count, length in itertools.product((1, 2, 3), (3, 8, 17, 24)):
        documents = packed(length)
        tokens = Tokens(ids=documents, positions=documents, documents=documents)
        runs, pairs = document_runs(tokens), list[tuple[int, int, int]]()
        for rank, owner in itertools.product(range(count), range(count)):
            sharding: Any = SequenceSharding(_Ranks(count, rank), balanced=zigzag)  # type: ignore[arg-type]
            whole = FlashParts(sharding, length, length, causal)
            for part in parts_of_documents(sharding, owner, runs, runs, (length, length), causal=causal):
                pairs += [(part.sample, *pair) for pair in pairs_of(whole, part, owner)]
        visible = [
            (sample, i, j)
            for sample, row in enumerate(documents.tolist())
            for i, j in itertools.product(range(length), range(length))
            if row[i] == row[j] and (j <= i or not causal)
        ]
        assert sorted(pairs) == visible, (count, length)


def test_runs_are_found_once_and_before_tokens_are_copied() -> None:
    """On a GPU the host would wait for the documents."""
    documents = packed(8)
    tokens = Tokens(ids=documents, positions=documents, documents=documents)
    runs = document_runs(tokens)
    with FakeTensorMode() as fake:
        copied = tokens.map_tensors(fake.from_tensor)
        assert document_runs(copied) is runs
        faked = tokens.map_tensors(fake.from_tensor, shared_values=SharedValues())
        share_document_runs(tokens, faked)
        assert document_runs(faked) is runs


def pairs_of(parts: FlashParts, part: FlashPart, owner: int) -> list[tuple[int, int]]:
    """Positions of each query and key that sees it, padding left out."""
    device = torch.device("cpu")
    queries = parts.sharding.positions(parts.queries, device)[parts.sharding.rank][part.rows].tolist()
    keys = parts.sharding.positions(parts.keys, device)[owner][part.columns].tolist()
    return [
        (query, key)
        for row, query in enumerate(queries)
        for column, key in enumerate(keys)
        if query < parts.queries and key < parts.keys and (column <= row or not part.causal)
    ]


@pytest.mark.parametrize("zigzag", [True, False], ids=["zig-zag", "adjacent"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_parts_hold_each_visible_pair_once(causal: bool, zigzag: bool) -> None:
    for count in (1, 2, 3, 4):
        for queries in (1, 3, 7, 8, 16, 17):
            keys = queries if causal else 25 - queries
            pairs: list[tuple[int, int]] = []
            for rank in range(count):
                sharding: Any = SequenceSharding(_Ranks(count, rank), balanced=zigzag)  # type: ignore[arg-type]
                parts = FlashParts(sharding, queries, keys, causal)
                for owner in range(count):
                    mine = parts.parts(owner)
                    assert len(mine) <= 1
                    pairs += [pair for part in mine for pair in pairs_of(parts, part, owner)]
            visible = [(i, j) for i in range(queries) for j in range(keys) if j <= i or not causal]
            assert sorted(pairs) == visible, (count, queries)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "capability", "takes"),
    [
        ("cpu", torch.float64, 5, (0, 0), True),
        ("cpu", torch.float32, 8, (0, 0), True),
        ("cuda", torch.bfloat16, 64, (9, 0), True),
        ("cuda", torch.bfloat16, 64, (7, 5), False),
        ("cuda", torch.float32, 64, (9, 0), False),
        ("cuda", torch.bfloat16, 36, (9, 0), False),
        ("cuda", torch.float16, 512, (9, 0), False),
        ("meta", torch.bfloat16, 64, (9, 0), False),
    ],
)
def test_devices_and_dtypes_with_a_kernel(
    device: str, dtype: torch.dtype, width: int, capability: tuple[int, int], takes: bool
) -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 3, width, dtype=dtype, device=device)
    with (
        patch.object(torch.backends.cuda, "is_flash_attention_available", return_value=True),
        patch.object(torch.cuda, "get_device_capability", return_value=capability),
    ):
        assert is_supported(q) == takes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shapes_without_storage(device: str) -> None:
    """Fake tensors of a plan call the kernel of the CPU, meta tensors that of CUDA; both with grouped queries."""
    with FakeTensorMode():
        q, k = (torch.empty(2, heads, 16, 64, dtype=torch.bfloat16, device=device) for heads in (4, 2))
        out, log_sum = attend(q, k[:, :, :8], k[:, :, :8], False)
        gradients = attend_backward(out, q, k[:, :, :8], k[:, :, :8], out, log_sum, False)
    assert (out.shape, log_sum.shape, log_sum.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [x.shape for x in gradients] == [q.shape, k[:, :, :8].shape, k[:, :, :8].shape]
    assert all(x.device.type == device for x in (out, log_sum, *gradients))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")
@pytest.mark.parametrize("causal", [True, False])
def test_a_gpu_gives_the_numbers_of_a_cpu(causal: bool) -> None:
    q, slope = (drawn(2, HEADS, 100, 64, seed=seed) for seed in (0, 1))
    k, v = (drawn(2, 2, 100, 64, seed=seed) for seed in (2, 3))
    out, log_sum = attend(q, k, v, causal)
    wanted = [out, log_sum, *attend_backward(slope, q, k, v, out, log_sum + 1.0, causal)]
    on_gpu = [x.to("cuda", torch.bfloat16) for x in (q, k, v, slope)]
    out, log_sum = attend(*on_gpu[:3], causal)
    results = [out, log_sum, *attend_backward(on_gpu[3], *on_gpu[:3], out, log_sum + 1.0, causal)]
    for result, reference in zip(results, wanted, strict=True):
        assert (result.cpu().double() - reference).abs().max() < 0.05 * reference.abs().max()

"""Ring attention by torch's fused kernels (FlashAttention, Dao et al. 2022), which return the log-sum-exp of scores.

A part is a rectangle of queries and keys that needs no mask but a causal one; packed documents have one for each
document. Outputs of parts are merged by their
log-sum-exp. Backward of a part, with the output and log-sum-exp over all keys, gives its summand of the gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xscale.mesh import torch_private
from xscale.parallel.context.mask import ShardedAttentionMask
from xscale.parallel.context.ring.document_runs import FlashPart, document_runs, parts_of_documents
from xscale.parallel.context.sequence_sharding import SequenceSharding

CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CUDA_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FlashParts:
    """Parts of a rank's queries against the keys of each rank, where only causal order and documents hide keys."""

    sharding: SequenceSharding
    queries: int
    """T of the full sequence."""
    keys: int
    """S of the full sequence."""
    causal: bool
    by_owner: tuple[list[FlashPart], ...] | None = None
    """Parts of packed documents, by the rank that has the keys; None: one document."""

    @classmethod
    def of(cls, q: Tensor, mask: ShardedAttentionMask) -> "FlashParts | None":
        """Return the parts; None where the mask is not plain, or the device has no fused kernel for q."""
        queries, keys = mask.query_shard, mask.key_shard
        if (
            mask.position is not None
            or (mask.causal and queries.length != keys.length)
            or not is_supported(q)
        ):
            return None
        by_owner = None if None in (queries.documents, keys.documents) else _parts_by_owner(mask)
        return cls(mask.sharding, queries.length, keys.length, mask.causal, by_owner)

    def parts(self, owner: int) -> list[FlashPart]:
        """Return the parts of this rank's queries and `owner`'s keys in which any key is visible.

        A rank's chunks are in the order of the sequence: padding is at the end of its shard, and the keys that a chunk
        of queries sees are the first of the shard. So its own shard is one causal part, and zig-zag order needs one
        part for each other shard.
        """
        if self.by_owner is not None:
            return self.by_owner[owner]
        size, width = (
            self.sharding.chunk_length(self.queries),
            self.sharding.chunk_length(self.keys),
        )
        key_chunks = self.sharding.rank_chunks(owner)
        real = [min(width, max(0, self.keys - chunk * width)) for chunk in key_chunks]
        if not self.causal or owner == self.sharding.rank:
            # As many keys as queries in a causal part, so with padding, which padding alone sees.
            columns = 2 * width if self.causal else sum(real)
            return (
                [FlashPart(slice(0, 2 * size), slice(0, columns), self.causal)] if sum(real) else []
            )
        first, second = (
            sum(
                count
                for key_chunk, count in zip(key_chunks, real, strict=True)
                if key_chunk < query_chunk
            )
            for query_chunk in self.sharding.rank_chunks(self.sharding.rank)
        )
        rows = (
            [(0, 2 * size, first)]
            if first == second
            else [(0, size, first), (size, 2 * size, second)]
        )
        return [
            FlashPart(slice(start, stop), slice(0, count), False)
            for start, stop, count in rows
            if count
        ]

    def merge(
        self, owner: int, out: Tensor, total: Tensor, q: Tensor, kv: Tensor, used: Sequence[Tensor]
    ) -> None:
        """Merge the softmax over `owner`'s keys into that over the keys so far, in place.

        `out` is [B, H, P, K], `total` the log-sum-exp [B, H, P], `kv` [2, B, G, P, K].
        """
        k, v = kv
        for part in self.parts(owner):
            rows, columns = (
                (part.samples, slice(None), part.rows),
                (part.samples, slice(None), part.columns),
            )
            mean, log_sum = attend(q[rows], k[columns], v[columns], part.causal)
            before = total[rows]
            both = torch.logaddexp(before, log_sum)
            out[rows].mul_((before - both).exp()[..., None]).add_(
                mean * (log_sum - both).exp()[..., None]
            )
            total[rows] = both

    def add_gradients(
        self,
        owner: int,
        sums: tuple[Tensor, Tensor],
        inputs: tuple[Tensor, Tensor],
        outputs: tuple[Tensor, Tensor, Tensor],
        terms: Any,
    ) -> None:
        """Add the gradients of q and of `owner`'s kv to `sums`, in place.

        `inputs` are q and kv; `outputs` the output's gradient, the output and the log-sum-exp.
        """
        (to_q, to_kv), (q, (k, v)), (grad_out, out, total) = sums, inputs, outputs
        for part in self.parts(owner):
            rows, columns = (
                (part.samples, slice(None), part.rows),
                (part.samples, slice(None), part.columns),
            )
            grad_q, grad_k, grad_v = attend_backward(
                grad_out[rows], q[rows], k[columns], v[columns], out[rows], total[rows], part.causal
            )
            to_q[rows] += grad_q
            to_kv[0][columns] += grad_k
            to_kv[1][columns] += grad_v


def _parts_by_owner(mask: ShardedAttentionMask) -> tuple[list[FlashPart], ...]:
    """Return the parts of packed documents by the rank that has the keys; all layers of a micro-batch have the same."""
    queries, keys, sharding = mask.query_shard, mask.key_shard, mask.sharding
    runs = document_runs(queries.full), document_runs(keys.full)
    lengths = queries.length, keys.length

    def compute() -> tuple[list[FlashPart], ...]:
        ranks = range(sharding.count)
        return tuple(
            parts_of_documents(sharding, owner, *runs, lengths, causal=mask.causal)
            for owner in ranks
        )

    key = f"ring_parts/{mask.causal}/{queries.full is keys.full}"
    parts: tuple[list[FlashPart], ...] = queries.shared_values.get_or_compute(key, compute)
    return parts


def is_supported(q: Tensor) -> bool:
    """Return whether the device has a fused kernel that returns the log-sum-exp, for queries [B, H, T, K]."""
    # The switch of torch for both devices.
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    if q.device.type == "cpu":
        return q.dtype in CPU_DTYPES
    if (
        q.device.type != "cuda"
        or q.dtype not in CUDA_DTYPES
        or q.shape[-1] % 8
        or q.shape[-1] > 256
    ):
        return False
    has_kernel = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return has_kernel and torch.cuda.get_device_capability(q.device) >= (8, 0)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T / sqrt(K)) v [B, H, T, K] and the log-sum-exp [B, H, T]; k and v are [B, G, S, K]."""
    if q.device.type == "cpu":
        out, log_sum = torch_private.cpu_flash_attention(q, k, v, 0.0, causal)
    else:
        out, log_sum, *_ = torch_private.flash_attention(q, k, v, 0.0, causal)
    return out, log_sum


def attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `out` and `log_sum` may be over more keys than k has."""
    log_sum = log_sum.contiguous()
    if q.device.type == "cpu":
        gradients = torch_private.cpu_flash_attention_backward(
            grad_out, q, k, v, out, log_sum, 0.0, causal
        )
    else:
        lengths = None, None, q.shape[2], k.shape[2]
        # The state of the random numbers, which no dropout reads.
        state = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
        gradients = torch_private.flash_attention_backward(
            grad_out, q, k, v, out, log_sum, *lengths, 0.0, causal, *state
        )
    grad_q, grad_k, grad_v = gradients
    return grad_q, grad_k, grad_v

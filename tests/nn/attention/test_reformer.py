"""Reformer against its definition: the softmax over the union of what the rounds show."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.nn.attention.literal import WIDTH, agree, build, drawn, inputs, masks
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.reformer import Reformer
from xscale.nn.dims import Dims
from xscale.nn.random import SeededNumbers


def hash_of_equation(x: Tensor, rotations: Tensor) -> Tensor:
    """Kitaev et al. 2020, section 2: h(x) = argmax([xR; -xR]) by the random matrix R [K, b/2] of each round.

    x [..., K], rotations [rounds, K, b/2] -> buckets [rounds, ...].
    """
    labels = x.new_empty(len(rotations), *x.shape[:-1], dtype=torch.long)
    for number, rotation in enumerate(rotations):
        for place in product(*map(range, x.shape[:-1])):
            projected = [float((x[place] * column).sum()) for column in rotation.T]
            both = projected + [-value for value in projected]
            labels[(number, *place)] = both.index(max(both))
    return labels


Rotations = Callable[[int, int], Tensor]


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> Rotations:
    """Draw the random matrices R here, and hand them to the core in place of its own numbers."""

    def draw(rounds: int, buckets: int) -> Tensor:
        matrices = drawn(rounds, WIDTH, buckets // 2, seed=11)

        def normal(self: SeededNumbers, *shape: int) -> Tensor:
            assert shape == (WIDTH, rounds * buckets // 2)
            return torch.cat([*matrices], 1)

        monkeypatch.setattr(SeededNumbers, "normal", normal)
        return matrices

    return draw


@pytest.mark.parametrize(("rounds", "buckets"), [(1, 2), (3, 6), (2, 16)])
def test_the_hash_is_that_of_the_equation(rotations: Rotations, rounds: int, buckets: int) -> None:
    core = build(Reformer.Config(buckets=buckets, hashes=rounds), causal=True)
    keys, matrices = inputs(9)[1].detach(), rotations(rounds, buckets)
    assert torch.equal(core.hash(keys), hash_of_equation(keys, matrices))


def union(labels: Tensor, seen: Tensor, reach: int, causal: bool, first: int) -> Tensor:
    """[B, H, T, S]: tokens of one bucket, among those in sight, no more than `reach` of its members apart."""
    rounds, batch, heads, length = labels.shape
    shown = torch.zeros(batch, heads, length - first, length, dtype=torch.bool)
    for r, b, h in ((r, b, h) for r in range(rounds) for b in range(batch) for h in range(heads)):
        label = labels[r, b, h].tolist()
        for at in range(first, length):
            row = seen[min(b, len(seen) - 1), 0, at - first].tolist()
            run = [j for j in range(length) if label[j] == label[at] and (row[j] or j == at)]
            middle = run.index(at)
            ends = middle + 1 if causal else middle + reach
            for j in run[max(0, middle - reach + 1) : ends]:
                shown[b, h, at - first, j] = True
    return shown


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_softmax_over_the_buckets(rotations: Rotations, causal: bool, rounds: int) -> None:
    core = build(Reformer.Config(buckets=6, chunk_length=5, hashes=rounds), causal=causal)
    matrices = rotations(rounds, 6)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        first = k.shape[2] - q.shape[2]
        shown = union(hash_of_equation(k.detach(), matrices), seen, 5, causal, first)
        own = torch.eye(k.shape[2], dtype=torch.bool)[first:]
        others = shown & ~own
        shown = torch.where(others.any(-1, keepdim=True), others, own)
        scores = q @ (k / k.norm(dim=-1, keepdim=True)).mT
        return torch.softmax(scores.masked_fill(~shown, float("-inf")), -1) @ v

    for mask in masks(80, causal=causal):
        agree(core, mask, reference, tolerance=1e-8)


def test_near_keys_share_a_bucket_more_often_than_far_ones() -> None:
    core = build(Reformer.Config(buckets=16, hashes=64), causal=True)
    _, k, _ = inputs(40)
    for nudge, least, most in ((0.1, 0.7, 1.0), (10.0, 0.0, 0.3)):
        other = k + nudge * torch.randn(k.shape, generator=torch.Generator().manual_seed(3), dtype=k.dtype)
        same = (core.hash(k) == core.hash(other)).double().mean()
        assert least < same < most


def test_training_hashes_anew() -> None:
    core = build(Reformer.Config(buckets=6, chunk_length=5, hashes=1), causal=True)
    q, k, v = inputs(50)
    mask = AttentionMask(50, 50, True)
    assert torch.equal(core(q, k, v, mask), core(q, k, v, mask))
    core.train()
    assert not torch.equal(core(q, k, v, mask), core(q, k, v, mask))


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("length", [5, 80, 83])
@pytest.mark.sampled(2)
def test_chunks_see_themselves_and_the_one_before(rotations: Rotations, length: int, rounds: int) -> None:
    """Written out token by token, with documents and lengths that fill no chunk."""
    core = build(Reformer.Config(buckets=6, chunk_length=8, hashes=rounds, scope="chunk"), causal=False)
    matrices = rotations(rounds, 6)
    numbers = (torch.arange(length) >= 37).long().expand(2, -1)
    for mask in (AttentionMask(length, length, False), AttentionMask(length, length, False, 0, numbers, numbers)):

        def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, mask: AttentionMask = mask) -> Tensor:
            labels = hash_of_equation(k.detach(), matrices)
            if mask.key_documents is not None:
                labels = labels + 100 * mask.key_documents[:, None]
            size = min(8, length)
            order = labels.argsort(dim=-1, stable=True)
            whole = []
            for b, h in ((b, h) for b in range(2) for h in range(4)):
                ring = [chunk for one in order[:, b, h] for chunk in one.split(size)]
                found: dict[int, list[tuple[Tensor, Tensor]]] = {}
                for index, chunk in enumerate(ring):
                    keys = torch.cat([ring[index - 1], chunk]) if length > size else chunk
                    for i in chunk.tolist():
                        score = (q[b, h, i] * k[b, h, keys]).sum(-1) / k[b, h, keys].norm(dim=-1)
                        score = torch.where(keys == i, -1e5, score)
                        here = seen[min(b, len(seen) - 1), 0, i][keys]
                        score = score.masked_fill(~here, torch.finfo(score.dtype).min)
                        found.setdefault(i, []).append((score.logsumexp(0), score.softmax(0) @ v[b, h, keys]))
                rows = []
                for i in range(length):
                    totals, values = (torch.stack(each) for each in zip(*found[i], strict=True))
                    rows.append(totals.softmax(0) @ values)
                whole.append(torch.stack(rows))
            return torch.stack(whole).view_as(q)

        agree(core, mask, reference, tolerance=1e-8)


def test_chunks_are_refused_where_they_would_tell_of_the_future() -> None:
    dims = Dims(width=32, depth=1, vocabulary=9, length=64, causal=True)
    assert [one.path for one in Reformer.check(Reformer.Config(scope="chunk"), dims, "c")] == ["c.scope"]

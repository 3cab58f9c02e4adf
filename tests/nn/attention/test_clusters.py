"""Routing, Cluster-Former, clustered and ProbSparse attention against their definitions, one query at a time."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.nn.attention.literal import agree, build, drawn, inputs, masks, nearest_of_bucket, packed, seen
from xscale.nn.attention.cluster_former import ClusterFormer
from xscale.nn.attention.clustered import Clustered
from xscale.nn.attention.informer import Informer
from xscale.nn.attention.ops.kmeans import centroid_sums
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.routing_transformer import RoutingTransformer
from xscale.nn.dims import Dims
from xscale.nn.materialize import materialize
from xscale.nn.mixer.cluster_former import ClusterFormerAttention
from xscale.nn.module import name_modules
from xscale.nn.post_step import update_non_gradient_state
from xscale.nn.tokens import Stats, Tokens


def unit(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def centroid_scores(x: Tensor, centroids: Tensor) -> Tensor:
    return unit(x) @ (centroids / centroids.norm(dim=-1, keepdim=True)).mT


@pytest.mark.parametrize("shared", [False, True])
def test_causal_routing_finds_the_keys_of_the_querys_cluster(shared: bool) -> None:
    """Equation 11 of the survey with causal order: P_i = {j <= i: mu(q_i) = mu(k_j)}, the last of them."""
    core = build(RoutingTransformer.Config(clusters=4, window=6), causal=True)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        clusters = [centroid_scores(x, core.centroids).argmax(-1) for x in (q, k)]
        shown = nearest_of_bucket(*clusters, seen, 6, causal=True)
        scores = unit(q) @ unit(k).mT / 8**0.5
        if shared:
            first, itself = k.shape[2] - q.shape[2], torch.eye(k.shape[2], dtype=torch.bool)
            scores = torch.where(itself[first:], -1e5, scores)
        weights = torch.softmax(scores.masked_fill(~shown, -1e9), -1)
        return torch.where(shown, weights, 0) @ v

    numbers = packed(80, 13, 60)
    packed_sight = AttentionMask(80, 80, True, query_documents=numbers, key_documents=numbers)
    for mask in [*masks(80, causal=True, documents=False), packed_sight]:
        agree(core, replace(mask, shared_qk=shared), reference, tolerance=1e-8)


def test_causal_routing_finds_more_of_the_softmax_than_chance() -> None:
    """Where queries and keys differ, the keys of a query's cluster hold several times their share of its weights."""
    core = build(RoutingTransformer.Config(clusters=16, window=400), causal=True)
    q, k, _ = (x.detach() for x in inputs(400, groups=4))
    mask = AttentionMask(400, 400, True)
    # Unit vectors as values make the output the weights.
    v = torch.eye(400, dtype=q.dtype).expand(2, 4, -1, -1)
    seen_keys = core(q, k, v, mask) > 0
    weights = torch.softmax((4 * unit(q) @ unit(k).mT / 8**0.5).masked_fill(~seen(mask), float("-inf")), -1)
    density = (seen_keys.sum() / (seen(mask).sum() * 8)).item()
    assert (weights * seen_keys).sum(-1).mean() > 3 * density


def test_shared_queries_and_keys_are_not_their_own_only_keys() -> None:
    """Without the exception a token whose query is its key has nearly all of its weight on itself."""
    core = build(RoutingTransformer.Config(clusters=2, window=8), causal=True)
    q, _, _ = (x.detach() for x in inputs(64))
    itself = torch.eye(64, dtype=q.dtype).expand(2, 4, -1, -1)
    weights = core(4 * q, 4 * q, itself, AttentionMask(64, 64, True, shared_qk=True))
    own = weights.diagonal(dim1=-2, dim2=-1)
    # Only the first token of a cluster has no other key.
    assert ((own == 0) | (own == 1)).all()
    assert (own.sum(-1) <= 2).all()


def test_balanced_routing_takes_as_many_for_each_centroid() -> None:
    core = build(RoutingTransformer.Config(clusters=4), causal=False)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        near_q, near_k = centroid_scores(q, core.centroids), centroid_scores(k, core.centroids)
        out = torch.zeros_like(q)
        for b in range(2):
            for h in range(4):
                found: dict[int, list[Tensor]] = {}
                for c in range(4):
                    mine = near_q[b, h, :, c].sort(descending=True).indices[:13]
                    theirs = near_k[b, h, :, c].sort(descending=True).indices[:13]
                    weights = torch.softmax(unit(q)[b, h, mine] @ unit(k)[b, h, theirs].mT / 8**0.5, -1)
                    for at, row in zip(mine.tolist(), weights @ v[b, h, theirs], strict=True):
                        found.setdefault(at, []).append(row)
                rows = [sum(found.get(at, [q[b, h, 0] * 0])) / max(1, len(found.get(at, []))) for at in range(50)]
                out = out.index_put((torch.tensor(b), torch.tensor(h)), torch.stack(rows))
        return out

    agree(core, AttentionMask(50, 50, False), reference, tolerance=1e-8)


def test_clusters_sorted_into_chunks() -> None:
    core = build(ClusterFormer.Config(clusters=4, chunk_length=8), causal=False)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        labels = centroid_scores(k, core.centroids).argmax(-1)
        shown = torch.zeros(2, 4, 50, 50, dtype=torch.bool)
        for b in range(2):
            for h in range(4):
                pairs = sorted((label, at) for at, label in enumerate(labels[b, h].tolist()))
                order = [at for _, at in pairs]
                for start in range(0, 50, 8):
                    chunk = order[start : start + 8]
                    for at in chunk:
                        shown[b, h, at, chunk] = True
        return torch.softmax((q @ k.mT / 8**0.5).masked_fill(~shown, float("-inf")), -1) @ v

    agree(core, AttentionMask(50, 50, False), reference, tolerance=1e-8)


def test_cluster_formers_centroids_are_means_of_the_memory_in_a_chain() -> None:
    """Each third step a centroid becomes the mean of what was nearest to it in three steps; neighbours are similar."""
    core = build(ClusterFormer.Config(clusters=5, update_every=3), causal=False).train()
    name_modules(core)
    core.memory.sums.data.zero_()
    tally = Stats()
    members: dict[tuple[int, int], list[Tensor]] = {}
    for step in range(4):
        before, tally = core.centroids.clone(), Stats()
        q, k, v = (x.detach() for x in inputs(30, groups=4))
        k = k + drawn(*k.shape, seed=99 + step)
        core(q, k, v, AttentionMask(30, 30, False, stats=tally))
        for b, h, t in product(range(2), range(4), range(30)):
            nearest = int(centroid_scores(k, before).argmax(-1)[b, h, t])
            members.setdefault((h, nearest), []).append(unit(k)[b, h, t])
        update_non_gradient_state(core, tally.means())
        if step != 2:
            assert torch.equal(core.centroids, before)
            continue
        for h in range(4):
            left = {c: torch.stack(members[h, c]).mean(0) if (h, c) in members else before[h, c] for c in range(5)}
            chain = [left.pop(0)]
            while left:
                similarity = {c: float(torch.cosine_similarity(mean, chain[-1], 0)) for c, mean in left.items()}
                chain.append(left.pop(max(similarity, key=similarity.__getitem__)))
            torch.testing.assert_close(core.centroids[h], torch.stack(chain), rtol=1e-6, atol=1e-6)
        members.clear()
    counts = torch.tensor([[len(members.get((h, c), [])) for c in range(5)] for h in range(4)])
    torch.testing.assert_close(core.memory.sums[..., -1] * 60 / 5, counts.double(), rtol=1e-6, atol=1e-6)


def test_cluster_former_sorts_all_heads_by_hidden_states() -> None:
    """The chunks are those of the layer's input, the same for all heads; the centroids are as wide as the layer."""
    config = ClusterFormerAttention.Config(heads=4, core=ClusterFormer.Config(clusters=4, chunk_length=8))
    mixer = ClusterFormerAttention(config, Dims(width=32, depth=1, vocabulary=11, length=64, causal=False))
    materialize(mixer, 0, dtype=torch.float64)
    mixer.eval()
    x, (centroids,) = drawn(2, 50, 32), mixer.core.centroids
    scores = centroid_scores(x, centroids)
    out = torch.zeros_like(x)
    for b in range(2):
        order = sorted(range(50), key=lambda t: (int(scores[b, t].argmax()), t))
        for start in range(0, 50, 8):
            chunk = order[start : start + 8]
            q, k, v = (x[b, chunk] @ part.weight.mT for part in (mixer.q, mixer.k, mixer.v))
            heads = [
                torch.softmax(q[:, at : at + 8] @ k[:, at : at + 8].mT / 8**0.5, -1) @ v[:, at : at + 8]
                for at in range(0, 32, 8)
            ]
            out[b, chunk] = torch.cat(heads, -1) @ mixer.o.weight.mT
    torch.testing.assert_close(mixer(x, Tokens.from_ids(torch.zeros(2, 50, dtype=torch.long))), out)


@pytest.mark.parametrize("causal", [False, True])
def test_routing_centroids_are_the_papers_running_means(causal: bool) -> None:
    """Equations 8 to 10 of the survey: two running sums for each centroid, and their quotient."""
    core = build(RoutingTransformer.Config(clusters=4, decay=0.9), causal=causal).train()
    core.path = "core"
    points = 2 * 2 * 30  # Queries and keys of two sequences.
    sums, counts = core.centroids.clone() * points / 4, torch.full((4, 4), points / 4, dtype=torch.float64)
    start = core.centroids.clone()
    for step in range(5):
        q, k, v = (x.detach() + step for x in (drawn(2, 4, 30, 8, seed=10 * step + at) for at in range(3)))
        tally, mean = Stats(), sums / counts[..., None]
        for half in (slice(0, 1), slice(1, 2)):
            core(q[half], k[half], v[half], AttentionMask(30, 30, causal, stats=tally))
        update_non_gradient_state(core, tally.means())
        new_sums, new_counts = 0.9 * sums, 0.9 * counts
        for x in (unit(q), unit(k)):
            for b, h, t in product(range(2), range(4), range(30)):
                near = max(range(4), key=lambda c: float(x[b, h, t] @ mean[h, c] / mean[h, c].norm()))
                new_sums[h, near] += 0.1 * x[b, h, t]
                new_counts[h, near] += 0.1
        sums, counts = new_sums, new_counts
        torch.testing.assert_close(core.centroids * points / 4, sums, rtol=1e-9, atol=1e-9)
        direction = (sums / counts[..., None]) / (sums / counts[..., None]).norm(dim=-1, keepdim=True)
        torch.testing.assert_close(core.centroids / core.centroids.norm(dim=-1, keepdim=True), direction)
    assert (core.centroids - start).abs().max() > 0.1


def test_little_of_the_random_start_is_left_after_200_steps() -> None:
    """The share of the start in equation 8, with thousands of points a step for each of 4 centroids."""
    core = build(RoutingTransformer.Config(clusters=4), causal=True, spread=0.0).train()
    core.path = "core"
    points, steps = 4096, 200
    start = core.centroids.clone()
    left = 0.999**steps
    literal = torch.randn(4, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theirs = literal.clone()
    x = unit(drawn(1, 4, points, 8, seed=1))
    for _ in range(steps):
        tally = Stats()
        tally.record(core, "found", centroid_sums(core.centroids, 0, 4, x))
        update_non_gradient_state(core, tally.means())
        near = (x[0, 0] @ theirs.mT / theirs.norm(dim=-1)).argmax(-1)
        theirs = 0.999 * theirs + 0.001 * torch.zeros_like(theirs).index_add(0, near, x[0, 0])
    share = left * start.norm(dim=-1) / core.centroids.norm(dim=-1)  # [H, C]
    share_of_theirs = left * literal.norm(dim=-1) / theirs.norm(dim=-1)
    assert share.median() < 0.02
    assert share.median() < 4 * share_of_theirs.median()


@pytest.mark.parametrize("top", [0, 7])
def test_clustered_queries_attend_as_their_mean(top: int) -> None:
    core = build(Clustered.Config(clusters=6, bits=12, iterations=3, top_k=top), causal=False)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        label = core.label(q.detach(), 6)
        rows = []
        for b, h in ((b, h) for b in range(2) for h in range(4)):
            for at in range(50):
                members = [j for j in range(50) if label[b, h, j] == label[b, h, at]]
                weights = torch.softmax(q[b, h, members].mean(0) @ k[b, h].mT / 8**0.5, -1)
                if top:
                    best = weights.detach().sort(descending=True).indices[:top]
                    own = torch.softmax(q[b, h, at] @ k[b, h, best].mT / 8**0.5, -1)
                    weights = weights.index_copy(0, best, own * weights[best].sum())
                rows.append(weights @ v[b, h])
        return torch.stack(rows).view(2, 4, 50, 8)

    agree(core, AttentionMask(50, 50, False), reference, tolerance=1e-8)


def test_clusters_of_queries_are_lloyds_in_hamming_space() -> None:
    """Assign each query's bits to the nearest centroid, make each centroid the majority of its bits, three times."""
    core = build(Clustered.Config(clusters=5, bits=13, iterations=3), causal=False)
    q, _, _ = (x.detach() for x in inputs(41))
    projection = torch.randn(8, 13, generator=torch.Generator().manual_seed(core.seed), dtype=torch.float64)
    labels = core.label(q, 5)
    for b, h in product(range(2), range(4)):
        bits = (q[b, h] @ projection > 0).tolist()
        centroids = [bits[c * 41 // 5] for c in range(5)]
        for step in range(4):
            distances = [[sum(x != y for x, y in zip(row, c, strict=True)) for c in centroids] for row in bits]
            nearest = [row.index(min(row)) for row in distances]
            if step == 3:
                break
            for c in range(5):
                members = [row for row, label in zip(bits, nearest, strict=True) if label == c]
                ones = [sum(column) * 2 - len(members) for column in zip(*members, strict=True)] or [0] * 13
                centroids[c] = [n > 0 if n else old for n, old in zip(ones, centroids[c], strict=True)]
        assert labels[b, h].tolist() == nearest


def test_clusters_of_queries_hold_what_is_near() -> None:
    core = build(Clustered.Config(clusters=4, bits=63, iterations=10), causal=False)
    centres = 4 * torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    which = torch.arange(40) // 10
    label = core.label(centres[which][None, None] + 0.1, 4)[0, 0]
    assert all(len(set(label[which == c].tolist())) == 1 for c in range(4))
    assert len(set(label.tolist())) == 4


def test_informer_lets_few_queries_attend() -> None:
    """Algorithm 1 of the paper: 2 ceil(ln 50) keys are sampled for each query, and as many queries attend."""
    core = build(Informer.Config(factor=2), causal=False)
    sample = torch.randint(50, (50, 8), generator=torch.Generator().manual_seed(core.seed))

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        rows = v.mean(2, keepdim=True).repeat(1, 1, 50, 1)
        for b, h in product(range(2), range(4)):
            measure = []
            for i in range(50):
                scores = [float((q[b, h, i] @ k[b, h, j]).detach()) for j in sample[i].tolist()]
                measure.append(max(scores) - sum(scores) / 50)
            for i in sorted(range(50), key=lambda i: -measure[i])[:8]:
                attended = torch.softmax(k[b, h] @ q[b, h, i] / 8**0.5, -1) @ v[b, h]
                rows = rows.index_put(tuple(torch.tensor(at) for at in (b, h, i)), attended)
        return rows

    agree(core, AttentionMask(50, 50, False), reference)


def test_informers_masked_form_lets_the_top_queries_so_far_attend() -> None:
    """Causal form: as above among the first t queries and keys; every other query gets the sum of the values so far."""
    core = build(Informer.Config(factor=2), causal=True)
    drawn_keys = torch.randint(1 << 40, (50, 8), generator=torch.Generator().manual_seed(core.seed)).tolist()
    attending = 0

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        nonlocal attending
        rows = torch.zeros_like(q)
        for b, h in product(range(2), range(4)):
            measures: list[float] = []
            for t in range(50):
                scores = [float((q[b, h, t] @ k[b, h, key % (t + 1)]).detach()) for key in drawn_keys[t]]
                measures.append(max(scores) - sum(scores) / (t + 1))
                top = 2 * math.ceil(math.log(max(2, t + 1)))
                attends = sum(measure > measures[t] for measure in measures) < top
                attending += attends
                weights = torch.softmax(k[b, h, : t + 1] @ q[b, h, t] / 8**0.5, -1) if attends else torch.ones(t + 1)
                row = weights.double() @ v[b, h, : t + 1]
                rows = rows.index_put(tuple(torch.tensor(at) for at in (b, h, t)), row)
        return rows

    agree(core, AttentionMask(50, 50, True), reference)
    assert 8 * 8 < attending < 8 * 45


def test_informer_samples_other_keys_for_each_query_and_call() -> None:
    core = build(Informer.Config(), causal=False)
    assert len({tuple(row) for row in core.sample_keys(300, 300).tolist()}) == 300
    assert torch.equal(core.sample_keys(300, 300), core.sample_keys(300, 300))
    core.train()
    assert not torch.equal(core.sample_keys(300, 300), core.sample_keys(300, 300))

"""Recurrences with a state against loops over tokens, from the papers' equations, in double precision."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, drawn, numbered
from xscale.nn.attention.ops.decayed_sums import CHUNK, ChannelDecayedSums, DecayedSums, decayed_products
from xscale.nn.attention.ops.delta_rule import DeltaRule
from xscale.nn.attention.ops.recurrence import Recurrence, advance_state
from xscale_kernels.delta_rule import chunked

B, H, F, K = 2, 3, 5, 4
LENGTHS = [1, 2, 63, 64, 150]


def softplus(*shape: int, seed: int) -> Tensor:
    return torch.nn.functional.softplus(drawn(*shape, seed=seed))


def inputs(kind: str, length: int) -> list[Tensor]:
    q, k, v = drawn(B, H, length, F), drawn(B, H, length, F, seed=1) / F**0.5, drawn(B, H, length, K, seed=2)
    if kind == "decayed":
        return [q, k, v, -softplus(B, H, length, seed=3)]
    if kind == "channel":
        return [q, k, v, -softplus(B, H, length, F, seed=3)]
    return [q, k, v, drawn(B, H, length, seed=4).sigmoid(), -softplus(B, H, length, seed=3)]


def made(kind: str, given: list[Tensor], documents: Tensor | None = None) -> Any:
    part: Callable[..., Any] = {"decayed": DecayedSums, "channel": ChannelDecayedSums, "delta": DeltaRule}[kind]
    return part(*given, documents=documents)


def literal(kind: str, given: list[Tensor], documents: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Mamba-2 and gated linear attention: S = diag(a) S + k v^T; the gated delta rule: S = a (I - b k k^T) S + b k v^T.

    Outputs S^T q; the state is emptied where a document begins.
    """
    q, k, v = given[:3]
    rows = []
    for b in range(B):
        heads = []
        for h in range(H):
            s, out = state[b, h], []
            for t in range(q.shape[2]):
                if documents is not None and t and documents[b, t] != documents[b, t - 1]:
                    s = torch.zeros_like(s)
                key, value = k[b, h, t], v[b, h, t]
                keep = given[-1][b, h, t].exp()
                if kind == "delta":
                    strength = given[3][b, h, t]
                    s = keep * (torch.eye(F, dtype=s.dtype) - strength * torch.outer(key, key)) @ s
                    s = s + strength * torch.outer(key, value)
                else:
                    s = torch.diag(keep.expand(F)) @ s + torch.outer(key, value)
                out.append(s.T @ q[b, h, t])
            heads.append((torch.stack(out), s))
        rows.append([torch.stack(part) for part in zip(*heads, strict=True)])
    out, last = (torch.stack(part) for part in zip(*rows, strict=True))
    return out, last


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["decayed", "channel", "delta"])
def test_chunks_are_the_recurrence(kind: str, length: int) -> None:
    given, state = inputs(kind, length), drawn(B, H, F, K, seed=7)
    parts = [length] if length < 3 else [length // 3, length - length // 3 - 1, 1]
    for documents in (None, numbered(*parts)):
        out, last = made(kind, given, documents).outputs_and_state(state)
        expected, expected_last = literal(kind, given, documents, state)
        assert close(out, expected)
        assert close(last, expected_last)
        assert close(made(kind, given, documents).outputs_and_state()[0], literal(kind, given, documents, 0 * state)[0])


@pytest.mark.parametrize("kind", ["decayed", "channel", "delta"])
def test_gradients_are_those_of_the_recurrence(kind: str) -> None:
    length = 70
    documents, weights = numbered(20, 50), drawn(B, H, length, K, seed=8)
    gradients = []
    for run in (
        lambda g, s: made(kind, g, documents).outputs_and_state(s),
        lambda g, s: literal(kind, g, documents, s),
    ):
        leaves = [x.requires_grad_() for x in (*inputs(kind, length), drawn(B, H, F, K, seed=7))]
        out, last = run(leaves[:-1], leaves[-1])
        gradients.append(torch.autograd.grad((out * weights).sum() + last.square().sum(), leaves))
    for computed, expected in zip(*gradients, strict=True):
        assert close(computed, expected)


@pytest.mark.parametrize("parts", [[150], [40, 110], [1, 149]], ids=str)
@pytest.mark.parametrize("kind", ["decayed", "channel", "delta"])
def test_a_sequence_takes_a_state_by_its_transition(kind: str, parts: list[int]) -> None:
    recurrence: Recurrence = made(kind, inputs(kind, 150), None if len(parts) == 1 else numbered(*parts))
    matrix, ended = recurrence.transition()
    for state in (drawn(B, H, F, K, seed=7), torch.zeros(B, H, F, K, dtype=torch.float64)):
        assert close(advance_state(matrix, state) + ended, recurrence.outputs_and_state(state)[1])


def test_segments_are_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    given, documents = inputs("delta", 300), numbered(100, 28, 172)
    whole = made("delta", given, documents).outputs_and_state()
    monkeypatch.setattr(chunked, "SEGMENT_FEATURES", 1)
    for computed, expected in zip(made("delta", given, documents).outputs_and_state(), whole, strict=True):
        assert close(computed, expected)


@pytest.mark.parametrize("kind", ["decayed", "channel", "delta"])
def test_strong_decays_stay_finite(kind: str) -> None:
    """A decay by exp(-2000) in one token, in float32: no exponential overflows, forward or backward."""
    given = [x.float() for x in inputs(kind, 130)]
    given[-1] = given[-1] * 2000
    leaves = [x.requires_grad_() for x in given]
    out, _ = made(kind, leaves).outputs_and_state()
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    assert all(bool(x.isfinite().all()) for x in (out, *gradients))
    # What is left is what a token wrote itself: S = b k v^T.
    strength = given[3] if kind == "delta" else torch.ones(())
    alone = (given[0] * given[1]).sum(-1, keepdim=True) * given[2] * strength.expand(B, H, 130)[..., None]
    assert (out - alone).abs().median() < 1e-6


def test_products_of_pairs() -> None:
    """Each pair's product on its own, where the sums of the rows end a token earlier."""
    rows, keys = drawn(2, CHUNK, F), drawn(2, CHUNK, F, seed=1)
    sums = -softplus(2, CHUNK, F, seed=2).cumsum(1)
    ahead = torch.cat((torch.zeros_like(sums[:, :1]), sums[:, :-1]), 1)
    products = decayed_products(rows, keys, ahead, sums)
    expected = torch.zeros_like(products)
    for t in range(CHUNK):
        for j in range(t):
            expected[:, t, j] = (rows[:, t] * keys[:, j] * (ahead[:, t] - sums[:, j]).exp()).sum(-1)
    assert close(products, expected)

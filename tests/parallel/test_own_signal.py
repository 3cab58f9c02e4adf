"""A signal that the engine has never heard of reaches its part in every layout: sharded, sent and pooled as tokens."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.distributed import Pool
from tests.parallel.against_one import Found, compare, trained
from xscale.nn.depth.token_windows import TokenWindows
from xscale.nn.position.learned import Learned
from xscale.nn.signals import BATCH, TOKENS, Signal, TokenAxes
from xscale.nn.tokens import Tokens
from xscale.objective.objective import Batch, Causal

GRADES = Signal[Tensor]("lab.grades", TokenAxes((BATCH, TOKENS)))
WEIGHTS = Signal[Tensor]("lab.weights", TokenAxes((BATCH,)))
MODEL: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "position": "none",
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4},
            "ffn": {"kind": "dense", "hidden": 24},
            "position": "learned",
        },
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}, "recompute": {"every": 1}},
    "sequence": {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
    "ring": {"mesh": {"cp": 2}},
    "1f1b": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
}
learned, causal = Learned.embed, Causal.batch


def embed(self: Learned, x: Tensor, tokens: Tokens) -> Tensor:
    """Positions, by the grade of each token and the weight of its sequence."""
    grades, weights = tokens.get(GRADES), tokens.get(WEIGHTS)
    assert grades is not None
    assert weights is not None
    return x + (learned(self, x, tokens) - x) * (grades * weights[:, None])[..., None].to(x.dtype)


def batch(self: Causal, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any) -> Batch:
    signals = {GRADES: (tokens[:, :-1] % 7).double(), WEIGHTS: 1 + index.double()}
    return causal(self, tokens, documents, index, signals=signals, **fields)


def graded(parallel: dict[str, Any]) -> Found:
    with patch.object(Learned, "embed", embed), patch.object(Causal, "batch", batch):
        return trained(MODEL, parallel)


def test_a_signal_of_ones_own_is_sharded_and_sent(pool: Pool) -> None:
    (alone,) = pool.run(graded, 1, {})
    for layout in LAYOUTS.values():
        compare(alone, pool.run(graded, 2, layout))
    (plain,) = pool.run(trained, 1, MODEL, {})
    assert plain.numbers[0] != alone.numbers[0], "it changes the loss"


def test_a_signal_of_ones_own_is_mapped_and_pooled() -> None:
    ids = torch.arange(12).view(2, 6)
    tokens = Tokens.from_ids(ids, signals={GRADES: ids + 100, WEIGHTS: torch.ones(2)})
    windows = TokenWindows.split(6, ids.device, separate_first=True).window_tokens(tokens)
    assert windows.get(GRADES).tolist() == (windows.ids + 100).tolist() == [[100, 101, 103, 105], [106, 107, 109, 111]]
    assert windows.get(WEIGHTS).tolist() == [1.0, 1.0]
    moved = tokens.to(torch.device("meta"))
    assert moved.get(GRADES).is_meta
    assert moved.get(WEIGHTS).is_meta
    assert tokens.with_signals({GRADES: None}).get(GRADES) is None

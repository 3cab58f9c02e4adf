"""Context parallelism gives the numbers of one process: losses, gradients' norms, evaluations and final weights."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance.made import core, dims, numbered, qkv, ready, run, tokens
from tests.distributed import Pool, RankError, distributed
from tests.parallel.against_one import DOUBLE, Found, alone, compare, same, trained
from tests.train.test_layouts import one_rank
from tests.train.test_layouts import same as same_run
from tests.train.tiny import recipe
from xscale.core.errors import ConfigError
from xscale.nn.attention import CORES
from xscale.nn.mixer.attention import Attention
from xscale.parallel.context import STYLES
from xscale.parallel.context.sight import PieceSight, View
from xscale.parallel.context.spread import Spread, cut

DENSE: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "dropout": 0.1,
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 1, "bias": True, "qk_norm": {"kind": "rms"}},
            "ffn": {"kind": "gated", "hidden": 48},
            "dropout": 0.1,
        },
    },
}
MIXTURE: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "tied": False,
    "position": {"kind": "learned"},
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2},
            "ffn": {"kind": "gated", "hidden": 48},
            "placement": "sandwich",
            "dropout": 0.1,
        },
        "rules": [
            {
                "every": 2,
                "at": 1,
                "mixer": {
                    "kind": "attention",
                    "heads": 4,
                    "core": {"kind": "block_sparse", "block": 4, "pattern": {"kind": "bigbird"}},
                },
                "ffn": {
                    "kind": "moe",
                    "experts": 4,
                    "capacity_factor": 1.25,
                    "router": {"kind": "topk", "jitter": 0.05, "z": 0.01, "balance": 0.1},
                    "expert": {"kind": "dense", "hidden": 16, "bias": True},
                    "shared": {"kind": "gated", "hidden": 16},
                    "mix": "softmax",
                },
            }
        ],
    },
}
PAIR: dict[str, Any] = {
    "kind": "encoder_decoder",
    "width": 32,
    "position": {"kind": "alibi"},
    "encoder": {"depth": 1, "block": {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "dense"}}},
    "decoder": {
        "depth": 1,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2},
            "cross": {"kind": "attention", "heads": 4, "bias": True},
            "ffn": {"kind": "dense"},
            "placement": "post",
        },
    },
}


@pytest.fixture(scope="module")
def dense(pool: Pool) -> Found:
    """A dense decoder on one process."""
    return alone(pool, DENSE)


@pytest.fixture(scope="module")
def mixture(pool: Pool) -> Found:
    """A mixture of experts on one process."""
    return alone(pool, MIXTURE)


@pytest.fixture(scope="module")
def pair(pool: Pool) -> Found:
    """An encoder-decoder on one process."""
    return alone(pool, PAIR, objective={"kind": "span"})


def layout(style: str = "auto", **others: Any) -> dict[str, Any]:
    """Section `parallel`."""
    mesh = {"cp": 2, **others.pop("mesh", {})}
    return {"mesh": mesh, "context": {"style": style}, **others}


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, layout("ring", recompute={"every": 1})),
        (4, layout("ring", mesh={"cp": 4})),
        (4, layout("ring", mesh={"tp": 2}, tensor={"sequence": True})),
        (4, layout("ring", zero={"stage": 3})),
        (2, layout("ulysses", recompute={"every": 1})),
        (4, layout("ulysses", mesh={"cp": 4})),
        (4, layout("ulysses", zero={"stage": 0})),
        (4, layout("ulysses", zero={"stage": 3})),
        (4, layout("ulysses", mesh={"tp": 2}, tensor={"sequence": True})),
    ],
    ids=[
        "ring2",
        "ring4",
        "ring2-sp2",
        "ring2-dp2-zero3",
        "ulysses2",
        "ulysses4",
        "ulysses2-dp2-zero0",
        "ulysses2-dp2-zero3",
        "ulysses2-sp2",
    ],
)
def test_a_dense_decoder(ranks: int, parallel: dict[str, Any], dense: Found, pool: Pool) -> None:
    same(pool, dense, ranks, DENSE, parallel)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, layout("ulysses", mesh={"ep": 2})),
        (4, layout("ulysses", mesh={"ep": 2}, zero={"stage": 3})),
        (4, layout("ulysses", mesh={"tp": 2, "ep": 2})),
    ],
    ids=["ulysses2-ep2", "ulysses2-ep2-dp2-zero3", "ulysses2-tp2-ep2"],
)
def test_a_mixture_of_experts(ranks: int, parallel: dict[str, Any], mixture: Found, pool: Pool) -> None:
    same(pool, mixture, ranks, MIXTURE, parallel)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, layout("ulysses")), (2, layout("ring")), (4, layout("ring", mesh={"tp": 2}))],
    ids=["ulysses2", "ring2", "ring2-tp2"],
)
def test_an_encoder_decoder(ranks: int, parallel: dict[str, Any], pair: Found, pool: Pool) -> None:
    same(pool, pair, ranks, PAIR, parallel, objective={"kind": "span"})


def of_core(core: dict[str, Any]) -> dict[str, Any]:
    """A decoder with two key heads around a core."""
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2, "core": core}
    stack = {"depth": 2, "block": {"mixer": mixer, "ffn": {"kind": "gated", "hidden": 48}, "dropout": 0.1}}
    return {"kind": "decoder", "width": 32, "stack": stack}


@pytest.mark.parametrize(
    ("style", "core"),
    [
        ("scan", {"kind": "linear"}),
        ("halo", {"kind": "block_sparse", "block": 2, "pattern": {"kind": "window", "window": 5}}),
        ("halo", {"kind": "block_sparse", "block": 4, "pattern": {"kind": "bigbird"}}),
    ],
    ids=["scan", "halo-window", "halo-bigbird"],
)
def test_a_style_of_its_own(style: str, core: dict[str, Any], pool: Pool) -> None:
    model = of_core(core)
    one = alone(pool, model)
    same(pool, one, 2, model, layout(style))
    same(pool, one, 4, model, layout(style, mesh={"cp": 4}))
    same(pool, one, 4, model, layout(style, mesh={"tp": 2}, zero={"stage": 3}))


@pytest.mark.parametrize("name", ["ulysses.exchange", "ring.pass_on", "mixture", "noise"])
def test_the_comparison_fails_without_one_collective(name: str, mixture: Found, dense: Found, pool: Pool) -> None:
    """Negative control: what does not leave its rank, or noise drawn for the piece, must not pass for the same."""
    style = name.partition(".")[0] if "." in name else "ulysses"
    one, model = (dense, DENSE) if style == "ring" else (mixture, MIXTURE)
    with pytest.raises(RankError) as caught:
        pool.run(without, 2, name, one, model, layout(style))
    for text in caught.value.texts.values():
        assert "in compare" in text, text


class Stays:
    """In the place of what goes round: it does not."""

    def __init__(self, x: Tensor, group: object) -> None:
        self.x = x

    def wait(self) -> Tensor:
        return self.x


def without(name: str, one: Found, model: dict[str, Any], parallel: dict[str, Any]) -> None:
    """Train with one collective replaced, and compare."""
    steads: dict[str, tuple[str, Any]] = {
        "ulysses.exchange": ("ulysses.exchange", lambda rows, *_: rows),
        "ring.pass_on": ("ring.pass_on", Stays),
        "mixture": ("spread.gather_in", lambda x, length, group: x.repeat(1, group.size(), 1)),
        "noise": ("spread_drop", lambda drop: drop),
    }
    target, stead = steads[name]
    with patch(f"xscale.parallel.context.{target}", stead):
        found = trained(model, parallel)
    compare(one, [found])


@distributed(ranks=2)
def test_every_core_gives_its_numbers_in_every_style_it_declares() -> None:
    """Outputs and gradients of a piece are those of the whole, cut: for each core, style, direction and documents."""
    assert dist.group.WORLD is not None
    checked = 0
    for entry in CORES:
        for style in entry.traits.context:
            # The wrong order of the pieces would not show with one style of cutting only.
            spread = Spread(dist.group.WORLD, balanced=style in ("ring", "ulysses"))
            for causal in (True, False):
                able = entry.traits.causal if causal else entry.traits.bidirectional
                if not able or (style in ("scan", "halo") and not causal):
                    continue
                for packed in (False, True) if entry.traits.documents else (False,):
                    documents = numbered(70, 30, 200) if packed else None
                    same_core(entry, style, spread, causal, documents)
                    checked += 1
    assert checked >= 2 * len([entry for entry in CORES if entry.traits.context])


def same_core(entry: Any, style: Any, spread: Spread, causal: bool, documents: Tensor | None) -> None:
    """One case."""
    part = core(entry, causal=causal)
    whole = [x.detach().requires_grad_() for x in qkv(groups=2)]
    expected = run(part, *whole, query_documents=documents, key_documents=documents)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    slopes = torch.autograd.grad((expected * weights).sum(), whole)
    piece = cut(tokens(documents=documents), spread)
    sight = PieceSight(queries=150, keys=150, causal=causal, rows=piece, columns=piece, query_documents=piece.documents)
    attend = STYLES[style][1](part, spread)
    held = [_piece(x, spread).detach().requires_grad_() for x in whole]
    torch.manual_seed(0)
    o = attend(*held, sight)
    what = (entry.name, style, causal, documents is not None)
    assert torch.allclose(o, _piece(expected, spread), rtol=1e-9, atol=1e-11), what
    found = torch.autograd.grad((o * _piece(weights, spread)).sum(), held)
    for mine, theirs in zip(found, slopes, strict=True):
        assert torch.allclose(mine, _piece(theirs, spread), rtol=1e-8, atol=1e-10), what


def _piece(x: Tensor, spread: Spread) -> Tensor:
    """[B, H, T, K] -> [B, H, P, K]."""
    return spread.piece(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("changes", "parallel", "says"),
    [
        ({"mixer": {"kind": "attention", "heads": 3, "head_width": 8}}, layout("ulysses"), "heads cannot be dealt"),
        ({"mixer": {"kind": "attention", "heads": 4}}, layout("halo"), "the core allows ring, ulysses"),
        ({"mixer": {"kind": "attention", "heads": 4, "dropout": 0.1}}, layout(), "dropout of attention weights"),
        ({"ffn": {"kind": "moe", "expert_dropout": 0.1}}, layout(), "dropout inside experts"),
        ({"ffn": {"kind": "product_key_memory", "dropout": 0.1}}, layout(), "dropout of values read"),
    ],
)
def test_what_cannot_be_spread_is_refused(changes: dict[str, Any], parallel: dict[str, Any], says: str) -> None:
    block = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "dense"}, **changes}
    model = {"kind": "decoder", "width": 32, "stack": {"depth": 1, "block": block}}
    problems = recipe(Path("nowhere"), model=model, parallel=parallel).check(2)
    assert any(says in problem.what and problem.fix for problem in problems), problems


@distributed(ranks=2)
def test_a_core_that_mixes_documents_refuses_them_in_pieces_too() -> None:
    assert dist.group.WORLD is not None
    around = dims()
    attention = ready(Attention(Attention.Config(heads=4, core=CORES.get("delta").part.Config()), around))
    piece = cut(tokens(documents=numbered(100, 200)), Spread(dist.group.WORLD))
    with pytest.raises(ConfigError, match="see each other"):
        View(attention)(torch.zeros(2, 4, 150, 8), torch.zeros(2, 4, 150, 8), piece, piece)


def test_auto_finds_a_style_for_heads_that_cannot_be_dealt() -> None:
    block = {"mixer": {"kind": "attention", "heads": 3, "head_width": 8}, "ffn": {"kind": "dense"}}
    model = {"kind": "decoder", "width": 32, "stack": {"depth": 1, "block": block}}
    assert recipe(Path("nowhere"), model=model, parallel=layout()).check(2) == []


def test_the_trainer_evaluates_writes_and_saves_the_same(tmp_path: Path, pool: Pool) -> None:
    train = {"sample": {"prompts": ("def ",), "tokens": 5}}
    pool.run(one_rank, 1, tmp_path, "one", precision=DOUBLE, train=train)
    pool.run(one_rank, 2, tmp_path, "two", precision=DOUBLE, train=train, parallel=layout())
    same_run(tmp_path, "two", "one", 1e-9)
    assert written(tmp_path / "two") == written(tmp_path / "one") != []


def written(run: Path) -> list[str]:
    """The samples in a run's log."""
    return [line for line in (run / "log.txt").read_text(encoding="utf-8").splitlines() if "def " in line]

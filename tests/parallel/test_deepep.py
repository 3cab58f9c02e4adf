"""Experts over ranks by DeepEP give the outputs and gradients of one rank, by a stand-in with its functions and checks.

DeepEP's kernels need several GPUs. The stand-in has the signatures and results of its `Buffer` and sends messages over
gloo: a token once to each rank that has any of its experts, and a sum for each rank back.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import Pool, RankError
from tests.nn.moe.mixture import mixture
from tests.parallel.test_expert import EXPERTS, built, passed
from xscale.core.config import decode
from xscale.nn.ffn.moe.permutation import plan_dispatch
from xscale.nn.ffn.moe.router.router import ROUTERS
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.materialize import replace_parameters
from xscale.nn.module import substitute
from xscale.parallel import deepep
from xscale.parallel.config import ParallelConfig, PrecisionConfig
from xscale.parallel.expert import AllToAll
from xscale.planning.balanced_routing import BalancedAllToAll, balance_routing

TOKEN_ROUTERS = [name for name in ROUTERS.names() if ROUTERS.get(name).traits.choice == "token"]


class Buffer:
    """DeepEP's communication buffer: its high-throughput calls, without streams and events."""

    sent: list[int] = []
    """Tokens that each dispatch sent to all ranks."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group, self.ranks, self.rank = group, group.size(), group.rank()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        assert num_ranks in deepep.RANKS
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden_bytes, ranks: hidden_bytes * ranks,
            get_rdma_buffer_size_hint=lambda hidden_bytes, ranks: 0,
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        share = num_experts // self.ranks
        is_in = torch.stack(
            [((topk_idx >= share * r) & (topk_idx < share * (r + 1))).any(1) for r in range(self.ranks)], 1
        )
        per_expert = torch.stack([(topk_idx == e).sum() for e in range(num_experts)]).int()
        return is_in.sum(0).int(), None, per_expert, is_in, None

    def dispatch(
        self, x: Tensor, handle: Any = None, num_tokens_per_rank: Any = None, num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None, num_tokens_per_expert: Any = None, topk_idx: Any = None,
        topk_weights: Any = None, expert_alignment: int = 1, config: Any = None, previous_event: Any = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        assert x.is_contiguous()
        everything: list[Any] = [None] * self.ranks
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            dist.all_gather_object(everything, x, self.group)
            return torch.stack([everything[r][n] for r, n in handle["sources"]]), None, None, None, None, None
        assert topk_weights.dtype == torch.float32
        assert topk_weights.shape == topk_idx.shape == (len(x), topk_idx.shape[1])
        self.sent.append(int(num_tokens_per_rank.sum()))
        dist.all_gather_object(everything, (x, topk_idx, topk_weights, is_token_in_rank), self.group)
        share = len(num_tokens_per_expert) // self.ranks
        sources, rows, experts, weights = [], [], [], []
        for r, (tokens, chosen, factors, is_in) in enumerate(everything):
            assert chosen.shape[1] == topk_idx.shape[1]
            for n in range(len(tokens)):
                if is_in[n, self.rank]:
                    local = chosen[n] - share * self.rank
                    local = torch.where((local >= 0) & (local < share), local, -1)
                    sources.append((r, n))
                    rows.append(tokens[n])
                    experts.append(local)
                    weights.append(torch.where(local >= 0, factors[n], 0.0))
        experts_of = torch.stack(experts)
        counts = [int((experts_of == e).sum()) for e in range(share)]
        handle = {"sources": sources, "tokens": len(x)}
        return torch.stack(rows), experts_of, torch.stack(weights), counts, handle, None

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Any = None, config: Any = None, previous_event: Any = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        assert x.is_contiguous()
        everything: list[Any] = [None] * self.ranks
        dist.all_gather_object(everything, (x, topk_weights, handle["sources"]), self.group)
        out = x.new_zeros(handle["tokens"], x.shape[1])
        weights = None if topk_weights is None else topk_weights.new_zeros(handle["tokens"], topk_weights.shape[1])
        for rows, factors, sources in everything:
            for p, (r, n) in enumerate(sources):
                if r == self.rank:
                    out[n] += rows[p]
                    if weights is not None:
                        weights[n] += factors[p]
        return out, weights, None


def every_router(ranks: int, kinds: list[str], wrong: bool = False) -> None:
    """On each rank: its experts alone, tokens from all ranks, against the whole layer on its own tokens."""
    rank, share = dist.get_rank(), EXPERTS // ranks
    sys.modules["deep_ep"] = ModuleType("deep_ep")
    sys.modules["deep_ep"].Buffer = Buffer  # type: ignore[attr-defined]
    for kind in kinds:
        for capacity in (None, 1.0):
            whole, cut = built(kind, capacity), built(kind, capacity)
            first = (share * rank + (1 if wrong else 0)) % (EXPERTS - share + 1)
            replace_parameters(
                cut.experts, lambda _, old, at=first: torch.nn.Parameter(old.detach()[at : at + share].clone())
            )
            deepep.apply(cut, dist.group.WORLD)
            Buffer.sent.clear()
            wanted, got = passed(whole, rank, 9 + 2 * rank), passed(cut, rank, 9 + 2 * rank)
            for name, value in got.items():
                expected = wanted[name]
                if name.startswith("experts."):
                    dist.all_reduce(expected)
                    expected = expected[share * rank : share * (rank + 1)]
                # Weights travel in float32, which rounds a number by 6e-8 of its size.
                difference = float((value - expected).norm() / expected.norm().clamp(min=1.0))
                assert difference < 1e-6, f"{kind} {capacity} {name}: {difference}"
            assert wanted.keys() == got.keys()
            # Two sequences; a token goes to each rank at most once, however many experts it has there.
            assert Buffer.sent[0] <= 2 * (9 + 2 * rank) * ranks
    del sys.modules["deep_ep"]


def test_every_router_that_chooses_for_tokens(pool: Pool) -> None:
    pool.run(every_router, 2, 2, TOKEN_ROUTERS)


def test_another_ranks_experts_are_seen(pool: Pool) -> None:
    """Negative control."""
    with pytest.raises(RankError):
        pool.run(every_router, 2, 2, ["topk"], wrong=True)


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_choices_of_tokens_are_those_of_the_rows(capacity: int | None, fixed_shapes: bool) -> None:
    experts = torch.tensor([[3, 0], [3, 1], [3, 0], [0, 3]])
    weights = torch.arange(1.0, 9.0).view(4, 2)
    routing = Routing.from_topk(experts, weights, torch.rand(4, 4))
    plan = plan_dispatch(routing, 4, capacity, "position", fixed_shapes=fixed_shapes)
    chosen, factors = deepep.expert_choices(plan, 4, 2)
    for n in range(4):
        pairs = {(int(e), float(w)) for e, w in zip(chosen[n], factors[n], strict=True) if e >= 0}
        kept = 4 if capacity is None else 2
        # The earliest two tokens of an expert are kept.
        rank_of = {e: [t for t in range(4) if e in experts[t]].index(n) for e in experts[n].tolist()}
        expected = {(e, float(w)) for e, w in zip(experts[n].tolist(), weights[n], strict=True) if rank_of[e] < kept}
        assert pairs == expected


def problems_of(moe: Any, parallel: dict[str, Any], precision: dict[str, Any] | None = None) -> str:
    config = decode(ParallelConfig, {"mesh": {"ep": 2}, "expert": {"dispatch": "deepep"}, **parallel})
    settings = decode(PrecisionConfig, {"compute": "bfloat16"} if precision is None else precision)
    return "\n".join(map(str, deepep.check(moe, config, settings, "parallel")))


def test_what_it_cannot_do_is_refused() -> None:
    moe = mixture(width=16)
    assert problems_of(moe, {}) == ""
    assert problems_of(mixture(), {"expert": {}}, {}) == ""
    text = problems_of(moe, {"mesh": {"ep": 3}}, {"compute": "float32"})
    assert "parallel.expert.dispatch: DeepEP has no settings for ep=3" in text
    assert "DeepEP sends bfloat16, and compute is float32" in text
    assert "multiple of 8 channels, and the width is 12" in problems_of(mixture(), {})
    assert "expert_dropout draws by keys" in problems_of(mixture(width=16, expert_dropout=0.1), {})
    by_experts = mixture(width=16, router={"kind": "expert_choice"})
    assert "the same number of experts for each token, and 'expert_choice' does not" in problems_of(by_experts, {})
    over_tp = {"mesh": {"ep": 2, "tp": 2, "tp_in_experts": False}}
    assert "the tp=2 ranks have the same tokens and split the rows of experts" in problems_of(moe, over_tp)


def test_devices_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = decode(ParallelConfig, {"expert": {"dispatch": "deepep"}})
    cpu, gpu, capability = torch.device("cpu"), torch.device("cuda"), [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    assert deepep.unsupported_device(ParallelConfig(), cpu) is None
    assert "the device is a cpu" in str(deepep.unsupported_device(config, cpu))
    monkeypatch.setattr(deepep.importlib.util, "find_spec", lambda name: None)
    assert "is not installed. Take all_to_all. Or build deep_ep" in str(deepep.unsupported_device(config, gpu))
    monkeypatch.setattr(deepep.importlib.util, "find_spec", lambda name: name)
    assert deepep.unsupported_device(config, gpu) is None
    capability[0] = (8, 0)
    assert "capability 9.0" in str(deepep.unsupported_device(config, gpu))


def test_a_simulated_step_takes_the_all_to_all() -> None:
    """DeepEP's kernels take no tensors without numbers."""
    moe, group = mixture(width=16), SimpleNamespace(size=lambda: 2)
    by_rows = moe.apply_experts
    substitute(moe, "dispatch", AllToAll(group))  # type: ignore[arg-type]
    deepep.apply(moe, group)  # type: ignore[arg-type]
    assert isinstance(moe.apply_experts, deepep.ExpertsByDeepEp)
    balance_routing(moe)
    assert moe.apply_experts == by_rows
    assert isinstance(moe.dispatch, BalancedAllToAll)

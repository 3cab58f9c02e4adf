"""The mixture: its output written out literally, its gradients, its edges, and the seam of expert parallelism."""

import pytest
import torch
from torch import Tensor

from tests.nn.moe import literal
from tests.nn.moe.mixture import LENGTH, D, V, config_of, dims, mixture, sample
from xscale.core.errors import ConfigError
from xscale.core.key_words.renamed import RenamedWarning
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS, Dense, Gated
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.ffn.moe.permutation import ExpertsCall
from xscale.nn.ffn.moe.router.router import ROUTERS
from xscale.nn.materialize import materialize
from xscale.nn.module import parameter_axes
from xscale.nn.tokens import Stats, Tokens
from xscale_kernels.grouped_gemm import gate_up


def single(moe: Moe, expert: int) -> torch.nn.Module:
    """The expert as the ffn it is a stack of."""
    part = FFNS.build(moe.config.expert, dims())
    materialize(part, 0, dtype=torch.float64)
    for name, weight in moe.experts.named_parameters():
        kind, bias = name.removesuffix("_bias"), name.endswith("_bias")
        setattr(getattr(part, kind), "bias" if bias else "weight", torch.nn.Parameter(weight[expert].clone()))
    return lambda x: part(x[None, None], None)[0, 0]  # type: ignore[return-value]


def singles(moe: Moe) -> list[torch.nn.Module]:
    return [single(moe, expert) for expert in range(moe.config.experts)]


@pytest.mark.parametrize("expert", [{"kind": "dense", "hidden": 8, "bias": True}, {"kind": "gated", "hidden": 8}])
def test_output_is_the_weighted_sum_of_the_experts(expert: dict[str, object]) -> None:
    x, tokens = sample()
    moe = mixture(expert=expert)
    for parameter in moe.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    wanted = literal.mix(x.flatten(0, 1), literal.mixtral(x.flatten(0, 1), moe.router.weight, 2), singles(moe))
    torch.testing.assert_close(moe(x, tokens).flatten(0, 1), wanted)


def test_gate_and_up_as_one_product_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, taken where the rows outweigh the copied weights."""
    x, tokens = sample()
    moe = mixture(expert={"kind": "gated", "hidden": 8})
    wanted = moe(x, tokens)
    gradients = torch.autograd.grad(wanted.sum(), list(moe.experts.parameters()))
    monkeypatch.setattr(gate_up, "saves_traffic", lambda x, gate: True)
    moe.experts.kernel_choices = {"grouped_gemm": "cpu"}
    before = gate_up.gate_up_hidden
    calls: list[Tensor] = []
    monkeypatch.setattr(
        gate_up, "gate_up_hidden", lambda *given, **names: calls.append(before(*given, **names)) or calls[-1]
    )
    got = moe(x, tokens)
    torch.testing.assert_close(got, wanted)
    assert len(calls) == 1
    for ours, expected in zip(torch.autograd.grad(got.sum(), list(moe.experts.parameters())), gradients, strict=True):
        torch.testing.assert_close(ours, expected)


def test_gshard_layer_with_groups_and_capacity() -> None:
    """Lepikhin et al. 2020, algorithm 1, the whole of it: drops, lots, groups, output."""
    x, tokens = sample(rng_seed=1)
    moe = mixture(router={"kind": "gshard"}, capacity_factor=1.0, capacity_groups=3, drop_policy="choice")
    torch.manual_seed(5)
    got = moe(x, tokens).flatten(0, 1)
    torch.manual_seed(5)
    drawn = torch.rand(48, dtype=torch.float64).tolist()
    sent, _ = literal.gshard(x.flatten(0, 1), moe.router.weight, 3, 8, drawn)
    free, _ = literal.gshard(x.flatten(0, 1), moe.router.weight, 3, 99, drawn)
    assert len(sent) < len(free), "nothing was dropped, so nothing was tested"
    torch.testing.assert_close(got, literal.mix(x.flatten(0, 1), sent, singles(moe)))


@pytest.mark.parametrize("kind", ROUTERS.names())
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_gradients(kind: str, capacity: float | None) -> None:
    """Gradients in float64, of the output and the auxiliary loss, for the input and every weight."""
    x, tokens = sample(rows=1, length=6, rng_seed=1)
    top = {"top_k": 2} if kind == "noisy_topk" else {}
    router = {"kind": kind, **top, **({"jitter": 0.0} if kind == "switch" else {})}
    moe = mixture(
        router=router, capacity_factor=capacity, shared={"kind": "dense", "hidden": 3}, shared_combine="softmax"
    )
    for parameter in moe.router.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    names = [name for name, parameter in moe.named_parameters() if parameter.requires_grad]
    weights = [parameter.detach().requires_grad_() for parameter in moe.parameters() if parameter.requires_grad]

    def run(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        given = dict(zip(names, weights, strict=True))
        y = torch.func.functional_call(moe, given, (x, tokens.with_forward(aux_loss_weight=None)))
        torch.manual_seed(0)
        inside = {name.removeprefix("router."): one for name, one in given.items() if name.startswith("router.")}
        loss = torch.func.functional_call(moe.router, inside, (x.flatten(0, 1), tokens)).loss
        # The loads in the loss are float32, as steps of them have no gradient; its probabilities are float64.
        return (y,) if loss is None or not loss.requires_grad else (y, loss)

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *weights), fast_mode=True)


def test_auxiliary_loss_reaches_the_router_with_its_weight() -> None:
    def gradient(auxiliary: float | None) -> Tensor:
        x, tokens = sample(aux_loss_weight=auxiliary)
        moe = mixture(router={"kind": "switch", "aux_loss_weight": 1.0})
        (moe(x, tokens) * 0).sum().backward()
        return moe.router.weight.grad

    one = gradient(1.0)
    assert one.abs().max() > 0
    torch.testing.assert_close(gradient(0.25), one / 4)
    assert gradient(None).abs().max() == 0


def test_dropped_tokens_give_zero_and_are_counted() -> None:
    x, _ = sample()
    x[:] = x[0, 0]
    tally = Stats()
    tokens = Tokens.from_ids(torch.zeros(2, LENGTH, dtype=torch.int64), stats=tally)
    moe = mixture(router="switch", capacity_factor=1.0)
    y = moe(x, tokens).flatten(0, 1)
    assert (y[:12] != 0).any(1).all()
    assert (y[12:] == 0).all()
    seen = {name.removeprefix("/"): value for name, value in tally.means().items()}
    assert float(seen["dropped"]) == pytest.approx(0.75)
    assert sorted(seen["load"].tolist()) == [0, 0, 0, 1]
    assert {"load", "rows", "dropped", "entropy", "confidence", "aux"} == set(seen)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("experts", [1, 4])
def test_one_token_a_row(rows: int, capacity: float | None, experts: int) -> None:
    x, tokens = sample(rows=rows, length=1)
    moe = mixture(experts=experts, router="switch", capacity_factor=capacity)
    y = moe(x.requires_grad_(), tokens)
    y.sum().backward()
    assert y.shape == x.shape
    assert all(p.grad is not None and p.grad.isfinite().all() for p in moe.parameters())


def test_empty_experts_get_zero_gradients() -> None:
    x, tokens = sample()
    moe = mixture(router={"kind": "round_robin", "active_experts": 2})
    moe(x, tokens).sum().backward()
    assert (moe.experts.up.grad[2:] == 0).all()
    assert (moe.experts.up.grad[:2] != 0).any()


def test_evaluation_has_its_own_capacity_and_generation_none() -> None:
    x, tokens = sample()
    moe = mixture(capacity_factor=0.5, eval_capacity_factor=float("inf"))
    free = mixture()
    dropped = moe(x, tokens)
    assert not torch.equal(dropped, free(x, tokens))
    assert torch.equal(moe.eval()(x, tokens), free(x, tokens))
    moe = mixture(capacity_factor=0.5).eval()
    assert torch.equal(moe(x, tokens), free(x, tokens))
    moe = mixture(capacity_factor=1.0, eval_capacity_factor=0.5).eval()
    assert not torch.equal(moe(x, tokens), free(x, tokens))
    assert torch.equal(moe(x, tokens.with_forward(cache={})), free(x, tokens))


@pytest.mark.parametrize("hidden", [8, 64])
def test_permutation_of_the_batch_permutes_the_output_bitwise(hidden: int) -> None:
    x, tokens = sample(rows=4)
    expert = {"kind": "gated", "hidden": hidden}
    moe = mixture(router={"kind": "topk", "top_k": 3}, expert=expert, dtype=torch.float32)
    x = x.float()
    order = torch.randperm(4 * LENGTH, generator=torch.Generator().manual_seed(2))
    moved = x.flatten(0, 1)[order].view_as(x)
    assert torch.equal(moe(moved, tokens).flatten(0, 1), moe(x, tokens).flatten(0, 1)[order])


def test_experts_start_apart_and_each_from_its_own_stream() -> None:
    few, many = mixture(experts=4), mixture(experts=8)
    assert torch.equal(few.experts.up, many.experts.up[:4])
    assert not torch.equal(few.experts.up[0], few.experts.up[1])
    drawn = [few.experts.init[name] for name in few.experts.axes]
    assert all(init.slices for init in drawn if init.kind == "normal"), "whoever holds an expert draws that one alone"


def test_axes() -> None:
    axes = parameter_axes(mixture(shared={"kind": "gated", "hidden": 4}))
    assert axes["experts.up"] == axes["experts.gate"] == ("experts", "ffn", "width")
    assert axes["experts.down"] == ("experts", "width", "ffn")
    assert axes["router.weight"] == ("state", "width"), "the router is whole wherever the experts are"


class Spread:
    """Experts cut in two halves that see the rows of two micro-batches: what an all-to-all does, in one process."""

    def __init__(self, halves: list[ExpertsCall]) -> None:
        self.halves = halves

    def __call__(self, rows: Tensor, counts: Tensor, experts: ExpertsCall, keys: Tensor | None = None) -> Tensor:
        first = int(counts[: len(counts) // 2].sum())
        pieces = rows[:first], rows[first:]
        return torch.cat([half(p, c, None) for half, p, c in zip(self.halves, pieces, counts.chunk(2), strict=True)])


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_seam_holds_with_experts_elsewhere(capacity: float | None) -> None:
    x, tokens = sample()
    moe, cut = mixture(capacity_factor=capacity), mixture(capacity_factor=capacity)
    halves = [mixture().experts for _ in range(2)]
    for index, half in enumerate(halves):
        for name, weight in moe.experts.named_parameters():
            setattr(half, name, torch.nn.Parameter(weight.detach().chunk(2)[index].clone()))
    cut.dispatch = Spread(halves)
    assert torch.equal(cut(x, tokens), moe(x, tokens))
    moe(x, tokens).square().sum().backward()
    cut(x, tokens).square().sum().backward()
    assert torch.equal(torch.cat([half.down.grad for half in halves]), moe.experts.down.grad)


def test_shared_experts_and_their_mixes() -> None:
    x, tokens = sample()
    shared = {"kind": "gated", "hidden": 5}
    plain, both = mixture(), mixture(shared=shared)
    beside = both.shared(x, tokens)
    torch.testing.assert_close(both(x, tokens), plain(x, tokens) + beside)
    gate = mixture(shared=shared, shared_combine="gate")
    torch.testing.assert_close(gate(x, tokens), plain(x, tokens) + (x @ gate.mix.weight.t()).sigmoid() * beside)
    residual = mixture(shared=shared, shared_combine="softmax")
    one, two = (x @ residual.mix.weight.t()).softmax(-1).split(1, dim=-1)
    torch.testing.assert_close(residual(x, tokens), one * plain(x, tokens) + two * beside)


def test_expert_dropout_only_where_noise_is_wanted() -> None:
    x, tokens = sample(rng_seed=1)
    moe, plain = mixture(expert_dropout=0.4), mixture()
    assert not torch.equal(moe(x, tokens), plain(x, tokens))
    assert torch.equal(moe(x, tokens.with_forward(rng_seed=None)), plain(x, tokens))
    assert torch.equal(moe.eval()(x, tokens), plain(x, tokens))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gates_that_are_zero_or_not_finite_show(score: str) -> None:
    """The loss is not finite, so that the loop skips the step, and the layer can be named."""
    from xscale.nn.ffn.moe.statistics import nonfinite

    x, tokens = sample(stats=Stats())
    moe = mixture(router={"kind": "topk", "score": score})
    moe.path = "stack.blocks.1.ffn.part"
    for bad in (float("nan"), float("inf")):
        assert not moe(torch.full_like(x, bad), tokens).isfinite().any()
    assert nonfinite(tokens.forward.stats.means()) == ["stack.blocks.1.ffn.part"]
    if score == "sigmoid":
        with torch.no_grad():
            moe.router.weight.fill_(-1e5)
        assert moe(x.abs() + 1, tokens).isnan().all(), "all gates are zero"


def test_router_works_in_float32_below_bfloat16_rows() -> None:
    x, tokens = sample()
    moe = mixture(dtype=torch.bfloat16)
    moe.router = mixture(dtype=torch.float32).router
    assert moe(x.bfloat16(), tokens).dtype == torch.bfloat16
    assert moe.router(x.bfloat16().flatten(0, 1), tokens).weight.dtype == torch.float32


def test_active_share() -> None:
    assert mixture(experts=8).active_fraction() == 0.25
    assert mixture(experts=8, router={"kind": "expert_choice", "capacity_factor": 1.5}).active_fraction() == 1.5 / 8


def problems(causal: bool = False, **data: object) -> str:
    shape = Dims(width=D, depth=2, vocabulary=V, length=LENGTH, causal=causal)
    found = Moe.check(config_of("moe", **data), shape, "ffn")  # type: ignore[arg-type]
    assert all(problem.advice for problem in found), "a problem without what would work"
    return "\n".join(str(problem) for problem in found)


def test_what_is_refused() -> None:
    assert problems(causal=True) == ""
    assert "ffn.router.top_k" in problems(experts=2, router={"kind": "topk", "top_k": 3})
    assert "drops more than half" in problems(capacity_factor=0.4)
    assert "2, 3, 4 or 6" in problems(capacity_groups=5)
    assert "dense or gated" in problems(expert="moe")
    assert "ffn.shared_combine" in problems(shared_combine="gate")
    assert "ffn.eval_capacity_factor" in problems(eval_capacity_factor=1.0)
    with pytest.raises(ConfigError, match="capacity_factor: must be a finite number, got nan"):
        problems(capacity_factor=float("nan"))
    with pytest.raises(ConfigError, match=r"expert_dropout: must be in \[0, 1\), got 1\.0"):
        config_of("moe", expert_dropout=1.0)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("topk", "top_k", 0),
        ("topk", "z_loss_weight", -1.0),
        ("topk", "bias_update_rate", -0.1),
        ("group_limited", "topk_groups", 0),
        ("sinkhorn", "iterations", 0),
        ("switch", "jitter", 1.0),
        ("expert_choice", "capacity_factor", 0.0),
    ],
)
def test_values_out_of_bounds_are_refused(kind: str, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"router.{key}: must be"):
        config_of("moe", router={"kind": kind, key: value})


BALANCE = {"balance": 0.1, "z": 0.2, "scope": "sequence"}
NEW_BALANCE = {"aux_loss_weight": 0.1, "z_loss_weight": 0.2, "balance_over": "sequence"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"kind": "topk", **BALANCE, "bias_rate": 0.3}, {"kind": "topk", **NEW_BALANCE, "bias_update_rate": 0.3}),
        ({"kind": "switch", **BALANCE}, {"kind": "switch", **NEW_BALANCE}),
        ({"kind": "prototype", **BALANCE}, {"kind": "prototype", **NEW_BALANCE}),
        ({"kind": "sinkhorn", "z": 0.1}, {"kind": "sinkhorn", "z_loss_weight": 0.1}),
        (
            {"kind": "group_limited", **BALANCE, "limit": 3, "bias_rate": 0.1},
            {"kind": "group_limited", **NEW_BALANCE, "topk_groups": 3, "bias_update_rate": 0.1},
        ),
        (
            {"kind": "gshard", **BALANCE, "second": "all"},
            {"kind": "gshard", **NEW_BALANCE, "second_expert_policy": "all"},
        ),
        (
            {"kind": "expert_choice", "capacity": 1.5, "over": "sequence"},
            {"kind": "expert_choice", "capacity_factor": 1.5, "input_batch": "sequence"},
        ),
        (
            {"kind": "noisy_topk", "importance": 0.2, "load": 0.3},
            {"kind": "noisy_topk", "importance_loss_weight": 0.2, "load_loss_weight": 0.3},
        ),
        ({"kind": "forced", **BALANCE, "used": 2}, {"kind": "round_robin", **NEW_BALANCE, "active_experts": 2}),
        ({"kind": "base", "z": 0.1}, {"kind": "base_layer", "z_loss_weight": 0.1}),
    ],
    ids=lambda router: router["kind"],
)
def test_old_router_keys_are_read(old: dict[str, object], new: dict[str, object]) -> None:
    with pytest.warns(RenamedWarning):
        assert config_of("moe", router=old) == config_of("moe", router=new)


def test_old_keys_are_read() -> None:
    old = {"drop": "choice", "groups": 2, "allow_leak": True, "shared": "dense", "mix": "gate"}
    with pytest.warns(RenamedWarning):
        config = config_of("moe", **old)
    assert config == config_of(
        "moe",
        drop_policy="choice",
        capacity_groups=2,
        allow_noncausal_routing=True,
        shared="dense",
        shared_combine="gate",
    )


@pytest.mark.parametrize("kind", ROUTERS.names())
def test_leaks_are_refused_unless_allowed(kind: str) -> None:
    refused = problems(causal=True, router=kind)
    assert ("ffn.router" in refused) != ROUTERS.get(kind).traits.causal
    assert problems(causal=True, router=kind, allow_noncausal_routing=True) == ""
    assert problems(causal=False, router=kind) == ""


def test_drop_policies_that_look_ahead_are_refused() -> None:
    assert "ffn.drop_policy" in problems(causal=True, capacity_factor=1.0, drop_policy="choice")
    assert "ffn.drop_policy" in problems(causal=True, capacity_factor=1.0, router="switch", drop_policy="probability")
    assert problems(causal=True, capacity_factor=1.0, router="switch", drop_policy="choice") == ""
    assert problems(causal=True, capacity_factor=1.0, drop_policy="priority", allow_noncausal_routing=True) == ""


def test_configs_of_experts() -> None:
    assert isinstance(config_of("moe").expert, Gated.Config)
    assert isinstance(config_of("moe", expert="dense").expert, Dense.Config)


def test_a_router_given_the_config_of_another_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router\.top_k: unknown key"):
        config_of("moe", router={"kind": "switch", "top_k": 2})
    with pytest.raises(ConfigError, match="Did you mean 'sinkhorn'"):
        config_of("moe", router="sinkhron")


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_compiled_equals_eager(capacity: float | None) -> None:
    """Without a capacity it is one graph; what a capacity keeps is known only when it runs."""
    x, tokens = sample()
    moe = mixture(capacity_factor=capacity)
    wanted = moe(x, tokens)
    torch._dynamo.reset()
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=capacity is None)
    assert torch.equal(compiled(x, tokens), wanted)

"""Block-sparse attention against the dense softmax under the layout's mask, in float64, forward and gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import dims, drawn, ready, tokens
from xscale.bench.harness.timing import peak_bytes
from xscale.core.errors import ConfigError
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import CORES
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.forward import Forward
from xscale.nn.mixer.attention import Attention
from xscale.nn.pattern.bigbird import BigBirdPattern
from xscale.nn.pattern.fixed import Fixed
from xscale.nn.pattern.grid import Grid
from xscale.nn.pattern.pattern import PATTERNS, Pattern
from xscale.nn.pattern.window import Band, Window
from xscale.nn.position.position import POSITIONS
from xscale.nn.tokens import Tokens

BLOCK = 8


def core_of(pattern: Any, heads: int = 4, causal: bool = True, **config: Any) -> BlockSparse:
    dims = Dims(width=32, depth=2, vocabulary=11, length=128, causal=causal, layer=1)
    core: BlockSparse = CORES.build(BlockSparse.Config(pattern=pattern, block=BLOCK, **config), dims, heads, 8)
    return core


def inputs(queries: int, keys: int, heads: int = 4, groups: int = 2, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, queries, 8), (batch, groups, keys, 8), (batch, groups, keys, 8)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    return q, k, v


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, mask: AttentionMask, cap: float | None = None) -> Tensor:
    """The definition, with the whole score matrix; `seen` [H, T, S]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if mask.bias is not None:
        scores = scores + mask.bias
    seen = seen[None] if mask.allowed is None else seen[None] & mask.allowed
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1).nan_to_num(0.0)
    return weights @ v


def seen_of(core: BlockSparse, length: int, heads: int = 4) -> Tensor:
    """[H, S, S] by token."""
    grid = Grid(-(-length // BLOCK), heads, core.causal, BLOCK, layer=1)
    token = torch.arange(length)
    seen = torch.zeros(heads, length, length, dtype=torch.bool)
    for layout, rule in core.pattern.masked_layouts(grid):
        blocks = torch.from_numpy(layout.copy()).repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        blocks = blocks[:, :length, :length]
        seen |= blocks if rule is None else blocks & rule(token[:, None], token[None])
    return seen


def agree(
    core: BlockSparse,
    mask: AttentionMask,
    groups: int = 2,
    others: tuple[Tensor, ...] = (),
    literal: AttentionMask | None = None,
) -> None:
    """Compare with the definition; `literal` is the mask with its bias by pair."""
    q, k, v = inputs(mask.queries, mask.keys, groups=groups)
    seen = seen_of(core, mask.keys)[:, mask.offset : mask.offset + mask.queries]
    out = core(q, k, v, mask)
    wanted = dense(q, k, v, seen, literal or mask, core.config.soft_cap)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    above = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    found = torch.autograd.grad(out, (q, k, v, *others), above)
    for one, two in zip(found, torch.autograd.grad(wanted, (q, k, v, *others), above), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10)


def patterns(causal: bool) -> list[Any]:
    able = PATTERNS.able(**{"causal" if causal else "bidirectional": True})
    return [pytest.param(PATTERNS.get(name).part.Config(), id=name) for name in able]


@pytest.mark.parametrize("length", [64, 77, 5])
@pytest.mark.parametrize("pattern", patterns(True))
def test_causal_equals_dense(pattern: Pattern.Config, length: int) -> None:
    agree(core_of(pattern), AttentionMask(length, length, causal=True))


@pytest.mark.parametrize("length", [64, 77, 5])
@pytest.mark.parametrize("pattern", patterns(False))
def test_bidirectional_equals_dense(pattern: Pattern.Config, length: int) -> None:
    agree(core_of(pattern, causal=False), AttentionMask(length, length, causal=False))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("pattern", [BigBirdPattern.Config(random_blocks=2), Fixed.Config(heads="split")])
def test_heads_of_their_own(pattern: Pattern.Config, groups: int) -> None:
    agree(core_of(pattern), AttentionMask(77, 77, causal=True), groups=groups)


@pytest.mark.parametrize("causal", [True, False])
def test_documents(causal: bool) -> None:
    documents = torch.arange(77)[None].expand(2, -1) // torch.tensor([[13], [30]])
    mask = AttentionMask(77, 77, causal, query_documents=documents, key_documents=documents)
    agree(core_of(BigBirdPattern.Config(), causal=causal), mask)


@pytest.mark.parametrize("numbers", [(5, 6), (-7, 7), (0, 2**40), (2**40, 2**40 + 1), (-(2**62), 2**62)])
def test_documents_may_have_any_numbers(numbers: tuple[int, int]) -> None:
    documents = torch.tensor(numbers)[(torch.arange(77)[None].expand(2, -1) // 20) % 2]
    for causal in (True, False):
        mask = AttentionMask(77, 77, causal, query_documents=documents, key_documents=documents)
        agree(core_of(BigBirdPattern.Config(), causal=causal), mask)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 4)])
def test_bias_and_its_gradient(shape: tuple[int, int]) -> None:
    bias = torch.randn(*shape, 77, 77, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    bias.requires_grad_()
    for cap in (None, 1.5):
        agree(core_of(BigBirdPattern.Config(), soft_cap=cap), AttentionMask(77, 77, True, bias=bias), others=(bias,))


@pytest.mark.parametrize(("kind", "way"), [("alibi", "gather"), ("alibi", "kernel"), ("relative", "gather")])
def test_positions_add_to_scores_without_a_number_for_each(kind: str, way: str) -> None:
    """A mixer whose blocks cover all gives what softmax gives, at once and one token at a time; gradients too."""
    config: dict[str, Any] = {"heads": 4, "kv_heads": 2}
    about = dims(position=POSITIONS.get(kind).part.Config())
    core = BlockSparse.Config(pattern=Window.Config(window=99), block=8, implementation=way)
    sparse = ready(Attention(Attention.Config(core=core, **config), about))
    whole = ready(Attention(Attention.Config(**config), about))
    x, around = drawn(2, 50, 32), tokens(50)
    found, wanted = sparse(x, around), whole(x, around)
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(y.sum(), list(m.parameters())) for y, m in ((found, sparse), (wanted, whole))]
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two)
    cache: dict[str, Any] = {}
    for first, end in ((0, 19), (19, 20), (20, 21), (21, 50)):
        some = Tokens(around.ids[:, first:end], around.positions[:, first:end], forward=Forward(cache=cache))
        torch.testing.assert_close(sparse(x[:, first:end], some), wanted[:, first:end])


@pytest.mark.parametrize("kind", ["alibi", "relative"])
def test_a_bias_costs_no_number_for_each_score(kind: str) -> None:
    about = dims(position=POSITIONS.get(kind).part.Config(), length=4096)
    core = BlockSparse.Config(pattern=Window.Config(window=3), block=64)
    part = ready(Attention(Attention.Config(heads=4, core=core), about)).float()
    x, around = torch.randn(1, 4096, 32), tokens(4096, batch=1)
    # One head's numbers for all scores would take 64 MiB.
    assert peak_bytes(lambda: part(x, around).sum().backward(), "cpu") < 16 * 2**20


def test_soft_cap() -> None:
    agree(core_of(Fixed.Config(), soft_cap=0.7), AttentionMask(77, 77, True))


@pytest.mark.parametrize("queries", [1, 5, 8, 21])
@pytest.mark.parametrize("pattern", patterns(True))
def test_later_queries_over_a_cache(pattern: Pattern.Config, queries: int) -> None:
    agree(core_of(pattern), AttentionMask(queries, 77, causal=True, offset=77 - queries))


@pytest.mark.parametrize("pattern", patterns(True))
def test_one_query_at_a_time_equals_all_at_once(pattern: Pattern.Config) -> None:
    core = core_of(pattern)
    q, k, v = inputs(77, 77)
    whole = core(q, k, v, AttentionMask(77, 77, causal=True))
    for end in range(1, 78):
        one = core(q[:, :, end - 1 : end], k[:, :, :end], v[:, :, :end], AttentionMask(1, end, True, offset=end - 1))
        torch.testing.assert_close(one, whole[:, :, end - 1 : end], rtol=1e-10, atol=1e-10)


def test_a_query_that_sees_nothing_gets_zero_and_no_gradient() -> None:
    core = core_of(Fixed.Config(), causal=False)
    q, k, v = inputs(16, 16)
    alone = torch.full((2, 16), 7)
    alone[:, 3] = 9
    out = core(q, k, v, AttentionMask(16, 16, False, query_documents=alone, key_documents=torch.full((2, 16), 7)))
    assert (out[:, :, 3] == 0).all()
    gradient = torch.autograd.grad(out.sum(), q)[0]
    assert (gradient[:, :, 3] == 0).all()
    assert gradient.isfinite().all()


def test_dropout_repeats_in_backward_and_keeps_the_mean() -> None:
    core = core_of(Fixed.Config()).train()
    q, k, v = inputs(64, 64)
    mask = AttentionMask(64, 64, causal=True, dropout=0.25)

    def run(value: Tensor) -> Tensor:
        torch.manual_seed(5)
        out: Tensor = core(q, k, value, mask)
        return out

    # With the weights fixed the output is linear in v, so its gradient must be that of the very same weights.
    out = run(v)
    above = torch.randn_like(out)
    gradient = torch.autograd.grad(out, v, above)[0]
    step = torch.randn_like(v)
    torch.testing.assert_close(((run(v + step) - out) * above).sum(), (gradient * step).sum())
    assert not torch.equal(out, core.eval()(q, k, v, mask))
    core.train()
    torch.manual_seed(0)
    mean = torch.stack([core(q, k, v, mask) for _ in range(400)]).mean(0)
    assert (mean - core.eval()(q, k, v, mask)).abs().mean() < 0.03


def test_gradcheck() -> None:
    core = core_of(BigBirdPattern.Config(), soft_cap=2.0)
    q, k, v = inputs(19, 19, batch=1)
    bias = torch.zeros(1, 4, 19, 19, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, bias: core(q, k, v, AttentionMask(19, 19, True, bias=bias)), (q, k, v, bias), fast_mode=True
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", [BigBirdPattern.Config(), Fixed.Config()])
def test_flex_agrees_with_gather(pattern: Pattern.Config, causal: bool) -> None:
    documents = torch.arange(128)[None].expand(2, -1) // 50
    mask = AttentionMask(128, 128, causal, query_documents=documents, key_documents=documents)
    with torch.no_grad():
        q, k, v = (x.float() for x in inputs(128, 128))
        flex = core_of(pattern, causal=causal, implementation="flex", soft_cap=3.0)(q, k, v, mask)
        gather = core_of(pattern, causal=causal, implementation="gather", soft_cap=3.0)(q, k, v, mask)
    torch.testing.assert_close(flex, gather, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", [BigBirdPattern.Config(), Fixed.Config()])
def test_the_fused_operator_agrees_with_gather(pattern: Pattern.Config, causal: bool) -> None:
    documents = torch.arange(77)[None].expand(2, -1) // 50
    inputs_ = inputs(77, 77)
    for mask in (
        AttentionMask(77, 77, causal),
        AttentionMask(77, 77, causal, query_documents=documents, key_documents=documents),
    ):
        outs = [
            core_of(pattern, causal=causal, implementation=name, soft_cap=3.0)(*inputs_, mask)
            for name in ("kernel", "gather")
        ]
        torch.testing.assert_close(outs[0], outs[1])
        above = torch.randn_like(outs[0])
        for one, two in zip(*(torch.autograd.grad(out, inputs_, above) for out in outs), strict=True):
            torch.testing.assert_close(one, two)


def test_flex_is_refused_where_it_has_no_gradients() -> None:
    q, k, v = inputs(64, 64)
    core = core_of(Fixed.Config(), implementation="flex")
    with pytest.raises(ConfigError, match="no gradients on a CPU"):
        core(q, k, v, AttentionMask(64, 64, True))
    core(q.detach(), k.detach(), v.detach(), AttentionMask(64, 64, True))
    # Token rules are beyond the fused operator, and without flex they are gathered.
    ruled = core_of(Band.Config(left=9, right=0), implementation="kernel")
    agree(ruled, AttentionMask(64, 64, True))


def test_which_implementation_runs() -> None:
    q = inputs(77, 77)[0].detach()
    biased = AttentionMask(77, 77, True, bias=torch.zeros(1, 4, 77, 77))
    sloped = AttentionMask(77, 77, True, relative_bias=lambda after: -after.abs().expand(4, -1), linear_bias=True)
    for name, mask, dropout, pattern, runs in [
        ("auto", AttentionMask(77, 77, True), 0.0, Fixed.Config(), "gather"),
        ("kernel", AttentionMask(77, 77, True), 0.0, Fixed.Config(), "kernel"),
        ("kernel", AttentionMask(77, 77, True), 0.0, Band.Config(), "gather"),
        ("kernel", AttentionMask(77, 77, True), 0.1, Fixed.Config(), "gather"),
        ("kernel", AttentionMask(5, 77, True, offset=72), 0.0, Fixed.Config(), "gather"),
        ("flex", biased, 0.0, Fixed.Config(), "flex"),
        ("flex", sloped, 0.0, Fixed.Config(), "flex"),
        ("flex", biased, 0.1, Fixed.Config(), "gather"),
        ("kernel", biased, 0.0, Fixed.Config(), "gather"),
        ("kernel", sloped, 0.0, Fixed.Config(), "kernel"),
        ("kernel", sloped, 0.0, Band.Config(), "gather"),
        ("kernel", replace(sloped, linear_bias=False), 0.0, Fixed.Config(), "gather"),
    ]:
        core = core_of(pattern, implementation=name)
        assert core._implementation(q, mask, dropout, core._grid(mask, 4, 0)) == runs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_computed_wide(dtype: torch.dtype) -> None:
    core = core_of(Fixed.Config())
    q, k, v = (x.detach().to(dtype) for x in inputs(77, 77))
    mask = AttentionMask(77, 77, causal=True)
    out = core(q, k, v, mask)
    wanted = dense(q.double(), k.double(), v.double(), seen_of(core, 77), mask)
    assert out.dtype == dtype
    assert (out.double() - wanted).abs().max() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [64, 77, 128])
def test_multiply_adds_are_those_that_run(length: int, causal: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    core = core_of(BigBirdPattern.Config(), causal=causal)
    q, k, v = (x.detach() for x in inputs(length, length))
    with FlopCounterMode(display=False) as counter:
        core(q, k, v, AttentionMask(length, length, causal))
    assert counter.get_total_flops() == 2 * 2 * core.multiply_adds(length, length, 4, 8)


@pytest.mark.parametrize("implementation", ["gather", "kernel", "flex"])
@pytest.mark.parametrize("pattern", [Fixed.Config(), Band.Config(left=9, right=0)])
def test_layouts_are_built_once_for_a_shape(
    pattern: Pattern.Config, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, built = core_of(pattern, implementation=implementation), []
    masked_layouts = core.pattern.masked_layouts

    def counted(grid: Grid) -> Any:
        built.append(grid)
        return masked_layouts(grid)

    monkeypatch.setattr(core.pattern, "masked_layouts", counted)
    if implementation == "kernel" and isinstance(pattern, Band.Config):
        # Once for the fused operator, which does not support token masks, and once for the one that does.
        expected = 2
    else:
        expected = 1
    for step in range(3):
        q, k, v = (x.detach().requires_grad_(implementation == "gather") for x in inputs(64, 64))
        documents = torch.arange(64)[None].expand(2, -1) // (20 + step)
        mask = AttentionMask(64, 64, True, query_documents=documents, key_documents=documents)
        out = core(q, k, v, mask)
        if out.requires_grad:
            out.sum().backward()
        assert len(built) == expected
    q, k, v = (x.detach() for x in inputs(72, 72))
    core(q, k, v, AttentionMask(72, 72, causal=True))
    assert len(built) == 2 * expected


def test_heads_spread_over_ranks_keep_their_patterns() -> None:
    whole = core_of(BigBirdPattern.Config(random_blocks=2))
    q, k, v = inputs(77, 77, groups=4)
    mask = AttentionMask(77, 77, causal=True)
    out = whole(q, k, v, mask)
    for first in (0, 2):
        part = core_of(BigBirdPattern.Config(random_blocks=2))
        part.first_head = first
        here = slice(first, first + 2)
        torch.testing.assert_close(part(q[:, here], k[:, here], v[:, here], mask), out[:, here])


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_core_gives_the_same() -> None:
    core = core_of(BigBirdPattern.Config(), implementation="gather")
    q, k, v = inputs(77, 77)
    mask = AttentionMask(77, 77, causal=True)
    whole, compiled = core(q, k, v, mask), torch.compile(core, backend="aot_eager")(q, k, v, mask)
    above = torch.randn_like(whole)
    assert torch.equal(whole, compiled)
    for one, two in zip(*(torch.autograd.grad(out, (q, k, v), above) for out in (whole, compiled)), strict=True):
        assert torch.equal(one, two)

"""Patterns and cores against the attention of `transformers`, with its weights: code that nobody here wrote."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import CORES
from xscale.nn.attention.informer import Informer
from xscale.nn.attention.longt5 import LongT5
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.reformer import Reformer
from xscale.nn.attention.yoso import Yoso
from xscale.nn.dims import Dims
from xscale.nn.materialize import materialize
from xscale.nn.pattern.bigbird import BigBirdPattern
from xscale.nn.pattern.global_blocks import GlobalBlocks
from xscale.nn.pattern.grid import Grid
from xscale.nn.pattern.pattern import Pattern
from xscale.nn.pattern.union import UnionPattern
from xscale.nn.pattern.window import Band

HEADS, WIDTH = 4, 32


def core_of(pattern: Pattern.Config, block: int) -> BlockSparse:
    dims = Dims(width=WIDTH, depth=1, vocabulary=9, length=256, causal=False)
    core: BlockSparse = CORES.build(BlockSparse.Config(pattern=pattern, block=block), dims, HEADS, WIDTH // HEADS)
    return core


def drawn(length: int) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(0))


def by_head(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def attended(core: BlockSparse, part: nn.Module, x: Tensor, names: tuple[str, str, str], scale: float = 1.0) -> Tensor:
    q, k, v = (by_head(getattr(part, name)(x)) for name in names)
    out = core(q * scale, k, v, AttentionMask(x.shape[1], x.shape[1], False))
    return out.transpose(1, 2).flatten(2)


def test_longformers_window() -> None:
    part, theirs = longformer(window=16)
    x = drawn(64)
    found = attended(core_of(Band.Config(left=8, right=8), 16), part, x, ("query", "key", "value"))
    torch.testing.assert_close(found, theirs(x, ()), rtol=1e-4, atol=1e-4)


def test_longformers_global_tokens() -> None:
    part, theirs = longformer(window=16)
    x = drawn(64)
    # Blocks of one token, so that a token is global and not its neighbours.
    pattern = UnionPattern.Config(
        patterns=(Band.Config(left=8, right=8), GlobalBlocks.Config(global_block_indices=(0, 21)))
    )
    found = attended(core_of(pattern, 1), part, x, ("query", "key", "value"))
    torch.testing.assert_close(found, theirs(x, (0, 21)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, theirs(x, (0, 22)), rtol=1e-4, atol=1e-4)


def longformer(window: int) -> tuple[Any, Any]:
    """Their self-attention, its global projections those of the window, and how to call it."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, attention_window=[window], attention_probs_dropout_prob=0.0
    )
    torch.manual_seed(0)
    part = LongformerSelfAttention(config, 0).eval()
    for name in ("query", "key", "value"):
        getattr(part, f"{name}_global").load_state_dict(getattr(part, name).state_dict())

    @torch.no_grad()
    def run(x: Tensor, places: tuple[int, ...]) -> Tensor:
        mask = torch.zeros(x.shape[:2])
        mask[:, list(places)] = 10000.0
        out: Tensor = part(
            x,
            attention_mask=mask,
            is_index_masked=mask < 0,
            is_index_global_attn=mask > 0,
            is_global_attn=bool(places),
        )[0]
        return out

    return part, run


def test_longt5s_local_attention() -> None:
    from transformers import LongT5Config
    from transformers.models.longt5.modeling_longt5 import LongT5LocalAttention, _get_local_attention_mask

    config = LongT5Config(d_model=WIDTH, d_kv=WIDTH // HEADS, num_heads=HEADS, local_radius=15, dropout_rate=0.0)
    torch.manual_seed(0)
    part = LongT5LocalAttention(config).eval()
    for projection in (part.q, part.k, part.v):
        nn.init.normal_(projection.weight, std=0.3)
    x = drawn(64)
    mask = _get_local_attention_mask(torch.ones(2, 64), part.block_len, x.device)
    with torch.no_grad():
        wanted = part(x, mask=mask)[0]
        # T5 does not scale its scores.
        found = attended(core_of(Band.Config(left=15, right=15), 16), part, x, ("q", "k", "v"), (WIDTH / HEADS) ** 0.5)
        torch.testing.assert_close(part.o(found), wanted, rtol=1e-4, atol=1e-4)


def test_bigbirds_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    block, blocks = 8, 14
    config = BigBirdConfig(hidden_size=WIDTH, num_attention_heads=HEADS, block_size=block, num_random_blocks=2)
    torch.manual_seed(0)
    part = BigBirdBlockSparseAttention(config, seed=3).train()
    drawn_blocks: list[Any] = []
    draw = part._bigbird_block_rand_mask_with_head

    def overheard(**arguments: Any) -> Any:
        drawn_blocks.append(draw(**arguments))
        return drawn_blocks[-1]

    monkeypatch.setattr(part, "_bigbird_block_rand_mask_with_head", overheard)
    x = drawn(block * blocks)
    masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(x.shape[:2]), block)
    blocked, band, row, column = masks
    with torch.no_grad():
        wanted = part(
            x, band_mask=band, from_mask=row, to_mask=column, from_blocked_mask=blocked, to_blocked_mask=blocked
        )[0]
    core = core_of(BigBirdPattern.Config(random_blocks=0, global_blocks_at_end=1), block)
    plain = core.pattern.layout(Grid(blocks, HEADS, causal=False, block=block))
    # Window and global blocks are ours, the random ones are those that they drew.
    layout = np.repeat(plain, HEADS, 0)
    for head, rows in enumerate(drawn_blocks[0]):
        for at, columns in enumerate(rows):
            layout[head, at + 1, columns] = True
    monkeypatch.setattr(core.pattern, "layout", lambda grid: layout)
    with torch.no_grad():
        found = attended(core, part, x, ("query", "key", "value"))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def plain(config: Any, heads: int = HEADS) -> Any:
    """A core of that config, its parameters at their start."""
    core = CORES.build(
        config, Dims(width=WIDTH, depth=1, vocabulary=9, length=256, causal=False), heads, WIDTH // heads
    )
    materialize(core, 0)
    return core.eval()


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(("length", "chunk"), [(64, 16), (64, 8), (96, 32)])
def test_reformers_hashing(length: int, chunk: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    config = ReformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_head_size=WIDTH // HEADS,
        lsh_attn_chunk_length=chunk,
        num_hashes=rounds,
        num_buckets=8,
        hash_seed=3,
        is_decoder=False,
        lsh_attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    part = LSHSelfAttention(config).eval()
    x = drawn(length)
    with torch.no_grad():
        wanted = part(x)
        core = plain(Reformer.Config(buckets=8, chunk_length=chunk, hashes=rounds, scope="chunk"))
        # Heads are turned each in its own way there: their buckets, without the number of the round.
        buckets = wanted.buckets.movedim(2, 0) % 8
        monkeypatch.setattr(core, "hash", lambda keys: buckets)
        found = attended(core, part, x, ("query_key", "query_key", "value"))
        torch.testing.assert_close(found, wanted.hidden_states, rtol=1e-4, atol=1e-4)
        monkeypatch.setattr(core, "hash", lambda keys: buckets.flip(-1))
        other = attended(core, part, x, ("query_key", "query_key", "value"))
    assert not torch.allclose(other, wanted.hidden_states, rtol=1e-4, atol=1e-4)


def test_informers_chosen_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs samples the same keys for all queries."""
    from transformers.models.informer import modeling_informer

    torch.manual_seed(0)
    part = modeling_informer.InformerProbSparseAttention(WIDTH, HEADS, sampling_factor=5).eval()
    core = plain(Informer.Config(factor=5))
    sample = core.sample_keys(64, 64)[0]
    monkeypatch.setattr(core, "sample_keys", lambda queries, keys, causal: sample.expand(queries, -1))
    monkeypatch.setattr(modeling_informer.torch, "randint", lambda *_: sample)
    x = drawn(64)
    with torch.no_grad():
        wanted = part(x)[0]
        found = part.out_proj(attended(core, part, x, ("q_proj", "k_proj", "v_proj")))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        monkeypatch.setattr(core, "sample_keys", lambda queries, keys, causal: sample.flip(0)[:3].expand(queries, -1))
        other = part.out_proj(attended(core, part, x, ("q_proj", "k_proj", "v_proj")))
    assert not torch.allclose(other, wanted, rtol=1e-4, atol=1e-4)


def test_yosos_expectation_and_convolution() -> None:
    from transformers import YosoConfig
    from transformers.models.yoso.modeling_yoso import YosoSelfAttention

    config = YosoConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        use_expectation=True,
        conv_window=5,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    part = YosoSelfAttention(config).eval()
    core = plain(Yoso.Config(tau=config.hash_code_len, hashes=0, convolution=5))
    with torch.no_grad():
        core.convolution.copy_(part.conv.weight[:, 0, :, 0])
    ours, theirs = (drawn(64).requires_grad_() for _ in range(2))
    found = attended(core, part, ours, ("query", "key", "value"))
    wanted = part(theirs, torch.ones(2, 64))[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    above = drawn(64)
    for out in (found, wanted):
        (out * above).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [64, 70])
def test_longt5s_transient_global_attention(length: int) -> None:
    """One head with orthogonal projections: there the norm of a projected sum is the projection of the normed sum."""
    from transformers import LongT5Config
    from transformers.models.longt5.modeling_longt5 import LongT5TransientGlobalAttention

    config = LongT5Config(
        d_model=WIDTH, d_kv=WIDTH, num_heads=1, local_radius=15, global_block_size=8, dropout_rate=0.0
    )
    torch.manual_seed(0)
    part = LongT5TransientGlobalAttention(config, has_relative_attention_bias=True).eval()
    for bias in (part.relative_attention_bias, part.global_relative_attention_bias):
        nn.init.zeros_(bias.weight)
    for projection in (part.q, part.k, part.v):
        nn.init.orthogonal_(projection.weight)
    core = plain(LongT5.Config(radius=15, block=8), heads=1)
    x = drawn(length)
    with torch.no_grad():
        wanted = part(x, mask=torch.ones(2, length))[0]
        q, k, v = (getattr(part, name)(x)[:, None] for name in ("q", "k", "v"))
        # T5 does not scale its scores.
        found = core(q * WIDTH**0.5, k, v, AttentionMask(length, length, False))[:, 0]
    torch.testing.assert_close(part.o(found), wanted, rtol=1e-4, atol=1e-4)

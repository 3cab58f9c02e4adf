"""Writing over the caches equals writing without them; the draw obeys its settings."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import Pool
from xscale.core.config import decode
from xscale.generate.decoders import incremental
from xscale.generate.generate import generate, lay_out_matrices, restricted_logits, sample_token
from xscale.nn.materialize import materialize
from xscale.nn.model.model import MODELS
from xscale.nn.tokens import Tokens
from xscale.settings.settings import Settings

V, T = 40, 24


def model_of(model: dict[str, object]) -> nn.Module:
    # Small tied weights would only ever repeat the last token.
    settings = decode(Settings, {"model": {"init_std": 0.4, "tied": False, **model}})
    with torch.device("meta"):
        built: nn.Module = MODELS.build(settings.model, V, T)
    materialize(built, 1, dtype=torch.float64)
    return built


BLOCK = {"mixer": {"kind": "attention", "heads": 4, "kv_heads": 2}, "ffn": {"kind": "gated", "hidden": 32}}
SPARSE = {"kind": "attention", "heads": 4, "core": {"kind": "block_sparse", "block": 4, "pattern": "fixed"}}
MODELS_THAT_WRITE = {
    "softmax": {"kind": "decoder", "width": 32, "stack": {"depth": 2, "block": BLOCK}},
    "alibi": {"kind": "decoder", "width": 32, "position": "alibi", "stack": {"depth": 2, "block": BLOCK}},
    "learned": {"kind": "decoder", "width": 32, "position": "learned", "stack": {"depth": 1, "block": BLOCK}},
    "sparse": {"kind": "decoder", "width": 32, "stack": {"depth": 2, "block": {**BLOCK, "mixer": SPARSE}}},
    "experts": {
        "kind": "decoder",
        "width": 32,
        "stack": {"depth": 2, "block": {**BLOCK, "ffn": {"kind": "moe", "experts": 4, "capacity_factor": 1.0}}},
    },
}


def without_cache(model: nn.Module, prompt: torch.Tensor, length: int) -> list[int]:
    """The likeliest continuation by whole forwards."""
    ids = prompt
    for _ in range(length):
        logits = model(Tokens.from_ids(ids[None], cache={}))
        ids = torch.cat((ids, logits[0, -1].argmax()[None]))
    return ids[len(prompt) :].tolist()


@pytest.mark.parametrize("name", MODELS_THAT_WRITE)
@torch.no_grad()
def test_with_a_cache_as_without(name: str) -> None:
    model = model_of(MODELS_THAT_WRITE[name]).eval()
    assert incremental(model)
    prompt = torch.randint(V, (5,), generator=torch.Generator().manual_seed(0))
    written = generate(model, prompt, 12, end=-1, temperature=0)
    assert written.tolist() == without_cache(model, prompt, 12)
    assert len(set(written.tolist())) > 3


@pytest.mark.parametrize("name", ["softmax", "experts"])
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_matrices_by_columns_are_the_same_matrices(name: str, tied: bool) -> None:
    model = model_of({**MODELS_THAT_WRITE[name], "tied": tied}).float().eval()
    weights = {path: parameter.clone() for path, parameter in model.named_parameters()}
    prompt = torch.randint(V, (5,), generator=torch.Generator().manual_seed(0))
    tokens = generate(model, prompt, 12, end=-1, temperature=0)
    logits = model(Tokens.from_ids(prompt[None]))
    lay_out_matrices(model)
    by_columns = {path for path, parameter in model.named_parameters() if not parameter.is_contiguous()}
    matrices = {path for path, parameter in weights.items() if parameter.ndim > 1}
    # A tied head is the table of the embedding; routers and an embedding of its own stay by rows.
    rows = {path for path in matrices if "router" in path} | (set() if tied else {"embed.table.weight"})
    assert by_columns == matrices - rows
    assert all(torch.equal(parameter, weights[path]) for path, parameter in model.named_parameters())
    torch.testing.assert_close(model(Tokens.from_ids(prompt[None])), logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(generate(model, prompt, 12, end=-1, temperature=0), tokens)


def test_bfloat16_matrices_stay_by_rows() -> None:
    model = model_of(MODELS_THAT_WRITE["experts"]).bfloat16()
    lay_out_matrices(model)
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_an_encoder_decoder_reads_its_source_once() -> None:
    stack = {"depth": 1, "block": BLOCK}
    model = model_of({"kind": "encoder_decoder", "width": 32, "encoder": stack, "decoder": stack})
    reads = []
    model.encoder.register_forward_hook(lambda *_: reads.append(1))  # type: ignore[union-attr]
    source = torch.arange(6)
    first = generate(model, torch.tensor([0]), 8, end=-1, temperature=0, source=source)
    assert len(first) == 8
    assert len(reads) == 1
    other = generate(model, torch.tensor([0]), 8, end=-1, temperature=0, source=source.flip(0))
    assert first.tolist() != other.tolist()


def test_the_head_computes_the_logits_of_the_last_token_alone() -> None:
    model = model_of(MODELS_THAT_WRITE["softmax"])
    shapes: list[tuple[int, ...]] = []
    model.head.register_forward_hook(lambda _, __, logits: shapes.append(tuple(logits.shape)))  # type: ignore[union-attr]
    generate(model, torch.tensor([1, 2, 3]), 3, end=-1, temperature=0)
    assert shapes == [(1, 1, V)] * 3


def test_it_ends_at_the_end_token_and_at_the_window() -> None:
    model = model_of(MODELS_THAT_WRITE["softmax"])
    prompt = torch.tensor([1, 2, 3])
    free = generate(model, prompt, 10, end=-1, temperature=0).tolist()
    stop = free[4]
    assert generate(model, prompt, 10, end=stop, temperature=0).tolist() == free[: free.index(stop)]
    assert len(generate(model, prompt, 100, end=-1, window=T)) == T - len(prompt)


def test_the_draw_is_decided_by_its_seed() -> None:
    model = model_of(MODELS_THAT_WRITE["softmax"])
    drawn = [generate(model, torch.tensor([1]), 16, end=-1, temperature=2.0, seed=seed).tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_pick_keeps_to_the_likeliest() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    generator = torch.Generator().manual_seed(0)
    none = torch.tensor([], dtype=torch.long)
    assert sample_token(restricted_logits(logits, none, 0), generator) == 1
    for temperature, top_k, drawn in ((5.0, 2, {1, 2}), (50.0, None, {0, 1, 2, 3})):
        left = restricted_logits(logits, none, temperature, top_k)
        assert {sample_token(left, generator) for _ in range(200)} == drawn


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
def test_the_distribution_is_that_of_transformers(
    temperature: float, top_k: int | None, top_p: float | None, penalty: float
) -> None:
    """Its processors in the order in which its `generate` applies them."""
    processors = pytest.importorskip("transformers.generation.logits_process")
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(V, generator=generator, dtype=torch.float64) * 3
    ids = torch.randint(V, (9,), generator=generator)
    chosen = [processors.RepetitionPenaltyLogitsProcessor(penalty), processors.TemperatureLogitsWarper(temperature)]
    chosen += [processors.TopKLogitsWarper(top_k)] if top_k is not None else []
    chosen += [processors.TopPLogitsWarper(top_p)] if top_p is not None else []
    expected = logits[None]
    for processor in chosen:
        expected = processor(ids[None], expected)
    torch.testing.assert_close(
        restricted_logits(logits, ids, temperature, top_k, top_p, penalty), expected[0], rtol=0, atol=1e-12
    )


def test_a_greedy_text_avoids_what_it_has_said() -> None:
    logits = torch.tensor([1.0, 3.0, 2.9, -1.0])
    assert int(restricted_logits(logits, torch.tensor([1]), 0, repetition_penalty=1.5).argmax()) == 2
    assert logits.tolist() == torch.tensor([1.0, 3.0, 2.9, -1.0]).tolist(), "the model's own are left alone"


def likes_its_rank(ids: torch.Tensor) -> list[int]:
    """A model whose likeliest token is another on each rank, as a tie may be that rounding decides."""

    class Model(nn.Module):
        def forward(self, tokens: object, targets: object, source: object) -> torch.Tensor:
            logits = torch.zeros(1, 1, V)
            logits[..., dist.get_rank() + 1] = 1
            return logits

    generated: list[int] = generate(Model(), ids, 3, end=0, temperature=0).tolist()
    return generated


@pytest.mark.long
def test_all_ranks_take_the_first_ones_token(pool: Pool) -> None:
    """A rank that took another token would end at another length, and the others would wait for it."""
    assert pool.run(likes_its_rank, 2, torch.tensor([5])) == [[1, 1, 1]] * 2

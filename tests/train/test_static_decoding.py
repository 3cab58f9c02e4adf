"""Generation over a static KV cache writes what it writes over a growing one and over none, in one compiled step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.test_generate import BLOCK, MODELS_THAT_WRITE, T, V, model_of, without_cache
from xscale.core.errors import ConfigError
from xscale.generate.decoders import Decoding, StaticDecoder, why_not_static
from xscale.generate.generate import GROWING, generate
from xscale.nn.depth.early_exit import ExitPolicyConfig

STATIC = Decoding(cache="static")


def decoder_of(mixer: dict[str, Any], **model: Any) -> dict[str, Any]:
    mixer = {"kind": "attention", "heads": 4, **mixer}
    return {"kind": "decoder", "width": 32, "stack": {"depth": 2, "block": {**BLOCK, "mixer": mixer}}, **model}


WINDOW = {"kind": "block_sparse", "block": 4, "pattern": {"kind": "window", "window": 3}}
STACK = {"depth": 2, "block": BLOCK}
PAIRS = {"kind": "encoder_decoder", "width": 32, "encoder": STACK, "decoder": STACK}
MODELS: dict[str, dict[str, Any]] = {
    **MODELS_THAT_WRITE,
    "multi-query": decoder_of({"kv_heads": 1}),
    "sinks": decoder_of({"kv_heads": 2, "core": {"kind": "softmax", "sinks": True}}),
    "soft cap": decoder_of({"core": {"kind": "softmax", "soft_cap": 2.0}}),
    "qk norm": decoder_of({"qk_norm": "rms"}),
    "relative": decoder_of({"kv_heads": 2}, position="relative"),
    "sinusoidal": decoder_of({}, position="sinusoidal"),
    "window": decoder_of({"core": WINDOW}),
    "window, alibi": decoder_of({"core": WINDOW}, position="alibi"),
    "mla": decoder_of({"kind": "mla", "rope_width": 4}),
    "shared blocks": {**decoder_of({}), "stack": {**STACK, "share": "all"}},
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def prompt_of(length: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_a_growing_cache_and_of_none(name: str) -> None:
    model, prompt = model_of(MODELS[name]).eval(), prompt_of(5)
    assert not list(why_not_static(model))
    static = generate(model, prompt, 12, end=-1, temperature=0, decoding=STATIC).tolist()
    assert static == generate(model, prompt, 12, end=-1, temperature=0, decoding=GROWING).tolist()
    assert static == without_cache(model, prompt, 12)
    assert len(set(static)) > 2


def test_an_encoder_decoder() -> None:
    model, source = model_of(PAIRS).eval(), torch.arange(6)
    options: dict[str, Any] = {"end": -1, "temperature": 0, "source": source}
    static, growing = (
        generate(model, torch.tensor([0]), 12, decoding=kind, **options).tolist() for kind in (STATIC, GROWING)
    )
    assert static == growing
    assert len(set(static)) > 1


@pytest.mark.parametrize("name", ["softmax", "alibi", "learned", "window", "mla", "experts"])
def test_a_batch_with_padding_writes_what_each_sample_writes_alone(name: str) -> None:
    model, lengths, count = model_of(MODELS[name]).eval(), [5, 2, 9], 10
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    # The padding is no id that the model may read.
    ids = torch.full((3, max(lengths)), V - 1)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    decoder = StaticDecoder(model, max(lengths) + count)
    token = decoder.begin(ids, torch.tensor(lengths)).argmax(-1)
    written = [token]
    for _ in range(count - 1):
        token = decoder.step(token).argmax(-1)
        written.append(token)
    expected = [without_cache(model, prompt, count) for prompt in prompts]
    assert torch.stack(written, 1).tolist() == expected


def test_what_padding_wrote_is_never_seen() -> None:
    """Two batches that differ in the padding alone have the same logits, to the last bit."""
    model, lengths = model_of(MODELS["softmax"]).eval(), torch.tensor([6, 3])
    logits = []
    for filler in (0, V - 1):
        ids = torch.stack((prompt_of(6), prompt_of(6, 1)))
        ids[1, 3:] = filler
        decoder = StaticDecoder(model, 12)
        decoder.begin(ids, lengths)
        logits.append([decoder.step(torch.tensor([n, n])) for n in range(1, 5)])
    assert all(torch.equal(left, right) for left, right in zip(*logits, strict=True))


class Compilations:
    """Counts the graphs that torch.compile traces, which run by PyTorch's own operators."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import torch._dynamo
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        self.counters, compile_ = counters, torch.compile
        patch.setattr(torch, "compile", lambda call, **options: compile_(call, backend="eager", **options))

    @property
    def count(self) -> int:
        return int(self.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    "name",
    [
        "softmax",
        "window",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("alibi", "learned", "relative", "mla", "experts", "sinks")),
    ],
)
def test_one_compilation_for_the_whole_generation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compilations = Compilations(monkeypatch)
    model, prompt = model_of(MODELS[name]).eval(), prompt_of(5)
    compiled = generate(model, prompt, 12, end=-1, temperature=0, decoding=Decoding(compile=True)).tolist()
    assert compilations.count == 1
    assert compiled == generate(model, prompt, 12, end=-1, temperature=0, decoding=GROWING).tolist()


AVERAGE = {**decoder_of({}), "stack": {"depth": 2, "block": {**BLOCK, "mixer": "average_attention"}}}
LINEAR = decoder_of({"core": "linear"})
NO_STATIC_FORM = {
    "core": (LINEAR, "stack.blocks.0.mixer.part.core: core 'linear' reads the number of keys so far"),
    "mixer": (AVERAGE, "mixer 'average_attention' keeps a state of its own"),
    "position": (decoder_of({}, position="shaw"), "position 'shaw' has terms of the scores"),
}


@pytest.mark.parametrize("name", NO_STATIC_FORM)
def test_parts_without_a_static_form_are_named(name: str) -> None:
    config, reason = NO_STATIC_FORM[name]
    model = model_of(config)
    for decoding, option in ((STATIC, "--cache"), (Decoding(compile=True), "--compile")):
        with pytest.raises(ConfigError) as refused:
            generate(model, prompt_of(3), 2, end=-1, decoding=decoding)
        (problem,) = refused.value.problems
        assert problem.path == option
        assert reason in problem.what


def test_exits_and_a_contradiction_are_refused() -> None:
    model, policy = model_of(MODELS["softmax"]), ExitPolicyConfig(criterion="entropy", threshold=1.0)
    with pytest.raises(ConfigError, match="tokens leave by exits"):
        generate(model, prompt_of(3), 2, end=-1, decoding=STATIC, policy=policy)
    with pytest.raises(ConfigError, match="would be compiled for each"):
        generate(model, prompt_of(3), 2, end=-1, decoding=Decoding(cache="growing", compile=True))


def test_a_part_that_replaces_its_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Had a part said that it has a static form, a graph would read its first state for ever."""
    model = model_of(AVERAGE)
    for module in model.modules():
        if hasattr(module, "why_not_static"):
            monkeypatch.setattr(type(module), "why_not_static", lambda self: None)
    with pytest.raises(AssertionError, match="replaces its state"):
        generate(model, prompt_of(3), 4, end=-1, decoding=STATIC)


def test_the_log_says_how_it_decodes() -> None:
    lines: list[str] = []
    generate(model_of(MODELS["softmax"]), prompt_of(3), 2, end=-1, decoding=Decoding(cache="static", say=lines.append))
    assert lines == ["static KV cache of 5 tokens; each step has the same shapes"]


def test_a_step_may_be_computed_several_times() -> None:
    """Its warm-up and its capture write what it writes: the logits of the tokens behind it stay as they are."""
    model = model_of(MODELS["softmax"]).eval()
    once, often = StaticDecoder(model, 12), StaticDecoder(model, 12)
    for decoder in (once, often):
        decoder.begin(prompt_of(4)[None])
    for n in range(1, 5):
        token = torch.tensor([n])
        often.ids.copy_(token[:, None])
        for _ in range(4):
            often._compute()
        assert torch.equal(once.step(token), often.step(token))


@pytest.mark.parametrize("second", [1, 2, 7])
def test_a_decoder_generates_again_with_the_step_that_it_has(second: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compilations, model = Compilations(monkeypatch), model_of(MODELS["softmax"]).eval()
    decoding = Decoding(decoder=StaticDecoder(model, T, compiled=True))
    for length in (5, second, 5):
        tokens = generate(model, prompt_of(length), 12, end=-1, temperature=0, decoding=decoding)
        assert tokens.tolist() == without_cache(model, prompt_of(length), 12)
    assert compilations.count == 1


def test_the_whole_model_must_generate() -> None:
    encoder = model_of({"kind": "encoder", "width": 32, "stack": {"depth": 1, "block": BLOCK}})
    assert list(why_not_static(encoder)) == ["the model: Encoder generates no text token by token"]
    assert list(why_not_static(nn.Linear(1, 1))) == ["the model: Linear generates no text token by token"]

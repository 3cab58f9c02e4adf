"""Global tokens before the text: a model that has them is one whose text begins with as many words of its own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import close, numbered, ready
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.measure.flops import training_flops
from xscale.nn.model.encoder import Encoder
from xscale.nn.tokens import Tokens

WORDS, LENGTH, COUNT, BLOCK = 50, 45, 8, 4
CORES: dict[str, dict[str, Any]] = {
    "bigbird": {
        "kind": "block_sparse",
        "block": BLOCK,
        "pattern": {"kind": "bigbird", "global_blocks": 2, "random_blocks": 0},
    },
    "etc": {"kind": "etc", "tokens": COUNT, "radius": 5, "clip": 3},
    "softmax": {"kind": "softmax"},
    "star": {"kind": "block_sparse", "block": COUNT, "pattern": {"kind": "star"}},
}


def encoder(core: str, words: int, length: int, **changes: Any) -> Encoder:
    given = {
        "width": 32,
        "stack": {"depth": 3, "block": {"mixer": {"kind": "attention", "heads": 4, "core": CORES[core]}}},
        **changes,
    }
    config = decode(Encoder.Config, given)
    assert Encoder.check(config, (words, length), "model") == []
    return ready(Encoder(config, words, length))


def ids(seed: int = 0) -> Tensor:
    return torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("core", "norm"), [("bigbird", None), ("etc", "layer"), ("softmax", None), ("star", None)])
def test_they_are_words_of_their_own_at_the_start(core: str, norm: str | None) -> None:
    ours = encoder(core, WORDS, LENGTH, global_tokens=COUNT, embedding_norm=norm)
    plain = encoder(core, WORDS + COUNT, COUNT + LENGTH, embedding_norm=norm)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name == "embed.table.weight":
                parameter.copy_(torch.cat((ours.get_parameter(name), ours.embed.start)))
            else:
                parameter.copy_(ours.get_parameter(name))
    prefixed = torch.cat((torch.arange(WORDS, WORDS + COUNT).expand(2, -1), ids()), 1)
    wanted = plain(Tokens.from_ids(prefixed))[:, COUNT:, :WORDS]
    found = ours(Tokens.from_ids(ids()))
    assert found.shape == (2, LENGTH, WORDS)
    assert close(found, wanted)
    targets = ids(1)
    loss = ours(Tokens.from_ids(ids()), targets)
    assert torch.isclose(loss, F.cross_entropy(wanted.flatten(0, 1), targets.flatten(), reduction="sum"), rtol=1e-6)
    above = torch.randn(found.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (start,) = torch.autograd.grad((found * above).sum(), ours.embed.start)
    (table,) = torch.autograd.grad((wanted * above).sum(), plain.embed.table.weight)
    assert start.any(1).all()
    assert close(start, table[WORDS:])


@pytest.mark.parametrize("core", ["bigbird", "etc"])
def test_far_ends_meet_in_them(core: str) -> None:
    """One block carries the first word to the global tokens, the next one carries it to the last word."""
    other = ids()
    other[:, 0] = (other[:, 0] + 7) % WORDS
    for depth in (1, 2):
        block = {"mixer": {"kind": "attention", "heads": 4, "core": CORES[core]}}
        model = encoder(core, WORDS, LENGTH, global_tokens=COUNT, stack={"depth": depth, "block": block})
        changed, whole = (model(Tokens.from_ids(one))[:, -1] for one in (other, ids()))
        assert close(changed, whole) == (depth == 1)


def test_the_relay_starts_as_the_mean_of_the_text() -> None:
    model = encoder("star", WORDS, LENGTH, global_tokens=COUNT, global_mean=True)
    x = model.embed(Tokens.from_ids(ids()))
    table = model.embed.table.weight
    assert close(x[:, COUNT:], table[ids()])
    assert close(x[:, :COUNT], model.embed.start + table[ids()].mean(1, keepdim=True))


def test_documents_cannot_stay_apart() -> None:
    model = encoder("bigbird", WORDS, LENGTH, global_tokens=COUNT)
    with pytest.raises(ConfigError, match="cross_documents"):
        model(Tokens.from_ids(ids(), numbered(15, 30)))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="global_tokens: must be >= 0, got -1"):
        decode(Encoder.Config, {"global_tokens": -1})
    problems = Encoder.check(decode(Encoder.Config, {"global_mean": True}), (WORDS, LENGTH), "model")
    assert [problem.path for problem in problems] == ["model.global_mean"]


def test_their_work_is_counted() -> None:
    """FLOPs are those of a longer text, but for the head."""
    ours, plain = (encoder("etc", WORDS, LENGTH, global_tokens=count) for count in (COUNT, 0))
    head = 6 * COUNT * ours.head.weight.numel()
    assert training_flops(ours, LENGTH) == training_flops(plain, LENGTH + COUNT) - head

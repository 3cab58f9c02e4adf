"""Transparent attention: each decoder block reads its own mix of the encoder's layers, by the equation written out."""

from typing import Any

import torch
from torch import Tensor

from tests.conformance.made import close, ready
from xscale.core.config import decode
from xscale.nn.forward import Forward
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.tokens import Tokens

VOCABULARY, LENGTH, ENCODER, DECODER = 17, 9, 3, 2


def config(**changes: Any) -> Any:
    block: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 20}}
    stacks = {"encoder": {"depth": ENCODER, "block": block}, "decoder": {"depth": DECODER, "block": block}}
    return decode(EncoderDecoder.Config, {"width": 12, "position": "learned", "transparent": True, **stacks, **changes})


def model(**changes: Any) -> Any:
    made = config(**changes)
    assert EncoderDecoder.check(made, (VOCABULARY, LENGTH), "model") == []
    return ready(EncoderDecoder(made, VOCABULARY, LENGTH))


def tokens(length: int = LENGTH, seed: int = 1, **others: Any) -> Tokens:
    ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))
    return Tokens.from_ids(ids, **others)


def literal(made: Any, about: Tokens, source: Tokens) -> Tensor:
    """Logits of a pre-norm model whose decoder blocks get a weighted sum each."""
    states = [made.source(source)]
    for block in made.encoder.blocks.values():
        states.append(block(states[-1], source))
    x = made.target(about)
    for number, block in enumerate(made.decoder.blocks.values()):
        row = made.decoder.mix.weight[number]
        memory = torch.zeros_like(states[0])
        for entry, state in zip(row, states, strict=True):
            memory = memory + entry.exp() / row.exp().sum() * made.encoder.norm(state)
        x = block(x, about, memory, source)
    out: Tensor = made.head(made.decoder.norm(x))
    return out


def test_each_decoder_block_reads_its_mix() -> None:
    made, source = model(), tokens(5, seed=2)
    assert made.decoder.mix.weight.shape == (DECODER, ENCODER + 1)
    assert close(made(tokens(), source=source), literal(made, tokens(), source))


def test_a_mix_of_the_last_layer_alone_is_the_plain_model() -> None:
    made, plain = model(), model(transparent=False)
    plain.load_state_dict({name: value for name, value in made.state_dict().items() if ".mix." not in name})
    made.decoder.mix.weight.data.fill_(-1e4)[:, -1] = 0
    assert close(made(tokens(), source=tokens(5)), plain(tokens(), source=tokens(5)))


def test_decoding_over_a_cache_is_the_parallel_form() -> None:
    made, source, ids = model(), tokens(5, seed=2), tokens().ids
    whole, rows = made(tokens(), source=source), []
    cache: dict[str, Any] = {}
    for first, last in [(0, 4), (4, 5), (5, 9)]:
        positions = torch.arange(first, last).expand(2, -1)
        rows.append(
            made(Tokens(ids=ids[:, first:last], positions=positions, forward=Forward(cache=cache)), source=source)
        )
    assert close(torch.cat(rows, 1), whole)


def test_weights_of_layers_are_dropped_in_training() -> None:
    made = model(transparent_dropout=0.5).train()
    first, again, other = (made(tokens(rng_seed=seed), source=tokens(5)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not close(first, other)
    assert close(made.eval()(tokens(rng_seed=1), source=tokens(5)), literal(made, tokens(), tokens(5)))


def test_what_cannot_be_mixed_is_refused() -> None:
    def problems(**changes: Any) -> str:
        return " ".join(map(str, EncoderDecoder.check(config(**changes), (VOCABULARY, LENGTH), "model")))

    assert "not one of each block" in problems(encoder={"depth": 2, "halting": {}})
    assert "no weights of layers to drop" in problems(transparent=False, transparent_dropout=0.1)

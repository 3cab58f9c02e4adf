"""Sublayers that all blocks share: the numbers of blocks with equal weights, and one name for each weight."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, drawn, ready
from xscale.core.config import decode
from xscale.measure.flops import size, training_flops
from xscale.nn.forward import Forward
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.tokens import Tokens

VOCABULARY, LENGTH, DEPTH = 17, 9, 3
BLOCK: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 20}}


def model(share: str, kind: type[Any] = Decoder, **changes: Any) -> Any:
    stack = {"depth": DEPTH, "block": {**BLOCK, **changes}, "share": share}
    stacks = {"encoder": stack, "decoder": stack} if kind is EncoderDecoder else {"stack": stack}
    config = decode(kind.Config, {"width": 12, "position": "learned", **stacks})
    assert kind.check(config, (VOCABULARY, LENGTH), "model") == []
    return ready(kind(config, VOCABULARY, LENGTH))


def with_equal_weights(shared: Any, share: str, **changes: Any) -> Any:
    """A model without sharing whose blocks have the weights of the shared sublayers."""
    plain = model("none", type(shared), **changes)
    given = dict(shared.named_parameters())
    for name, parameter in plain.named_parameters():
        stack, _, rest = name.partition(".blocks.")
        source = f"{stack}.shared.{rest.partition('.')[2]}"
        parameter.data.copy_(given[source] if source in given else given[name])
    return plain


def tokens(**others: Any) -> Tokens:
    return Tokens.from_ids(torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1)), **others)


@pytest.mark.parametrize("kind", [Decoder, EncoderDecoder])
@pytest.mark.parametrize("share", ["all", "mixer", "ffn"])
def test_it_is_a_stack_of_equal_sublayers(share: str, kind: type[Any]) -> None:
    """With dropout: each layer draws its own numbers, whoever owns its weights."""
    shared = model(share, kind, dropout=0.2).train()
    plain = with_equal_weights(shared, share, dropout=0.2).train()
    source = {"source": tokens()} if kind is EncoderDecoder else {}
    outs = [made(tokens(rng_seed=4), **source) for made in (shared, plain)]
    assert close(*outs)
    for out in outs:
        (out * drawn(*out.shape)).sum().backward()
    summed: dict[str, Tensor] = {}
    for name, parameter in plain.named_parameters():
        stack, _, rest = name.partition(".blocks.")
        target = f"{stack}.shared.{rest.partition('.')[2]}"
        owner = target if target in dict(shared.named_parameters()) else name
        assert parameter.grad is not None
        summed[owner] = summed.get(owner, torch.zeros(())) + parameter.grad
    for name, parameter in shared.named_parameters():
        assert parameter.grad is not None
        assert close(parameter.grad, summed[name]), name


@pytest.mark.parametrize(
    ("share", "in_blocks", "in_all"), [("all", (), ("mixer", "ffn")), ("mixer", ("ffn",), ("mixer",))]
)
def test_a_shared_weight_has_one_name(share: str, in_blocks: tuple[str, ...], in_all: tuple[str, ...]) -> None:
    names = [name.split(".") for name in model(share).state_dict()]
    assert {parts[2] for parts in names if parts[1] == "shared"} == set(in_all)
    assert {(parts[2], parts[3]) for parts in names if parts[1] == "blocks"} == {
        (str(layer), sublayer) for layer in range(DEPTH) for sublayer in in_blocks
    }


@pytest.mark.parametrize("kind", [Decoder, EncoderDecoder])
def test_layers_decode_over_caches_of_their_own(kind: type[Any]) -> None:
    made, ids = model("all", kind), tokens().ids
    source = {"source": tokens()} if kind is EncoderDecoder else {}
    whole, rows = made(tokens(), **source), []
    cache: dict[str, Any] = {}
    for first, last in [(0, 4), (4, 5), (5, 9)]:
        positions = torch.arange(first, last).expand(2, -1)
        rows.append(made(Tokens(ids=ids[:, first:last], positions=positions, forward=Forward(cache=cache)), **source))
    assert close(torch.cat(rows, 1), whole)


def test_it_has_fewer_parameters_and_as_much_to_compute() -> None:
    shared, plain = model("all"), model("none")
    assert training_flops(shared, LENGTH) == training_flops(plain, LENGTH)
    assert size(shared).multiplied == size(plain).multiplied
    in_blocks = sum(value.numel() for name, value in plain.named_parameters() if "blocks" in name)
    assert size(plain).parameters - size(shared).parameters == in_blocks * (DEPTH - 1) // DEPTH
    assert size(shared).active == size(shared).parameters


def test_what_cannot_be_shared_is_refused() -> None:
    def problems(share: str, **stack: Any) -> str:
        data = {"width": 12, "stack": {"depth": DEPTH, "block": BLOCK, "share": share, **stack}}
        return " ".join(map(str, Decoder.check(decode(Decoder.Config, data), (VOCABULARY, LENGTH), "model")))

    rule = {"every": 2, "ffn": {"kind": "gated"}}
    assert "model.stack.rules: share=all gives all blocks the same sublayers" in problems("all", rules=[rule])
    assert problems("mixer", rules=[rule]) == ""
    stack = {"depth": DEPTH, "block": {**BLOCK, "residual": "no_norm"}, "share": "all"}
    fixup = decode(EncoderDecoder.Config, {"width": 12, "init": "t_fixup", "encoder": stack, "decoder": stack})
    found = map(str, EncoderDecoder.check(fixup, (VOCABULARY, LENGTH), "model"))
    assert sum("t_fixup scales the weights of each block" in problem for problem in found) == 2
    prior = {**BLOCK, "mixer": {"kind": "attention", "heads": 2, "core": "prior_scores"}}
    assert "'mixer' hands on its scores" in problems("all", block=prior)
    assert problems("ffn", block=prior) == ""

"""Reversible blocks: the two streams by hand, the inverse, decoding, and refusals."""

from typing import Any

import pytest
import torch

from tests.conformance.made import ready
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.forward import Forward
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.tokens import Tokens

VOCABULARY, LENGTH = 17, 9
BLOCK: dict[str, Any] = {
    "mixer": {"kind": "attention", "heads": 2},
    "ffn": {"kind": "dense", "hidden": 20},
    "residual": "reversible",
}


def config(block: dict[str, Any] | None = None, **stack: Any) -> Any:
    return decode(Decoder.Config, {"width": 12, "stack": {"depth": 3, "block": {**BLOCK, **(block or {})}, **stack}})


def built(block: dict[str, Any] | None = None) -> Any:
    chosen = config(block)
    assert Decoder.check(chosen, (VOCABULARY, LENGTH), "model") == []
    return ready(Decoder(chosen, VOCABULARY, LENGTH))


def tokens(**others: Any) -> Tokens:
    return Tokens.from_ids(torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1)), **others)


@pytest.mark.parametrize("placement", ["pre", "res_post"])
def test_the_streams_are_those_of_the_paper(placement: str) -> None:
    """Y1 = X1 + Attention(X2) and Y2 = X2 + FFN(Y1), and from the outputs the inputs (Kitaev et al. 2020, 8 and 9)."""
    model, about = built({"residual": {"kind": "reversible", "placement": placement}}), tokens()

    def branch(sublayer: Any, x: torch.Tensor) -> torch.Tensor:
        part, norm = sublayer.part, sublayer.norm
        y: torch.Tensor = norm(part(x, about)) if placement == "res_post" else part(norm(x), about)
        return y

    x1 = x2 = model.embed(about)
    blocks = list(model.stack.blocks.values())
    for block in blocks:
        y1 = x1 + branch(block.mixer, x2)
        y2 = x2 + branch(block.ffn, y1)
        x1, x2 = y1, y2
    torch.testing.assert_close(
        model.stack(model.embed(about), about), model.stack.norm((x1 + x2) / 2), rtol=1e-12, atol=1e-12
    )
    for block in reversed(blocks):
        x2 = x2 - branch(block.ffn, x1)
        x1 = x1 - branch(block.mixer, x2)
    torch.testing.assert_close(x1, model.embed(about), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(x2, model.embed(about), rtol=1e-11, atol=1e-12)


def test_token_by_token_gives_the_same() -> None:
    model, about = built(), tokens()
    cache: dict[str, Any] = {}
    steps = []
    for place in range(LENGTH):
        one = Tokens(
            about.ids[:, place : place + 1], about.positions[:, place : place + 1], forward=Forward(cache=cache)
        )
        steps.append(model(one))
    torch.testing.assert_close(torch.cat(steps, 1), model(about), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("block", "stack", "says"),
    [
        (
            {"sublayers": [{"part": "mixer"}, {"part": "ffn", "parallel": True}]},
            {},
            "model.stack.block.sublayers: reversible blocks have two residual streams",
        ),
        ({"position": "learned"}, {}, "model.stack.block.position: reversible blocks have two residual streams"),
        ({}, {"step_signal": True}, "model.stack.step_signal: reversible blocks have two residual streams"),
        ({}, {"exits": {}}, "model.stack.exits: reversible blocks have two residual streams"),
        ({}, {"halting": {}}, "model.stack.halting: reversible blocks have two residual streams"),
        (
            {"mixer": {"kind": "attention", "heads": 2, "core": {"kind": "prior_scores"}}},
            {},
            "model.stack.block.residual: reversible blocks keep nothing for backward",
        ),
    ],
)
def test_what_needs_one_stream_is_refused(block: dict[str, Any], stack: dict[str, Any], says: str) -> None:
    problems = Decoder.check(config(block, **stack), (VOCABULARY, LENGTH), "model")
    assert [problem for problem in problems if str(problem).startswith(says) and (problem.advice or problem.choices)], (
        problems
    )


@pytest.mark.parametrize("placement", ["post", "none", "admin"])
def test_a_placement_that_changes_the_stream_is_refused(placement: str) -> None:
    """Inputs are reconstructed from the stream."""
    with pytest.raises(ConfigError, match=r"residual\.placement: must be 'pre', 'sandwich', .* got"):
        config({"residual": {"kind": "reversible", "placement": placement}})


def test_a_transparent_encoder_is_refused() -> None:
    stack = {"depth": 2, "block": BLOCK}
    plain = {"depth": 2, "block": {**BLOCK, "residual": "pre"}}
    chosen = decode(EncoderDecoder.Config, {"width": 12, "encoder": stack, "decoder": plain, "transparent": True})
    (problem,) = EncoderDecoder.check(chosen, (VOCABULARY, LENGTH), "model")
    assert problem.advice == "Take false, or model.encoder.block.residual=pre."

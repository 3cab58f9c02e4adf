"""Each residual stream in a decoder: decoding with a cache, and packed documents."""

from typing import Any

import pytest
import torch

from xscale.conformance.small_parts import ready
from xscale.core.config import decode
from xscale.nn.forward import Forward
from xscale.nn.model.decoder import Decoder
from xscale.nn.residual.residual_stream import RESIDUALS
from xscale.nn.tokens import Tokens

VOCABULARY, LENGTH = 17, 9


def built(kind: str) -> Any:
    block = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 20}, "residual": kind}
    config = decode(Decoder.Config, {"width": 12, "position": "rope", "stack": {"depth": 3, "block": block}})
    assert Decoder.check(config, (VOCABULARY, LENGTH), "model") == []
    return ready(Decoder(config, VOCABULARY, LENGTH))


def ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", RESIDUALS.names())
def test_token_by_token_gives_the_same(kind: str) -> None:
    model, about = built(kind), Tokens.from_ids(ids())
    cache: dict[str, Any] = {}
    steps = []
    for place in range(LENGTH):
        one = Tokens(
            about.ids[:, place : place + 1], about.positions[:, place : place + 1], forward=Forward(cache=cache)
        )
        steps.append(model(one))
    torch.testing.assert_close(torch.cat(steps, 1), model(about), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", RESIDUALS.names())
def test_packed_documents_do_not_see_each_other(kind: str) -> None:
    model = built(kind)
    documents = torch.tensor([[0] * 4 + [1] * (LENGTH - 4)]).expand(2, -1)
    packed = model(Tokens.from_ids(ids(), documents=documents))
    apart = [model(Tokens.from_ids(part)) for part in ids().split((4, LENGTH - 4), 1)]
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-9, atol=1e-9)

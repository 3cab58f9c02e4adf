"""Positions that are added to the input of each block: the sum by hand, a table for each layer, and refusals."""

from typing import Any

import torch

from tests.conformance.made import ready
from xscale.core.config import decode
from xscale.nn.model.decoder import Decoder
from xscale.nn.tokens import Tokens

VOCABULARY, LENGTH = 17, 9
BLOCK: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 20}}


def config(position: Any, **model: Any) -> Any:
    stack = {"depth": 3, "block": {**BLOCK, "position": position}}
    return decode(Decoder.Config, {"width": 12, "position": "none", "stack": stack, **model})


def built(position: Any, **model: Any) -> Any:
    chosen = config(position, **model)
    assert Decoder.check(chosen, (VOCABULARY, LENGTH), "model") == []
    return ready(Decoder(chosen, VOCABULARY, LENGTH))


def tokens(**others: Any) -> Tokens:
    return Tokens.from_ids(torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1)), **others)


def test_each_block_adds_a_table_of_its_own_to_its_input() -> None:
    model, about = built("learned"), tokens()
    blocks = list(model.stack.blocks.values())
    tables = [block.position.weight for block in blocks]
    assert [tuple(table.shape) for table in tables] == [(LENGTH, 12)] * 3
    assert len({float(table.sum()) for table in tables}) == 3
    x = model.embed(about)
    for block, table in zip(blocks, tables, strict=True):
        x = x + table
        for sublayer in block.sublayers().values():
            x = sublayer(x, about)
    torch.testing.assert_close(model.stack(model.embed(about), about), model.stack.norm(x), rtol=1e-12, atol=1e-12)


def test_a_packed_document_counts_from_its_own_start() -> None:
    model = built("sinusoidal")
    ids = tokens().ids
    documents = (torch.arange(LENGTH) >= 4).long().expand(2, -1)
    packed = model(Tokens.from_ids(ids, documents=documents))
    alone = model(Tokens.from_ids(ids[:, 4:]))
    torch.testing.assert_close(packed[:, 4:], alone, rtol=1e-10, atol=1e-10)


def test_without_it_nothing_changes() -> None:
    names = [name for name, _ in built(None).named_parameters()]
    assert not [name for name in names if "position" in name]


def test_positions_within_attention_are_refused() -> None:
    (problem,) = Decoder.check(config("rope"), (VOCABULARY, LENGTH), "model")
    assert str(problem).startswith("model.stack.block.position: 'rope' acts within attention")
    can = "floater, learnable_sinusoidal, learned or sinusoidal"
    assert f"position.kind={can}. Or take it as mixer.position." in str(problem)
    odd = config("sinusoidal", width=15)
    problems = [str(problem) for problem in Decoder.check(odd, (VOCABULARY, LENGTH), "model")]
    assert "model.stack.block.position: needs an even width, got width=15. Take model.width=16." in problems

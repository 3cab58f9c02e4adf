"""Exits of the decoder of an encoder-decoder: losses, leaving, and decoding over a cache, block by block."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import close, ready
from xscale.core.config import decode
from xscale.generate.exit_policy import exit_policy_of
from xscale.nn.depth.early_exit import EARLY_EXIT, EarlyExit
from xscale.nn.forward import Forward
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.tokens import Tokens

VOCABULARY, LENGTH, DEPTH = 17, 9, 4
BLOCK: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 20}}
TWO_MIXERS: dict[str, Any] = {**BLOCK, "sublayers": [{"part": part} for part in ("cross", "mixer", "ffn")]}
POLICY = {"criterion": "entropy", "threshold": 2.0}


def built(block: dict[str, Any] = BLOCK) -> Any:
    stack = {"depth": DEPTH, "block": block, "exits": {"weights": "linear", "policy": POLICY}}
    stacks = {"encoder": {"depth": 2, "block": BLOCK}, "decoder": stack}
    config = decode(EncoderDecoder.Config, {"width": 12, "position": "learned", "scale_head": True, **stacks})
    assert EncoderDecoder.check(config, (VOCABULARY, LENGTH), "model") == []
    made = ready(EncoderDecoder(config, VOCABULARY, LENGTH))
    for part in made.decoder.exits.at.values():
        part.head.weight.data.mul_(4)
    made.head.weight.data.mul_(4)
    return made


def ids(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


SOURCE = Tokens.from_ids(ids(1))


def literal(made: Any, threshold: float) -> tuple[list[Tensor], Tensor]:
    """The logits after each block, and the blocks that each token was computed in."""
    memory, about = made.encode(SOURCE), Tokens.from_ids(ids(2))
    x, found = made.target(about), []
    blocks = torch.full((2, LENGTH), DEPTH)
    for layer, block in enumerate(made.decoder.blocks.values()):
        x = torch.where((blocks > layer)[..., None], block(x, about, memory, SOURCE), x)
        part = made.decoder.exits.at[str(layer)] if layer + 1 < DEPTH else None
        norm, head = (made.decoder.norm, made.head) if part is None else (part.norm, part.head)
        found.append(norm(x) / 12**0.5 @ head.weight.mT)
        p = found[-1].detach().softmax(-1)
        leaves = (-(p * p.log()).sum(-1) < threshold) & (blocks == DEPTH)
        blocks = torch.where(leaves, layer + 1, blocks)
    return found, blocks


def test_the_losses_of_the_exits_are_added() -> None:
    made, targets = built(), ids(3)
    found, _ = literal(made, 0.0)
    losses = [F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") for logits in found]
    total = torch.stack([0.1 * (layer + 1) / 10 * loss for layer, loss in enumerate(losses)]).sum()
    parameters = list(made.parameters())
    expected = torch.autograd.grad(total, parameters, allow_unused=True)
    loss = made(Tokens.from_ids(ids(2), target_weight=0.1, aux_loss_weight=1.0), targets, SOURCE)
    assert close(loss, losses[-1])
    for right, gradient in zip(expected, torch.autograd.grad(0.1 * loss, parameters, allow_unused=True), strict=True):
        assert (right is None) == (gradient is None)
        assert right is None or close(gradient, right)


@pytest.mark.parametrize("block", [BLOCK, TWO_MIXERS], ids=["cross-attention last", "cross-attention first"])
@torch.no_grad()
def test_tokens_leave_and_decoding_over_a_cache_is_the_parallel_form(block: dict[str, Any]) -> None:
    made = built(block)
    policy = exit_policy_of(made)
    assert policy is not None
    found, blocks = literal(made, policy.threshold)
    assert len(blocks.unique()) > 1
    early = EarlyExit(policy)
    whole = made(Tokens.from_ids(ids(2), signals={EARLY_EXIT: early}), None, SOURCE)
    assert early.blocks is not None
    assert torch.equal(early.blocks, blocks)
    index = (blocks - 1)[None, ..., None].expand(1, 2, LENGTH, VOCABULARY)
    assert close(whole, torch.stack(found).gather(0, index)[0])
    cache: dict[str, Any] = {}
    rows = []
    for at in range(LENGTH):
        positions = torch.full((2, 1), at)
        tokens = Tokens(ids(2)[:, at : at + 1], positions, forward=Forward(cache=cache))
        rows.append(made(tokens.with_signals({EARLY_EXIT: EarlyExit(policy)}), None, SOURCE))
    assert close(torch.cat(rows, 1), whole)

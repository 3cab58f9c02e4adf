"""Multi-token prediction against the equations of DeepSeek-V3, section 2.2, token by token; what it leaves alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, ready
from tests.train.tiny import recipe
from xscale.core.config import decode
from xscale.measure.flops import size, training_flops
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.model.decoder import Decoder
from xscale.nn.tokens import Stats, Tokens

VOCABULARY, LENGTH, DEPTH, WEIGHT = 17, 9, 2, 0.6
BLOCK: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 20}}


def config(*, tied: bool = True, depth: int = DEPTH, **changes: Any) -> dict[str, Any]:
    mtp = {"depth": depth, "loss_weight": WEIGHT}
    stack = {"depth": 2, "block": BLOCK, **changes.pop("stack", {})}
    return {"kind": "decoder", "width": 12, "tied": tied, "stack": stack, "mtp": mtp, **changes}


def built(**changes: Any) -> Any:
    given = config(**changes)
    del given["kind"]
    chosen = decode(Decoder.Config, given)
    assert Decoder.check(chosen, (VOCABULARY, LENGTH), "model") == []
    return ready(Decoder(chosen, VOCABULARY, LENGTH)).train()


def text(documents: Tensor | None = None) -> tuple[Tokens, Tensor]:
    """Tokens t_1 .. t_T with their next tokens t_2 .. t_(T+1), none where a document begins."""
    drawn = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    targets = drawn[:, 1:]
    if documents is not None:
        targets = targets.masked_fill(documents[:, 1:] != documents[:, :-1], IGNORE_INDEX)
        documents = documents[:, :-1]
    return Tokens.from_ids(drawn[:, :-1], documents), targets


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def by_equations(made: Any, tokens: Tokens, targets: Tensor) -> Tensor:
    """L_main + lambda / D sum_k L^k times the number of targets, sample by sample and token by token."""
    table, head, total = made.embed.table.weight, made.head.weight, torch.zeros((), dtype=torch.float64)
    for b in range(len(tokens.ids)):
        documents = [0] * LENGTH if tokens.documents is None else tokens.documents[b].tolist()
        for document in sorted(set(documents)):
            at = [i for i in range(LENGTH) if documents[i] == document]
            ids = tokens.ids[b, at]
            alone = Tokens.from_ids(ids[None])
            h = made.stack(made.embed(alone), alone)[0]  # [T, D]
            # The token after the last one of the sample is the last target; a document's own end has none.
            following = [*ids.tolist()[1:], targets[b, at[-1]].item()]
            for i in range(len(at)):
                if following[i] != IGNORE_INDEX:
                    total = total - (head @ h[i]).log_softmax(0)[following[i]]
            for k in range(1, DEPTH + 1):
                part = made.mtp.at[str(k)]
                count = len(at) - k
                if count <= 0:
                    break
                merged = []
                for i in range(count):
                    left, right = rms(h[i], part.hidden_norm.weight), rms(table[ids[i + k]], part.embedding_norm.weight)
                    merged.append(part.project.weight @ torch.cat((left, right)))
                h = part.stack(torch.stack(merged)[None], Tokens.from_ids(ids[None, :count]))[0]
                for i in range(count):
                    if following[i + k] != IGNORE_INDEX:
                        total = total - WEIGHT / DEPTH * (head @ h[i]).log_softmax(0)[following[i + k]]
    return total


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("packs", [False, True])
def test_the_losses_and_gradients_are_those_of_the_equations(tied: bool, packs: bool) -> None:
    made = built(tied=tied)
    documents = torch.tensor([[0] * 4 + [1] * 2 + [2] * 4, [0] * 9 + [1]]) if packs else None
    tokens, targets = text(documents)
    count = int((targets != IGNORE_INDEX).sum())
    stats = Stats()
    loss = made(tokens.with_forward(target_weight=1 / count, aux_loss_weight=1.0, stats=stats), targets)
    (loss / count).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in made.named_parameters()}
    made.zero_grad()
    expected = by_equations(made, tokens, targets)
    (expected / count).backward()
    for name, parameter in made.named_parameters():
        assert close(gradients[name], parameter.grad), name
    assert any(name.startswith("mtp.at.2.") for name in gradients)
    means = stats.means()
    ahead = sum(means[f"mtp.at.{k}/loss"].item() for k in (1, 2))
    assert loss.item() / count + WEIGHT / DEPTH * ahead == pytest.approx(expected.item() / count, rel=1e-10)


def test_nothing_changes_but_training() -> None:
    made = built()
    tokens, targets = text()
    plain = decode(Decoder.Config, {key: value for key, value in config().items() if key not in ("kind", "mtp")})
    without = ready(Decoder(plain, VOCABULARY, LENGTH))
    without.load_state_dict({name: made.state_dict()[name] for name in without.state_dict()})
    assert torch.equal(made(tokens, targets), without(tokens, targets))
    assert torch.equal(made(tokens), without(tokens))
    trained = made(tokens.with_forward(target_weight=0.1), targets)
    assert torch.equal(trained, without(tokens, targets)), "the reported loss is that of the next token"


def test_no_target_is_read_before_it_is_predicted() -> None:
    """A module's states at token i depend on the tokens up to i + k alone."""
    made = built().eval()
    seen: list[Tensor] = []
    made.mtp.at["2"].register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    tokens, targets = text()
    training = tokens.with_forward(target_weight=1.0)
    made(training, targets)
    changed = tokens.ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCABULARY
    made(replace(training, ids=changed), targets)
    same = (seen[0] == seen[1]).all(-1).all(0).tolist()
    assert same[:4] == [True] * 4, "tokens 0 to 3 look 2 ahead, at 5 at most"
    assert not same[4]


def test_flops_count_the_modules() -> None:
    made, depth = built(), 3
    deeper = built(depth=depth)
    part = size(deeper).multiplied - size(made).multiplied
    block = sum(parameter.numel() for parameter in made.mtp.at["1"].parameters() if parameter.dim() > 1)
    assert part == block + made.head.weight.numel()
    assert training_flops(deeper, LENGTH) > training_flops(made, LENGTH) + 6 * part * LENGTH - 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stack": {"halting": {}}}, "halting repeats blocks. Take null, or model.stack.halting=null."),
        ({"stack": {"exits": {}}}, "Take null, or model.stack.exits=null."),
        ({"stack": {"block": {**BLOCK, "residual": "reversible"}}}, "two residual streams"),
        ({"stack": {"block": {**BLOCK, "norm": "batch"}}}, "norm 'batch' would count tokens without a target ahead"),
        (
            {
                "stack": {
                    "block": {**BLOCK, "mixer": {"kind": "attention", "core": {"kind": "general_prior", "previous": 1}}}
                }
            },
            "hands on no attention scores",
        ),
    ],
    ids=["halting", "exits", "reversible", "batch_norm", "scores"],
)
def test_what_has_no_module_is_refused(changes: dict[str, Any], sentence: str) -> None:
    asked = recipe(Path("x"), model=config(**changes), objective={"kind": "causal"})
    assert any(str(problem).startswith("model.mtp: ") and sentence in str(problem) for problem in asked.check(1))

"""Gates of sublayers under a budget, against the equations written out token by token."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, drawn, ready
from xscale.core.config import decode
from xscale.nn.depth import gates
from xscale.nn.depth.gates import GATES
from xscale.nn.forward import Forward
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.random import reseed
from xscale.nn.tokens import Stats, Tokens

VOCABULARY, LENGTH, BUDGETS, NOISE = 17, 7, [0.25, 0.5, 1.0], 0.8
BLOCK: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 20}}


def model(kind: type[Any] = Decoder, *, bias: float | None = None, **gates: Any) -> Any:
    """A model whose gates differ from token to token; `bias` sets them all."""
    gates = {"budgets": BUDGETS, "noise": NOISE, "loss_weight": 0.6, "hidden": 5, **gates}
    stack = {"depth": 2, "block": {**BLOCK, "gates": gates}}
    stacks = {"encoder": stack, "decoder": stack} if kind is EncoderDecoder else {"stack": stack}
    config = decode(kind.Config, {"width": 12, "position": "learned", **stacks})
    assert kind.check(config, (VOCABULARY, LENGTH), "model") == []
    made = ready(kind(config, VOCABULARY, LENGTH))
    for name, parameter in made.named_parameters():
        if ".gate." in name:
            parameter.data.copy_(drawn(*parameter.shape) if bias is None else torch.zeros_like(parameter))
            if bias is not None and name.endswith(".gate.bias"):
                parameter.data.fill_(bias)
    return made


def tokens(**others: Any) -> Tokens:
    return Tokens.from_ids(torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1)), **others)


def gate_of(gate: Any, x: Tensor, budget: int, noise: Tensor | float) -> Tensor:
    """The noisy output of the control network for one token x [D]."""
    hidden = [torch.relu(row @ x + b) for row, b in zip(gate.first, gate.biases[budget], strict=True)]
    return sum(w * h for w, h in zip(gate.second[0], hidden, strict=True)) + gate.bias[0] + noise  # type: ignore[no-any-return]


def literal(made: Any, x: Tensor, about: Tokens, budgets: list[int], alpha: float, *, hard: bool) -> Any:
    """Outputs of the stack, and the mean gate of each sequence."""
    gates: list[list[Tensor]] = [[] for _ in budgets]
    for block in made.stack.blocks.values():
        if about.forward.rng_seed is not None:
            reseed(about.forward.rng_seed, block.path)
        for sublayer in (block.mixer, block.ffn):
            noise = torch.randn(x.shape[:2], dtype=x.dtype) if alpha else torch.zeros(x.shape[:2], dtype=x.dtype)
            added = sublayer.part(sublayer.norm(x, about), about)
            rows = []
            for row, budget in enumerate(budgets):
                for at in range(x.shape[1]):
                    logit = gate_of(sublayer.gate, x[row, at], budget, alpha * noise[row, at])
                    g = (logit >= 0).to(x.dtype) if hard else torch.sigmoid(logit)
                    gates[row].append(g)
                    rows.append(x[row, at] + g * added[row, at])
            x = torch.stack(rows).view_as(x)
    means = torch.stack([torch.stack(values).mean() for values in gates])
    return made.stack.norm(x, about), means


def drawn_budgets(seed: int, batch: int) -> list[int]:
    reseed(seed, GATES)
    return torch.randint(len(BUDGETS), (batch,)).tolist()


def test_training_has_noisy_gates_and_the_loss_of_the_budgets() -> None:
    made, stats = model().train(), Stats()
    about = tokens(rng_seed=3, progress=0.5, aux_loss_weight=0.7, stats=stats)
    budgets = drawn_budgets(3, 4)
    assert len(set(budgets)) > 1, "the sequences have different budgets"
    x = made.embed(about).detach()
    out = made.stack(x, about)
    wanted, means = literal(made, x, about, budgets, NOISE / 2, hard=False)
    assert close(out, wanted)
    assert math.isclose(float(stats.means()["stack.gates/computed"]), float(means.detach().mean()))
    weights, parameters = drawn(*out.shape), dict(made.stack.named_parameters())
    gradients = torch.autograd.grad((out * weights).sum(), list(parameters.values()))
    shortfall = (torch.tensor(BUDGETS, dtype=x.dtype)[torch.tensor(budgets)] - means).abs()
    loss = (wanted * weights).sum() + 0.7 * 0.6 * shortfall.mean()
    for name, gradient, right in zip(
        parameters, gradients, torch.autograd.grad(loss, list(parameters.values())), strict=True
    ):
        assert close(gradient, right), name


@pytest.mark.parametrize("budget", [0.25, None])
def test_evaluation_decides_by_the_sign(budget: float | None) -> None:
    made = model(budget=budget).eval()
    about, x = tokens(), made.embed(tokens())
    index = 2 if budget is None else 0
    wanted, means = literal(made, x, about, [index] * 4, 0.0, hard=True)
    assert 0 < means.min() < 1, "some sublayers are left out"
    assert close(made.stack(x, about), wanted)


def test_a_caller_may_choose_the_budgets() -> None:
    chosen = torch.zeros(4, dtype=torch.long)
    small, made = model(budget=0.25).eval(), model().eval()
    assert close(made(tokens().with_signals({gates.BUDGETS: chosen})), small(tokens()))
    assert not close(made(tokens()), small(tokens()))


def test_open_gates_are_the_plain_block_and_shut_ones_leave_the_residual_stream() -> None:
    about = tokens()
    made = model(bias=1.0).eval()
    x = made.embed(about)
    y = x
    for block in made.stack.blocks.values():
        for sublayer in block.sublayers().values():
            y = y + sublayer.part(sublayer.norm(y, about), about)
    assert close(made.stack(x, about), made.stack.norm(y, about))
    shut = model(bias=-1.0).eval()
    assert close(shut.stack(x, about), shut.stack.norm(x, about))


def test_no_token_reads_the_gates_of_later_ones() -> None:
    made = model().train()
    about = tokens(rng_seed=3, progress=1.0, aux_loss_weight=1.0)
    x = made.embed(about).detach()
    changed = x.clone()
    changed[:, 4:] += 1
    assert close(made.stack(changed, about)[:, :4], made.stack(x, about)[:, :4])


@pytest.mark.parametrize("kind", [Decoder, EncoderDecoder])
def test_decoding_over_a_cache_is_the_parallel_form(kind: type[Any]) -> None:
    made, ids = model(kind).eval(), tokens().ids
    source = {"source": tokens()} if kind is EncoderDecoder else {}
    whole, rows = made(tokens(), **source), []
    cache: dict[str, Any] = {}
    for first, last in [(0, 4), (4, 5), (5, 7)]:
        positions = torch.arange(first, last).expand(4, -1)
        rows.append(made(Tokens(ids=ids[:, first:last], positions=positions, forward=Forward(cache=cache)), **source))
    assert close(torch.cat(rows, 1), whole)


def test_encoder_and_decoder_draw_the_same_budgets() -> None:
    made = model(EncoderDecoder).train()
    about = tokens(rng_seed=3)
    first, second = (stack.gates.draw(about).get(gates.BUDGETS) for stack in (made.encoder, made.decoder))
    assert first.tolist() == second.tolist() == drawn_budgets(3, 4)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"gates": {"budgets": [0.5, 0.25]}}, "fractions that ascend"),
        ({"gates": {"budget": 0.3}}, "and not for 0.3"),
        ({"gates": {}, "residual": "reversible"}, "the gates' sum, which blocks hand on"),
        ({"gates": {}, "residual": "none"}, "leaves the residual stream as it is, which 'none' does not"),
    ],
)
def test_gates_that_cannot_be_are_refused(block: dict[str, Any], message: str) -> None:
    config = decode(Decoder.Config, {"width": 12, "stack": {"depth": 2, "block": {**BLOCK, **block}}})
    problems = Decoder.check(config, (VOCABULARY, LENGTH), "model")
    assert any(message in str(problem) and problem.path.startswith("model.stack.block.gates") for problem in problems)

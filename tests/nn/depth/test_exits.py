"""Exits: their losses and gradients, and each policy of leaving, against the equations written out token by token."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import close, ready
from xscale.core.config import decode
from xscale.generate.generate import generate
from xscale.nn.depth.early_exit import EARLY_EXIT, EarlyExit, ExitPolicyConfig
from xscale.nn.forward import Forward
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.encoder import Encoder
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.tokens import Stats, Tokens

VOCABULARY, LENGTH, DEPTH = 17, 9, 5
BLOCK: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 20}}
POLICIES: list[dict[str, Any]] = [
    {"criterion": "entropy", "threshold": 2.25},
    {"criterion": "patience", "threshold": 1},
    {"criterion": "uncertainty", "threshold": 0.89, "window": 2},
    {"criterion": "vote", "threshold": 1.25, "power": 0.4},
]


def config(kind: type[Any] = Decoder, *, depth: int = DEPTH, model: Any = None, **exits: Any) -> Any:
    stack = {"depth": depth, "block": BLOCK, "exits": exits}
    return decode(kind.Config, {"width": 12, "position": "learned", "stack": stack, **(model or {})})


def built(kind: type[Any] = Decoder, **exits: Any) -> Any:
    chosen = config(kind, **exits)
    assert kind.check(chosen, (VOCABULARY, LENGTH), "model") == []
    made = ready(kind(chosen, VOCABULARY, LENGTH))
    for part in made.stack.exits.at.values():
        if part.head is not None:
            # Heads that are alike, of whose predictions some agree.
            part.head.weight.data.mul_(0.3).add_(made.head.weight.data)
    return made


def ids(seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def targets() -> Tensor:
    return ids(2).masked_fill(ids(3) < 5, IGNORE_INDEX)


def states(made: Any, about: Tokens) -> list[Tensor]:
    """The hidden states after each block."""
    x, after = made.embed(about), []
    for block in made.stack.blocks.values():
        for sublayer in block.sublayers().values():
            x = sublayer(x, about)
        after.append(x)
    return after


def predicted(made: Any, layer: int, x: Tensor) -> Tensor:
    """Logits of the exit after a block, or of the model's head after the last."""
    norm, weight = made.stack.norm, made.head.weight
    if layer < len(made.stack.blocks) - 1:
        part = made.stack.exits.at[str(layer)]
        norm, weight = part.norm, weight if part.head is None else part.head.weight
    logits: Tensor = (x if norm is None else norm(x)) @ weight.mT
    return logits


@pytest.mark.parametrize("kind", [Decoder, Encoder])
@pytest.mark.parametrize(
    ("exits", "weights"),
    [
        ({}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}),
        ({"weights": "linear"}, {0: 1 / 15, 1: 2 / 15, 2: 3 / 15, 3: 4 / 15, 4: 5 / 15}),
        ({"weights": "linear", "blocks": [1, 3], "head": "shared"}, {1: 2 / 11, 3: 4 / 11, 4: 5 / 11}),
        ({"blocks": [0], "norm": False}, {0: 1.0, 4: 1.0}),
    ],
    ids=["equal", "linear", "some, shared", "without norm"],
)
def test_the_gradient_is_that_of_the_weighted_sum(kind: type[Any], exits: Any, weights: dict[int, float]) -> None:
    made, stats = built(kind, **exits), Stats()
    about = Tokens.from_ids(ids(), aux_loss_weight=0.5, target_weight=0.1, stats=stats)
    after = states(made, about)
    losses = {
        layer: F.cross_entropy(predicted(made, layer, after[layer]).flatten(0, 1), targets().flatten(), reduction="sum")
        for layer in weights
    }
    loss = made(about, targets())
    assert close(loss, losses[4]), "the loss is that of the model's head"
    wanted = torch.stack([0.1 * weight * losses[layer] for layer, weight in weights.items()]).sum()
    parameters = dict(made.named_parameters())
    expected = torch.autograd.grad(wanted, list(parameters.values()))
    for name, right, gradient in zip(
        parameters, expected, torch.autograd.grad(0.1 * loss, list(parameters.values())), strict=True
    ):
        assert close(gradient, right), name
    means = stats.means()
    assert means.keys() == {f"stack.exits.at.{layer}/loss" for layer in weights if layer != 4}
    for layer in set(weights) - {4}:
        # A half of the step's sequences, whose other targets are elsewhere: the mean over both is the step's loss.
        assert close(means[f"stack.exits.at.{layer}/loss"], losses[layer].detach() * 0.1 / 0.5)


def test_without_a_weight_of_targets_only_the_last_loss_has_a_gradient() -> None:
    made = built()
    made(Tokens.from_ids(ids()), targets()).backward()
    assert all(parameter.grad is None for parameter in made.stack.exits.parameters())


def surprise(logits: Tensor) -> float:
    """The entropy of one prediction."""
    p = logits.detach().softmax(-1)
    return float(-(p * p.log()).sum())


class Literal:
    """The logits, and the blocks that each token was computed in, token by token."""

    def __init__(self, made: Any, policy: dict[str, Any], *, causal: bool) -> None:
        self.policy, self.causal = policy, causal
        about = Tokens.from_ids(ids())
        x = made.embed(about)
        rows, length = ids().shape
        self.places = [(row, at) for row in range(rows) for at in range(length)]
        self.blocks: dict[Any, int] = {}
        self.said: dict[Any, Tensor] = {}
        self.history = history = list[Tensor]()
        for layer, block in enumerate(made.stack.blocks.values()):
            after = x
            for sublayer in block.sublayers().values():
                after = sublayer(after, about)
            x = torch.stack([x[place] if place in self.blocks else after[place] for place in self.places]).view_as(x)
            history.append(predicted(made, layer, x))
            last = layer == len(made.stack.blocks) - 1
            leaving = [place for place in self.places if place not in self.blocks]
            for place in [place for place in leaving if last or self.leaves(place, history)]:
                self.blocks[place] = layer + 1
                self.said[place] = self.output(place, history)

    def leaves(self, place: tuple[int, int], history: list[Tensor]) -> bool:
        threshold, name = float(self.policy["threshold"]), self.policy["criterion"]
        labels = [int(logits[place].argmax()) for logits in history]
        if name == "entropy":
            return surprise(history[-1][place]) < threshold
        if name == "patience":
            count = 0
            for one, other in itertools.pairwise(labels):
                count = count + 1 if one == other else 0
            return count >= threshold
        if name == "vote":
            scale: float = len(labels) ** float(self.policy["power"])
            return max(map(labels.count, labels)) / scale >= threshold
        row, at = place
        reach = int(self.policy["window"])
        end = at if self.causal else min(at + reach, LENGTH - 1)
        window = [(row, near) for near in range(max(at - reach, 0), end + 1)]
        return max(surprise(history[-1][near]) / math.log(VOCABULARY) for near in window) < threshold

    def output(self, place: tuple[int, int], history: list[Tensor]) -> Tensor:
        if self.policy["criterion"] != "vote":
            return history[-1][place]
        labels = [int(logits[place].argmax()) for logits in history]
        most = max(map(labels.count, labels))
        winner = [label for label in labels if labels.count(label) == most][-1]
        return torch.stack([history[n][place] for n, label in enumerate(labels) if label == winner]).mean(0)


@pytest.mark.parametrize("policy", POLICIES, ids=[policy["criterion"] for policy in POLICIES])
@pytest.mark.parametrize("kind", [Decoder, Encoder])
@torch.no_grad()
def test_a_token_leaves_at_the_first_exit_that_the_policy_allows(kind: type[Any], policy: dict[str, Any]) -> None:
    made = built(kind, policy=policy)
    literal = Literal(made, policy, causal=kind is Decoder)
    early = EarlyExit(made.stack.exits.config.policy)
    logits = made(Tokens.from_ids(ids(), signals={EARLY_EXIT: early}))
    assert early.blocks is not None
    assert len(set(literal.blocks.values())) > 2, "tokens leave at different exits, and some do not"
    assert early.blocks.flatten().tolist() == [literal.blocks[place] for place in literal.places]
    assert close(logits.flatten(0, 1), torch.stack([literal.said[place] for place in literal.places]))


@pytest.mark.parametrize("policy", POLICIES, ids=[policy["criterion"] for policy in POLICIES])
@torch.no_grad()
def test_decoding_over_a_cache_is_the_parallel_form(policy: dict[str, Any]) -> None:
    made = built(policy=policy)
    whole = made(Tokens.from_ids(ids(), signals={EARLY_EXIT: EarlyExit(decode(ExitPolicyConfig, policy))}))
    cache: dict[str, Any] = {}
    rows, skipped = [], False
    for first, last in [(0, 4), *((at, at + 1) for at in range(4, LENGTH))]:
        early = EarlyExit(decode(ExitPolicyConfig, policy))
        positions = torch.arange(first, last).expand(2, -1)
        tokens = Tokens(ids()[:, first:last], positions, forward=Forward(cache=cache))
        rows.append(made(tokens.with_signals({EARLY_EXIT: early})))
        assert early.blocks is not None
        skipped = skipped or int(early.blocks.max()) < DEPTH
    assert close(torch.cat(rows, 1), whole)


@pytest.mark.parametrize("policy", POLICIES, ids=[policy["criterion"] for policy in POLICIES])
@torch.no_grad()
def test_later_tokens_do_not_change_when_a_token_leaves(policy: dict[str, Any]) -> None:
    made = built(policy=policy)
    changed = ids()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCABULARY
    one, other = (
        made(Tokens.from_ids(text, signals={EARLY_EXIT: EarlyExit(decode(ExitPolicyConfig, policy))}))
        for text in (ids(), changed)
    )
    assert close(one[:, :5], other[:, :5])
    assert not close(one[:, 5:], other[:, 5:])


def gradients(made: Any, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of all parameters by name; zeros where the loss does not reach."""
    parameters = dict(made.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }


def test_the_stages_train_the_model_and_then_the_exits() -> None:
    made = built(two_stage=0.5)
    about = Tokens.from_ids(ids(), target_weight=1.0)
    after = states(made, about)
    last = F.cross_entropy(predicted(made, 4, after[4]).flatten(0, 1), targets().flatten(), reduction="sum")
    inner = [predicted(made, layer, after[layer].detach()).flatten(0, 1) for layer in range(4)]
    exits = torch.stack([F.cross_entropy(logits, targets().flatten(), reduction="sum") for logits in inner]).sum()
    for progress, wanted in ((0.0, last), (0.49, last), (0.5, exits), (None, exits)):
        loss = made(Tokens.from_ids(ids(), target_weight=1.0, progress=progress), targets())
        assert close(loss, last), "the loss is that of the model's head"
        right = gradients(made, wanted)
        for name, gradient in gradients(made, loss).items():
            assert close(gradient, right[name]), (progress, name)


def test_losses_end_by_the_depth_of_their_block() -> None:
    made = built(stop="by_depth")
    cases: list[tuple[float, set[int]]] = [
        (0, {0, 1, 2, 3}),
        (0.1, {1, 2, 3}),
        (0.29, {2, 3}),
        (0.39, {3}),
        (0.4, set()),
    ]
    for progress, trained in cases:
        made.zero_grad()
        about = Tokens.from_ids(ids(), target_weight=1.0, aux_loss_weight=1.0, progress=progress, stats=Stats())
        made(about, targets()).backward()
        found = {layer for layer in range(4) if made.stack.exits.at[str(layer)].head.weight.grad is not None}
        assert found == trained, progress
        assert about.forward.stats is not None
        assert len(about.forward.stats.means()) == 4, "the metrics have the same columns in all steps"


def test_the_second_target_is_the_token_after_the_next() -> None:
    made, stats = built(blocks=[0], second_target=0.5), Stats()
    given = targets()
    about = Tokens.from_ids(ids(), target_weight=0.1, aux_loss_weight=1.0, stats=stats)
    after = states(made, about)
    rows = (made.stack.norm(after[4]) @ made.stack.exits.second.head.weight.mT).log_softmax(-1)
    second = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        for at in range(LENGTH - 1):
            if given[row, at] != IGNORE_INDEX and given[row, at + 1] != IGNORE_INDEX:
                second = second - rows[row, at, given[row, at + 1]]
    losses = [
        F.cross_entropy(predicted(made, layer, after[layer]).flatten(0, 1), given.flatten(), reduction="sum")
        for layer in (0, 4)
    ]
    wanted = gradients(made, losses[0] + losses[1] + 0.5 * second)
    loss = made(about, given)
    assert close(loss, losses[1])
    for name, gradient in gradients(made, 0.1 * loss).items():
        assert close(gradient, 0.1 * wanted[name]), name
    assert close(stats.means()["stack.exits.second/loss"], 0.1 * second.detach())


@pytest.mark.parametrize("policy", POLICIES, ids=[policy["criterion"] for policy in POLICIES])
def test_self_sampling_trains_on_copied_states(policy: dict[str, Any]) -> None:
    made = built(policy=policy, self_sampling=0.5)
    literal = Literal(made, policy, causal=True)
    assert len(set(literal.blocks.values())) > 1
    losses = [F.cross_entropy(row.flatten(0, 1), targets().flatten(), reduction="sum") for row in literal.history]
    wanted = gradients(made, torch.stack(losses).sum())
    loss = made(Tokens.from_ids(ids(), target_weight=1.0, progress=0.5), targets())
    assert close(loss, losses[-1])
    for name, gradient in gradients(made, loss).items():
        assert close(gradient, wanted[name]), name
    before = made(Tokens.from_ids(ids(), target_weight=1.0, progress=0.49), targets())
    assert close(before, made(Tokens.from_ids(ids()), targets())), "all blocks are computed before"


@torch.no_grad()
def test_a_window_stays_within_its_document() -> None:
    policy = decode(ExitPolicyConfig, POLICIES[2])
    for kind in (Decoder, Encoder):
        made = built(kind, policy=POLICIES[2])
        documents = (torch.arange(LENGTH) >= 4).long().expand(2, -1)
        packed = made(Tokens.from_ids(ids(), documents=documents, signals={EARLY_EXIT: EarlyExit(policy)}))
        alone = made(Tokens.from_ids(ids()[:, 4:], signals={EARLY_EXIT: EarlyExit(policy)}))
        assert close(packed[:, 4:], alone)


@torch.no_grad()
def test_generation_without_leaving_is_plain_generation() -> None:
    made = built(policy={"criterion": "entropy", "threshold": 0})
    policy, prompt = made.stack.exits.config.policy, ids()[0, :3]
    plain = made(Tokens.from_ids(ids()))
    assert torch.equal(made(Tokens.from_ids(ids(), signals={EARLY_EXIT: EarlyExit(policy)})), plain)
    usual: dict[str, Any] = {"end": -1, "temperature": 0.9, "top_k": None, "window": LENGTH}
    texts = [generate(made, prompt, 6, policy=chosen, **usual) for chosen in (policy, None)]
    assert texts[0].tolist() == texts[1].tolist()
    assert len(texts[0]) == 6


@torch.no_grad()
def test_generation_at_the_first_exit_is_that_of_a_model_of_one_block() -> None:
    made = built(policy={"criterion": "entropy", "threshold": 99})
    early = EarlyExit(made.stack.exits.config.policy)
    first = predicted(made, 0, states(made, Tokens.from_ids(ids()))[0])
    assert close(made(Tokens.from_ids(ids(), signals={EARLY_EXIT: early})), first)
    out = generate(made, ids()[0, :3], 1, end=-1, temperature=0, policy=made.stack.exits.config.policy)
    assert int(out[0]) == int(first[0, 2].argmax())


@torch.no_grad()
def test_global_tokens_do_not_leave() -> None:
    chosen = config(Encoder, model={"global_tokens": 2}, policy=POLICIES[0])
    made = ready(Encoder(chosen, VOCABULARY, LENGTH))
    early = EarlyExit(ExitPolicyConfig(criterion="entropy", threshold=2.6))
    assert made(Tokens.from_ids(ids(), signals={EARLY_EXIT: early})).shape == (2, LENGTH, VOCABULARY)
    assert early.blocks is not None
    assert early.blocks.shape == (2, LENGTH)
    assert int(early.blocks.min()) < DEPTH


@pytest.mark.parametrize(
    ("exits", "said"),
    [
        ({"blocks": [1, 4]}, "has no inner block 4; its inner ones are 0 to 3, and the model's head follows its last"),
        ({"blocks": [2, 1, 1]}, "model.stack.exits.blocks: the blocks must ascend. Take [1, 2] or null."),
        ({"policy": {"criterion": "patience", "threshold": 4}}, "a count of exits, from 1 to 3 with 4 exits, got 4"),
        ({"policy": {"criterion": "patience", "threshold": 1.5}}, "got 1.5. Take 1, 2 or 3."),
        ({"blocks": [0], "policy": {"criterion": "patience", "threshold": 1}}, "there is one exit. Take model.stack"),
        ({"policy": {"criterion": "uncertainty", "threshold": 1.5, "window": 1}}, "uncertainty is at most 1, got 1.5"),
        ({"policy": {"criterion": "uncertainty", "threshold": 0.5}}, "policy.window: 'uncertainty' needs it"),
        ({"policy": {"criterion": "entropy", "threshold": 1, "window": 1}}, "is not used by 'entropy'. Take null, or"),
        ({"two_stage": 0.5, "head": "shared"}, "which is frozen. Take own, or model.stack.exits.two_stage=null."),
        ({"two_stage": 0.5, "weights": "linear"}, "are never trained together. Take equal, or model.stack.exits.two"),
        ({"two_stage": 0.5, "stop": "by_depth"}, "by_depth ends their losses before. Take never"),
        ({"two_stage": 0.5, "second_target": 0.5}, "two stages train nothing behind the exits. Take 0.0, or"),
        (
            {"self_sampling": 0.5},
            "tokens leave by a policy, and there is none. Take null, or 'model.stack.exits.policy=",
        ),
        ({"self_sampling": 0.5, "two_stage": 0.5, "policy": POLICIES[0]}, "all blocks are frozen then"),
        ({"policy": {"criterion": "vote", "threshold": 1}}, "policy.power: 'vote' needs it"),
        ({"policy": {"criterion": "vote", "threshold": 2.1, "power": 0.5}}, "reach at most 2, got 2.1"),
        ({"policy": {"criterion": "vote", "threshold": 0, "power": 0.5}}, "reach at most 2, got 0"),
    ],
)
def test_exits_that_cannot_be_are_refused(exits: dict[str, Any], said: str) -> None:
    problems = [str(problem) for problem in Decoder.check(config(**exits), (VOCABULARY, LENGTH), "model")]
    assert any(said in problem for problem in problems), problems


def test_stacks_that_have_no_exits_are_refused() -> None:
    def problems(**stack: Any) -> str:
        chosen = decode(Decoder.Config, {"width": 12, "position": "learned", "stack": {"block": BLOCK, **stack}})
        return " ".join(map(str, Decoder.check(chosen, (VOCABULARY, LENGTH), "model")))

    assert "model.stack.exits: the model's head follows the only block" in problems(depth=1, exits={})
    assert "the output is a mean over the blocks" in problems(depth=3, exits={}, halting={})
    ahead = [str(problem) for problem in Encoder.check(config(Encoder, second_target=0.5), (VOCABULARY, LENGTH), "m")]
    assert ahead == ["m.stack.exits.second_target: an encoder has no next token. Take 0.0."]
    prior = {**BLOCK, "mixer": {"kind": "attention", "heads": 2, "core": "prior_scores"}}
    assert not problems(depth=3, exits={}, block=prior)
    policy = {"policy": POLICIES[0]}
    assert "has no attention scores to hand on" in problems(depth=3, exits=policy, block=prior)
    two = decode(EncoderDecoder.Config, {"width": 12, "position": "learned", "encoder": {"block": BLOCK, "exits": {}}})
    refused = " ".join(map(str, EncoderDecoder.check(two, (VOCABULARY, LENGTH), "model")))
    assert "model.encoder.exits: the model's head does not read the output of this stack alone" in refused

"""Losses of distillation against literal loops over the papers' equations, in float64; their gradients by the graph."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from xscale.core.config import decode
from xscale.distill.teacher import observe_states
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.head.boundary_head import BOUNDARIES
from xscale.nn.head.class_head import ClassHead
from xscale.nn.head.distillation import (
    DistillConfig,
    StudentLosses,
    TeacherStates,
    add_width_maps,
    attention_scores,
)
from xscale.nn.head.distilled_head import FullVocabulary, SoftLoss
from xscale.nn.head.pooler import LABELS
from xscale.nn.init import Init
from xscale.nn.materialize import materialize
from xscale.nn.model.model import MODELS
from xscale.nn.module import substitute
from xscale.nn.tokens import Stats, Tokens
from xscale.settings.settings import Settings

VOCABULARY, LENGTH, BATCH = 11, 5, 2


def built(
    width: int, depth: int, seed: int, kind: str = "encoder", more: dict[str, Any] | None = None, **distill: Any
) -> nn.Module:
    """`more`: further keys of the model."""
    block = {"mixer": {"kind": "attention", "heads": 2, "bias": True}, "norm": "layer", "residual": "post"}
    model_config = {"kind": kind, "width": width, "position": "learned", "stack": {"depth": depth, "block": block}}
    settings = decode(Settings, {"model": {**model_config, **(more or {})}})
    model: nn.Module = MODELS.build(settings.model, VOCABULARY, LENGTH)
    add_width_maps(model, DistillConfig(**distill), width, 0.3)
    materialize(model, seed, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)).double() * 0.1)
    return model


def test_the_soft_loss_is_hinton_equation_4() -> None:
    torch.manual_seed(0)
    z = torch.randn(3, VOCABULARY, dtype=torch.float64, requires_grad=True)
    t = torch.randn(3, VOCABULARY, dtype=torch.float64)
    temperature = 2.5
    loss: Tensor = SoftLoss.apply(z, t, temperature, FullVocabulary())  # type: ignore[no-untyped-call]
    (gradient,) = torch.autograd.grad(loss, z)
    expected, slopes = 0.0, torch.zeros_like(z)
    for row in range(3):
        ours = [math.exp(float(value) / temperature) for value in z[row].detach()]
        theirs = [math.exp(float(value) / temperature) for value in t[row]]
        for word in range(VOCABULARY):
            p, q = theirs[word] / sum(theirs), ours[word] / sum(ours)
            expected += p * (math.log(p) - math.log(q))
            # Section 2, equation 2: dC/dz = (q - p) / T.
            slopes[row, word] = (q - p) / temperature
    assert math.isclose(loss.item(), expected, rel_tol=1e-12)
    assert torch.allclose(gradient, slopes, rtol=1e-10, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: SoftLoss.apply(x, t, temperature, FullVocabulary()), (z,))  # type: ignore[no-untyped-call]


WEIGHTS: dict[str, dict[str, Any]] = {
    "soft": {"soft_weight": 0.7, "hard_weight": 0.3, "temperature": 3.0},
    "soft over all": {"soft_weight": 0.7, "hard_weight": 0.0, "temperature": 3.0, "soft_over": "all"},
    "cosine": {"soft_weight": 0.0, "hard_weight": 0.0, "cosine_weight": 0.9},
    "embedding": {"soft_weight": 0.0, "hard_weight": 0.0, "embedding_weight": 1.1},
    "hidden": {"soft_weight": 0.0, "hard_weight": 0.0, "hidden_weight": 1.3},
    "attention": {"soft_weight": 0.0, "hard_weight": 0.0, "attention_weight": 1.7},
}


def literal(name: str, student: nn.Module, ours: dict[str, Any], theirs: dict[str, Any], targets: Tensor) -> Tensor:
    """The loss of a whole micro-batch, per target for soft and hard ones, by the equations."""
    if name == "soft":
        count, total = 0, torch.zeros((), dtype=torch.float64)
        for b in range(BATCH):
            for i in range(LENGTH):
                if targets[b, i] < 0:
                    continue
                count += 1
                p = (theirs["logits"][b, i] / 3.0).softmax(-1)
                log_q = (ours["logits"][b, i] / 3.0).log_softmax(-1)
                total = total + 0.7 * 9.0 * sum(p[w] * (p[w].log() - log_q[w]) for w in range(VOCABULARY))
                total = total - 0.3 * ours["logits"][b, i].log_softmax(-1)[targets[b, i]]
        return total / count
    total = torch.zeros((), dtype=torch.float64)
    if name == "soft over all":
        for b in range(BATCH):
            for i in range(LENGTH):
                p = (theirs["logits"][b, i] / 3.0).softmax(-1)
                total = total + 0.7 * 9.0 * (p * (p.log() - (ours["logits"][b, i] / 3.0).log_softmax(-1))).sum()
        return total / (BATCH * LENGTH)
    if name == "cosine":
        for b in range(BATCH):
            for i in range(LENGTH):
                s, t = ours["hidden"][-1][b, i], theirs["hidden"][-1][b, i]
                total = total + 1 - (s @ t) / (s.norm() * t.norm())
        return 0.9 * total / (BATCH * LENGTH)
    maps: Any = getattr(student, "distillation", None)
    if name == "embedding":
        difference: Tensor = ours["hidden"][0] @ maps.embedding.weight.T - theirs["hidden"][0]
        return 1.1 * (difference**2).sum() / difference.numel()
    for m in (1, 2):
        g = 2 * m
        if name == "hidden":
            difference = ours["hidden"][m] @ maps.hidden.weight.T - theirs["hidden"][g]
            total = total + 1.3 * (difference**2).sum() / difference.numel()
        else:
            for head in range(2):
                difference = ours["scores"][m - 1][:, head] - theirs["scores"][g - 1][:, head]
                total = total + 1.7 * (difference**2).mean() / 2
    return total


def literal_states(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Hidden states, scores and logits of a post-norm encoder, read off its modules by hooks on the linear maps."""
    states: dict[str, Any] = {"hidden": [], "scores": []}
    projected: dict[str, Tensor] = {}
    hooks = []
    model_: Any = model
    for layer, block in model_.stack.blocks.items():
        mixer = block.mixer.part

        def keep(_: Any, inputs: Any, out: Tensor, key: str) -> None:
            projected[key] = out

        for name in ("q", "k"):
            linear = getattr(mixer, name)
            hooks.append(linear.register_forward_hook(lambda m, i, o, key=f"{layer}{name}": keep(m, i, o, key)))
        hooks.append(block.register_forward_pre_hook(lambda m, i: states["hidden"].append(i[0])))
    hooks.append(model_.head.register_forward_pre_hook(lambda m, i: states["hidden"].append(i[0])))
    states["logits"] = model(Tokens.from_ids(ids))
    for hook in hooks:
        hook.remove()
    for layer in model_.stack.blocks:
        q, k = projected[f"{layer}q"], projected[f"{layer}k"]
        width = q.shape[-1] // 2
        rows = []
        for head in range(2):
            at = slice(head * width, (head + 1) * width)
            rows.append(torch.einsum("bik,bjk->bij", q[..., at], k[..., at]) / math.sqrt(width))
        scores = torch.stack(rows, 1)
        states["scores"].append(scores)
    return states


def of_text(states: dict[str, Any], count: int) -> dict[str, Any]:
    """The states without those of `count` global tokens, which have no logits."""
    hidden = [x[:, count:] for x in states["hidden"]]
    return {**states, "hidden": hidden, "scores": [scores[:, :, count:, count:] for scores in states["scores"]]}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("counts", [(0, 0), (3, 0), (1, 2)], ids=lambda counts: f"global tokens {counts}")
def test_each_loss_and_its_gradients(name: str, counts: tuple[int, int]) -> None:
    """`counts` are the global tokens of student and teacher, of which nothing is learned."""
    config = DistillConfig(**WEIGHTS[name], map_width=8 if name in ("embedding", "hidden") else None)
    wide = 8 if config.map_width else 4
    student = built(4, 2, 1, more={"global_tokens": counts[0]}, **WEIGHTS[name], map_width=config.map_width)
    teacher = built(wide, 4, 2, more={"global_tokens": counts[1]})
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    targets = ids.masked_fill(torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(4)) < 0.4, -100)
    count = int((targets >= 0).sum())
    with torch.no_grad():
        theirs = of_text(literal_states(teacher, ids), counts[1])
    expected = literal(name, student, of_text(literal_states(student, ids), counts[0]), theirs, targets)
    wanted = torch.autograd.grad(expected, list(student.parameters()), allow_unused=True)

    observe_states(student, FullVocabulary())
    observe_states(teacher, None)
    states = TeacherStates(config, (1, 3))
    with torch.no_grad():
        states.output_logits = teacher(Tokens.from_ids(ids).with_forward(states=states))
    stats = Stats()
    tokens = Tokens.from_ids(ids, aux_loss_weight=1.0, target_weight=1 / count, stats=stats)
    maps: Any = getattr(student, "distillation", None)
    loss = student(tokens.with_forward(states=StudentLosses(config, states, maps)), targets)
    assert torch.allclose(loss, student(tokens, targets)), "the value is that of the objective's own loss"
    (loss / count).backward()
    for (parameter, value), gradient in zip(student.named_parameters(), wanted, strict=True):
        got = torch.zeros_like(value) if value.grad is None else value.grad
        assert torch.allclose(got, torch.zeros_like(value) if gradient is None else gradient, atol=1e-12), parameter
    assert any(gradient is not None and gradient.abs().max() > 1e-6 for gradient in wanted)
    if name in ("cosine", "embedding"):
        weight = config.cosine_weight or config.embedding_weight
        assert math.isclose(float(stats.means()[f"distillation/{name}_loss"]) * weight, expected.item(), rel_tol=1e-12)


@pytest.mark.parametrize("scores", [False, True])
def test_the_losses_of_labelled_examples(scores: bool) -> None:
    """Inner states are compared over the text alone, and classes or scores at the token that has the target."""
    weights = {"embedding_weight": 0.6, "hidden_weight": 1.3, "attention_weight": 1.7, "cosine_weight": 0.2}
    config = DistillConfig(**weights, soft_weight=0.7, hard_weight=0.3, temperature=3.0)
    student, teacher = built(4, 2, 1), built(4, 4, 2)
    for seed, model in enumerate((student, teacher)):
        head = ClassHead(4, 1 if scores else 3, Init(std=0.5), scores=scores)
        substitute(model, "head", head)
        materialize(head, seed, dtype=torch.float64)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    lengths = [3, LENGTH]
    documents = torch.tensor([[int(place >= length) for place in range(LENGTH)] for length in lengths])
    targets = torch.full((BATCH, LENGTH), -100.0 if scores else -100, dtype=torch.float64 if scores else torch.long)
    targets[:, 0] = torch.tensor([2, 1])
    tokens = Tokens.from_ids(ids, documents, aux_loss_weight=1.0, target_weight=1 / BATCH)
    total = torch.zeros((), dtype=torch.float64)
    for b, length in enumerate(lengths):
        # An example by itself, without padding, has the same states.
        alone = ids[b : b + 1, :length]
        ours = literal_states(student, alone)
        with torch.no_grad():
            theirs = literal_states(teacher, alone)
        total = total + 0.6 * (ours["hidden"][0] - theirs["hidden"][0]).square().mean()
        for m in (1, 2):
            total = total + 1.3 * (ours["hidden"][m] - theirs["hidden"][2 * m]).square().mean()
            total = total + 1.7 * (ours["scores"][m - 1] - theirs["scores"][2 * m - 1]).square().mean()
        s, t = ours["hidden"][-1][0], theirs["hidden"][-1][0]
        total = total + 0.2 * sum(1 - x @ y / (x.norm() * y.norm()) for x, y in zip(s, t, strict=True)) / length
        z, taught = ours["logits"][0, 0], theirs["logits"][0, 0]
        if scores:
            total = total + 0.7 * (z - taught).square().sum() + 0.3 * (z[0] - targets[b, 0]).square()
        else:
            p, log_q = (taught / 3.0).softmax(-1), (z / 3.0).log_softmax(-1)
            total = total + 0.7 * 9.0 * (p * (p.log() - log_q)).sum() - 0.3 * z.log_softmax(-1)[int(targets[b, 0])]
    wanted = torch.autograd.grad(total / BATCH, list(student.parameters()))
    observe_states(student, FullVocabulary())
    observe_states(teacher, None)
    states = TeacherStates(config, (1, 3))
    with torch.no_grad():
        states.output_logits = teacher(Tokens.from_ids(ids, documents).with_forward(states=states))
    loss = student(tokens.with_forward(states=StudentLosses(config, states, padded=True)), targets)
    assert torch.allclose(loss, student(tokens, targets)), "the value is that of the objective's own loss"
    got = torch.autograd.grad(loss / BATCH, list(student.parameters()))
    for one, gradient in zip(got, wanted, strict=True):
        assert torch.allclose(one, gradient, rtol=1e-9, atol=1e-12)
    # The control: states of padding would count.
    loss = student(tokens.with_forward(states=StudentLosses(config, states)), targets)
    counted = torch.autograd.grad(loss / BATCH, list(student.parameters()))
    assert not all(torch.allclose(one, other, rtol=1e-3) for one, other in zip(counted, wanted, strict=True))


FURTHER: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mtp": ("decoder", {"mtp": {"depth": 1}}, {}),
    "head.sentence": ("encoder", {"sentence_head": {"classes": 2}}, {"signals": {LABELS: torch.tensor([1, 0])}}),
    "head.boundary": (
        "encoder",
        {"boundary_head": {"max_span": 2}},
        {"signals": {BOUNDARIES: torch.tensor([0, 2]).expand(BATCH, LENGTH, 2)}},
    ),
}


@pytest.mark.parametrize("path", FURTHER)
def test_losses_of_further_heads_are_of_the_objective(path: str) -> None:
    """They have the weight of its loss, and the teacher's logits are no target of them."""
    kind, more, fields = FURTHER[path]
    student, teacher = built(4, 2, 1, kind, more), built(4, 4, 2, kind)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    tokens = Tokens.from_ids(ids, aux_loss_weight=1.0, target_weight=1 / ids.numel(), **fields)

    def gradients(tokens: Tokens) -> list[Tensor]:
        value = student(tokens, ids) / ids.numel()
        got = torch.autograd.grad(value, list(student.parameters()), allow_unused=True, materialize_grads=True)
        return list(got)

    plain = gradients(tokens)
    observe_states(student, FullVocabulary())
    observe_states(teacher, None)
    for hard_weight, soft_weight in ((0.3, 0.0), (0.0, 0.7)):
        config = DistillConfig(hard_weight=hard_weight, soft_weight=soft_weight)
        states = TeacherStates(config, (1, 3))
        with torch.no_grad():
            states.output_logits = teacher(Tokens.from_ids(ids).with_forward(states=states))
        learned = gradients(tokens.with_forward(states=StudentLosses(config, states)))
        if soft_weight:
            # What the model's own head does not read is not trained by the soft loss.
            names = [parameter for parameter, _ in student.named_parameters()]
            further = [value for parameter, value in zip(names, learned, strict=True) if parameter.startswith(path)]
            assert further
            assert not any(value.any() for value in further)
        else:
            for value, full in zip(learned, plain, strict=True):
                assert torch.allclose(value, 0.3 * full, atol=1e-14)
    assert all(value.abs().max() > 0 for value in plain if value.numel() > 1)


def test_two_stages() -> None:
    """First the losses of inner states alone are trained, then the others alone."""
    config = DistillConfig(hidden_weight=1.0, inner_until=0.5)
    student, teacher = built(4, 2, 1), built(4, 4, 2)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    observe_states(student, FullVocabulary())
    observe_states(teacher, None)
    states = TeacherStates(config, (1, 3))
    with torch.no_grad():
        states.output_logits = teacher(Tokens.from_ids(ids).with_forward(states=states))
    reached = {}
    for progress in (0.0, 0.4, 0.5, 0.9):
        student.zero_grad()
        tokens = Tokens.from_ids(ids, aux_loss_weight=1.0, target_weight=0.1, progress=progress)
        student(tokens.with_forward(states=StudentLosses(config, states)), ids).backward()
        gradient = student.get_parameter("embed.table.weight").grad
        assert gradient is not None
        reached[progress] = gradient.clone()
    assert torch.equal(reached[0.0], reached[0.4])
    assert torch.equal(reached[0.5], reached[0.9])
    assert not torch.allclose(reached[0.0], reached[0.5])


def test_layers() -> None:
    config = DistillConfig()
    assert config.layers_of(2, 4) == (1, 3)
    assert config.layers_of(4, 12) == (2, 5, 8, 11), "g(m) = m N / M, counted from 0"
    assert config.layers_of(3, 4) is None
    assert DistillConfig(layers=(0, 2)).layers_of(2, 4) == (0, 2)


def test_a_teacher_is_run_up_to_the_last_block_that_is_wanted() -> None:
    """States are those of the whole teacher, and later blocks are not computed, as by a pipeline stage."""
    config, teacher = DistillConfig(hidden_weight=1.0, embedding_weight=1.0, attention_weight=1.0), built(4, 4, 2)
    calls: list[int] = []
    stack: Any = teacher.stack
    for layer, block in stack.blocks.items():
        block.register_forward_hook(lambda *_, layer=layer: calls.append(int(layer)))
    observe_states(teacher, None)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))

    def states_of(**limits: Any) -> TeacherStates:
        calls.clear()
        states = TeacherStates(config, (1, 3), **limits)
        with torch.no_grad():
            teacher(Tokens.from_ids(ids).with_forward(states=states))
        return states

    whole = states_of()
    assert calls == [0, 1, 2, 3]
    assert sorted(whole.hidden_states) == [-1, 1, 3]
    for wanted, last in ((frozenset({-1, 1}), 1), (frozenset({-1}), -1), (frozenset({3}), 3)):
        states = states_of(wanted=wanted, last=last)
        assert calls == list(range(last + 1))
        assert set(states.hidden_states) == wanted
        assert set(states.attention_scores) == wanted - {-1}
        for layer, x in states.hidden_states.items():
            assert torch.equal(x, whole.hidden_states[layer])


@pytest.mark.parametrize("causal", [False, True])
def test_scores_have_a_bias_by_distance(causal: bool) -> None:
    """A core may take the bias of a position by distance, and not by pair."""
    torch.manual_seed(0)
    q, k = (torch.randn(BATCH, 2, LENGTH, 4, dtype=torch.float64) for _ in range(2))
    table = torch.randn(2, 2 * LENGTH - 1, dtype=torch.float64)
    mask = AttentionMask(LENGTH, LENGTH, causal, relative_bias=lambda offsets: table[:, offsets + LENGTH - 1])
    scores = attention_scores(q, k, mask)
    for head in range(2):
        for i in range(LENGTH):
            for j in range(LENGTH):
                expected = q[:, head, i] * k[:, head, j]
                value = expected.sum(-1) / 2 + table[head, j - i + LENGTH - 1]
                assert torch.allclose(scores[:, head, i, j], torch.zeros(BATCH).double() if causal and j > i else value)

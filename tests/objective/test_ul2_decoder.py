"""UL2 for a decoder: its denoisers with their tokens, restored texts, packed documents, room, and the prompt."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from xscale.nn.head.head import IGNORE_INDEX
from xscale.objective.objective import Batch, SpecialTokens
from xscale.objective.ul2_decoder import Ul2Decoder

LENGTH, EOS, PAD = 256, 2, 0
SENTINELS = range(900, 1000)
MODES = {997: "R", 998: "S", 999: "X"}


def objective(seed: int = 1) -> Ul2Decoder:
    specials = SpecialTokens(vocabulary=1000, pad=PAD, eos=EOS, mask=None, sentinels=SENTINELS)
    return Ul2Decoder(Ul2Decoder.Config(), specials, LENGTH, seed)


def samples(rows: int, documents: Tensor | None = None) -> tuple[Tensor, Batch]:
    tokens = torch.randint(3, 900, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    within = None if documents is None else documents.expand(rows, -1)
    return tokens, objective().batch(tokens, within, torch.arange(rows))


def pieces(batch: Batch, row: int) -> list[tuple[str, list[int], list[int]]]:
    """Mode, source and target of each document of a sample; checks what is predicted and what is of the prefix."""
    assert batch.tokens.prefix is not None
    assert batch.tokens.documents is not None
    ids, numbers, prefix = (x[row].tolist() for x in (batch.tokens.ids, batch.tokens.documents, batch.tokens.prefix))
    found = []
    for number in dict.fromkeys(numbers):
        at = [place for place, other in enumerate(numbers) if other == number]
        asked = [batch.targets[row, place].item() for place in at]
        if number == LENGTH + 1:
            assert {ids[place] for place in at} == {PAD}
            assert set(asked) == {IGNORE_INDEX}
            continue
        size = sum(prefix[place] for place in at)
        assert [prefix[place] for place in at] == [True] * size + [False] * (len(at) - size)
        text = [ids[place] for place in at]
        # The last token of the source predicts the first of the target, and the last of the target predicts nothing,
        # unless the sample is full: then the last input predicts the token behind it.
        assert asked[: size - 1] == [IGNORE_INDEX] * (size - 1)
        target = [token for token in asked if token != IGNORE_INDEX]
        assert text[size:] in (target, target[:-1])
        assert asked[size - 1 : size - 1 + len(target)] == target
        found.append((MODES[text[0]], text[1:size], target))
    return found


def restored(source: list[int], target: list[int]) -> tuple[list[int], int, int]:
    """The text, its corrupted tokens and its spans."""
    assert source[-1] == target[-1] == EOS
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token in SENTINELS:
            last = spans.setdefault(token, [])
        else:
            last.append(token)
    text = [part for token in source[:-1] for part in spans.get(token, [token])]
    return text, sum(map(len, spans.values())), len(spans)


def test_each_sample_has_one_of_the_papers_denoisers() -> None:
    """Table 1: for a text of n tokens r n of them are corrupted, in spans of mean length mu."""
    tokens, batch = samples(140)
    paper = {("R", 0.15, 3), ("R", 0.15, 8), ("S", 0.25, None), ("X", 0.5, 3), ("X", 0.5, 8), ("X", 0.15, 64)}
    paper |= {("X", 0.5, 64)}
    seen: Counter[tuple[str, float, int | None]] = Counter()
    for row in range(140):
        ((mode, source, target),) = pieces(batch, row)
        text, corrupted, spans = restored(source, target)
        assert text == tokens[row, : len(text)].tolist()
        # One token more would leave no room for its sentinels.
        assert LENGTH + 1 - 3 < 1 + len(source) + len(target) <= LENGTH + 1
        fitting = [
            (kind, density, mean)
            for kind, density, mean in paper
            if (kind, round(len(text) * density)) == (mode, corrupted)
            and spans == (1 if mean is None else max(1, round(corrupted / mean)))
        ]
        assert len(fitting) == 1, (mode, len(text), corrupted, spans)
        seen[fitting[0]] += 1
        if mode == "S":
            assert source[:-2] == text[: len(text) - corrupted]
    assert set(seen) == paper
    again = objective().batch(tokens[9:10], None, torch.tensor([9]))
    assert torch.equal(again.tokens.ids, batch.tokens.ids[9:10])
    assert not torch.equal(objective(seed=2).batch(tokens, None, torch.arange(140)).tokens.ids, batch.tokens.ids)


def test_packed_documents_are_corrupted_apart() -> None:
    """A document of one token has nothing to corrupt; the last one loses what has no room."""
    starts, ends = (0, 60, 61), (60, 61, 257)
    documents = torch.cat(
        [torch.full((end - begin,), at) for at, (begin, end) in enumerate(zip(starts, ends, strict=True))]
    )
    tokens, batch = samples(20, documents)
    modes = set()
    for row in range(20):
        (first_mode, *first), (last_mode, *last) = pieces(batch, row)
        assert restored(*first)[0] == tokens[row, :60].tolist()
        text = restored(*last)[0]
        assert text == tokens[row, 61 : 61 + len(text)].tolist()
        assert 90 < len(text) < 196
        modes.add((first_mode, last_mode))
    assert len(modes) > 3


def test_a_prompt_is_the_beginning_of_a_text_whose_end_is_corrupted() -> None:
    assert objective().prompt_of([7, 8]) == [998, 7, 8, SENTINELS[0], EOS]


@pytest.mark.parametrize("length", [5, 6])
def test_short_samples_are_refused(length: int) -> None:
    problems = Ul2Decoder.check(Ul2Decoder.Config(), None, length, "objective")
    assert [(problem.path, problem.advice) for problem in problems] == (
        [] if length == 6 else [("data.sequence_length", "Take 6. Higher values work too.")]
    )


def test_modes_and_spans_need_sentinels() -> None:
    few = SpecialTokens(vocabulary=1000, pad=PAD, eos=EOS, mask=None, sentinels=range(970, 1000))
    problems = Ul2Decoder.check(Ul2Decoder.Config(), few, LENGTH, "objective")
    assert [problem.path for problem in problems] == ["objective.denoisers.3"]
    assert "32 spans and 3 modes" in problems[0].what

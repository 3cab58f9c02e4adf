"""F1 of spans: cases of conlleval's rules, all tags against its tables of rules, and predictions in any order."""

from itertools import accumulate, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xscale.evaluate.evaluate import in_order, metrics_of
from xscale.objective.labelled import Tag
from xscale.objective.metrics import marks_spans, span_metrics
from xscale.objective.objective import SpecialTokens

NAMES = ["O", *(f"{place}-{kind}" for place, kind in product("BIES", ("PER", "LOC", "NEW-AGE")))]
ENDS_BEFORE = {"B": "BSO", "I": "BSO", "E": "BIESO", "S": "BIESO", "O": ""}
"""Place of a word -> places of the next word before which a chunk ends, whatever the types (conlleval, endOfChunk)."""
STARTS_AFTER = {"B": "BIESO", "S": "BIESO", "I": "ESO", "E": "ESO", "O": ""}
"""Place of a word -> places of the word before, after which it starts a chunk (conlleval, startOfChunk)."""

Span = tuple[int, int, int, str]


def chunks(sentence: list[str], number: int = 0) -> set[Span]:
    """Spans of a sentence, as (number of the sentence, first word, last word, type): the two tables, word by word."""
    found: set[Span] = set()
    before, kind_before, first = "O", "", 0
    for at, name in enumerate([*sentence, "O"]):
        place, _, kind = name.partition("-")
        differs = kind != kind_before
        if place in ENDS_BEFORE[before] or (before != "O" and differs):
            found.add((number, first, at - 1, kind_before))
        if before in STARTS_AFTER[place] or (place != "O" and differs):
            first = at
        before, kind_before = place, kind
    return found


def literal(predicted: list[list[str]], targets: list[list[str]]) -> dict[str, float]:
    """Precision, recall and F1 of the sets of spans of some sentences."""
    found, wanted = (
        set().union(*(chunks(sentence, number) for number, sentence in enumerate(sentences)))
        for sentences in (predicted, targets)
    )
    precision = len(found & wanted) / len(found) if found else 0.0
    recall = len(found & wanted) / len(wanted) if wanted else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {"span_precision": precision, "span_recall": recall, "span_f1": f1}


def numbers(sentences: list[list[str]]) -> Tensor:
    return torch.tensor([NAMES.index(name) for sentence in sentences for name in sentence], dtype=torch.long)


def sentence_of_each(sentences: list[list[str]]) -> Tensor:
    return torch.tensor([n for n, sentence in enumerate(sentences) for _ in sentence], dtype=torch.long)


def ours(predicted: list[list[str]], targets: list[list[str]]) -> dict[str, float]:
    return span_metrics(numbers(predicted), numbers(targets), sentence_of_each(targets), NAMES)


def spans_of(*sentences: str) -> list[Span]:
    """Spans of sentences by the metric alone: each single span that is tried against them is right or wrong."""
    tags = [sentence.split() for sentence in sentences]
    found = []
    for number, sentence in enumerate(tags):
        for first, last in ((i, j) for i in range(len(sentence)) for j in range(i, len(sentence))):
            for kind in ("PER", "LOC", "NEW-AGE"):
                tried = [["O"] * len(each) for each in tags]
                tried[number][first : last + 1] = [f"B-{kind}", *[f"I-{kind}"] * (last - first)]
                if ours(tried, tags)["span_precision"] == 1:
                    found.append((number, first, last, kind))
    return found


@pytest.mark.parametrize(
    ("sentences", "spans"),
    [
        (["O O"], []),
        (["B-PER I-PER O B-LOC"], [(0, 0, 1, "PER"), (0, 3, 3, "LOC")]),
        (["B-PER B-PER I-PER"], [(0, 0, 0, "PER"), (0, 1, 2, "PER")]),
        (["B-PER I-LOC I-LOC"], [(0, 0, 0, "PER"), (0, 1, 2, "LOC")]),
        (["O I-PER I-PER"], [(0, 1, 2, "PER")]),
        (["I-PER I-LOC O I-LOC"], [(0, 0, 0, "PER"), (0, 1, 1, "LOC"), (0, 3, 3, "LOC")]),
        (["O B-LOC", "I-LOC O"], [(0, 1, 1, "LOC"), (1, 0, 0, "LOC")]),
        (["O B-NEW-AGE I-NEW-AGE"], [(0, 1, 2, "NEW-AGE")]),
        (["B-PER I-PER E-PER S-PER"], [(0, 0, 2, "PER"), (0, 3, 3, "PER")]),
        (["B-PER E-PER I-PER E-PER"], [(0, 0, 1, "PER"), (0, 2, 3, "PER")]),
        (["E-PER E-PER S-LOC I-LOC"], [(0, 0, 0, "PER"), (0, 1, 1, "PER"), (0, 2, 2, "LOC"), (0, 3, 3, "LOC")]),
    ],
    ids=[
        "none",
        "usual",
        "adjacent spans of a type",
        "another type without B",
        "I after O",
        "IOB1",
        "the end of a sentence",
        "a type with a hyphen",
        "IOBES",
        "I after E",
        "E and S begin",
    ],
)
def test_spans_are_those_of_conlleval(sentences: list[str], spans: list[Span]) -> None:
    assert spans_of(*sentences) == spans
    assert set().union(*(chunks(each.split(), number) for number, each in enumerate(sentences))) == set(spans)


def test_a_span_is_right_as_a_whole_only() -> None:
    targets = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC"]]
    found = ours([["B-PER", "O", "O", "B-LOC"], ["B-PER"]], targets)
    assert found == {"span_precision": 1 / 3, "span_recall": 1 / 3, "span_f1": 1 / 3}
    found = ours([["B-PER", "I-PER", "O", "O"], ["O"]], targets)
    assert found == {"span_precision": 1.0, "span_recall": 1 / 3, "span_f1": 0.5}
    nothing = {"span_precision": 0.0, "span_recall": 0.0, "span_f1": 0.0}
    assert ours([["O"] * 4, ["O"]], targets) == ours(targets, [["O"] * 4, ["O"]]) == nothing


TAG = st.sampled_from(NAMES)
WORDS = st.lists(st.tuples(TAG, TAG), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=5), st.booleans())
def test_tags_of_all_kinds_have_the_metrics_of_the_tables(words: list[list[tuple[str, str]]], mostly: bool) -> None:
    targets = [[target for _, target in sentence] for sentence in words]
    # Where predictions are independent of the targets, few of them are right.
    predicted = [[guess if not mostly or i % 4 == 3 else t for i, (guess, t) in enumerate(each)] for each in words]
    assert ours(predicted, targets) == pytest.approx(literal(predicted, targets), abs=1e-12)


def test_sentences_that_run_together_have_other_spans() -> None:
    """The negative control: the metric reads where a sentence ends."""
    targets, predicted = [["O", "B-PER"], ["I-PER"]], [["O", "B-PER"], ["O"]]
    assert ours(predicted, targets) == pytest.approx(literal(predicted, targets))
    joined = span_metrics(numbers(predicted), numbers(targets), torch.zeros(3, dtype=torch.long), NAMES)
    assert joined["span_precision"] == 0 != ours(predicted, targets)["span_precision"]


@pytest.mark.parametrize(
    ("names", "are_spans"),
    [
        (("O", "B-PER", "I-PER"), True),
        (("B-a-b", "I-a-b"), True),
        (("O", "S-X", "E-X", "B-X", "I-X"), True),
        (("O",), False),
        ((), False),
        (("B", "I", "O"), False),
        (("O", "B-", "I-"), False),
        (("O", "B-PER", "L-PER", "U-PER"), False),
        (("NOUN", "VERB", "O"), False),
        (("even", "odd", "big"), False),
    ],
)
def test_names_of_tags_that_mark_spans(names: tuple[str, ...], are_spans: bool) -> None:
    assert marks_spans(names) == are_spans


def test_predictions_of_ranks_are_put_in_order_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 5, 1, 4]
    targets, predicted = (
        [[NAMES[int(torch.randint(3, (), generator=generator))] for _ in range(length)] for length in lengths]
        for _ in range(2)
    )
    starts = torch.tensor([0, *accumulate(lengths)])[sentence_of_each(targets)]
    rows = torch.stack(
        (sentence_of_each(targets), torch.arange(sum(lengths)) - starts, numbers(predicted), numbers(targets))
    ).double()
    config = Tag.Config(classes=len(NAMES))
    objective = Tag(config, SpecialTokens(vocabulary=20, pad=0, eos=2, mask=None, sentinels=range(0)), 8, 0)
    wanted = metrics_of(rows, objective, NAMES)
    assert {name: wanted[name] for name in literal(predicted, targets)} == pytest.approx(literal(predicted, targets))
    twice = torch.cat((rows, rows[:, ::2]), 1)
    mixed = twice[:, torch.randperm(twice.shape[1], generator=generator)]
    assert in_order(mixed).equal(rows)
    assert metrics_of(mixed, objective, NAMES) != wanted
    assert metrics_of(rows, objective, ["noun"] * len(NAMES)).keys() == wanted.keys() - literal([], []).keys()
    assert metrics_of(in_order(rows[:, :0]), objective, NAMES) == {}

"""Recipes beat what learns little: copying the source, by BLEU; the most frequent class, and a bag of words."""

import collections
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny import ROOT, metrics, run
from xscale.core.errors import EXIT_DONE
from xscale.data.labels import decode_labels
from xscale.recipe import Recipe, read
from xscale.train.load_run import evaluate_run, load_run
from xscale.train.setup import prepare_and_open_data


def recipe_of(name: str, folder: Path, *overrides: str) -> Recipe:
    places = (f"run.dir={folder / 'run'}", f"data.folder={folder / 'data'}", "run.device=cpu", "data.workers=1")
    quiet = ("observe.progress=false", "observe.tensorboard=false", "observe.report=false")
    return read(ROOT / f"configs/run/{name}.yaml", [*places, *quiet, *overrides])[0]


@pytest.mark.nightly
def test_summaries_beat_copying_the_source(tmp_path: Path) -> None:
    """The run prints both figures at its end."""
    pytest.importorskip("sacrebleu")
    assert run(recipe_of("code_summaries", tmp_path, "train.eval_every=0")) == EXIT_DONE
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    match = re.search(r"BLEU ([\d.]+) on \d+ validation pairs; of copying the source: ([\d.]+)", log)
    assert match is not None, log
    score, copied = map(float, match.groups())
    assert score > 1.1 * copied > 0, match[0]


Counts = collections.Counter[str]


def bag_of_words(train: list[tuple[list[str], int]], held_out: list[tuple[list[str], int]]) -> float:
    """Accuracy of multinomial naive Bayes with Laplace's rule, which adds 1 to each count."""
    counts: dict[int, Counts] = collections.defaultdict(collections.Counter)
    for words, label in train:
        counts[label].update(words)
    vocabulary = {word for words, _ in train for word in words}
    examples = collections.Counter(label for _, label in train)
    totals = {label: sum(counter.values()) + len(vocabulary) for label, counter in counts.items()}

    def likelihood(label: int, words: list[str]) -> float:
        terms = (math.log((counts[label][word] + 1) / totals[label]) for word in words if word in vocabulary)
        return math.log(examples[label]) + sum(terms)

    right = [max(examples, key=lambda label: likelihood(label, words)) == label for words, label in held_out]
    return sum(right) / len(right)


def words_and_labels(folder: Path) -> list[list[tuple[list[str], int]]]:
    """The words of the tokens that the model reads, and the labels, of the two splits of a run."""
    loaded = load_run(folder)
    settings, tokenizer = loaded.settings, loaded.tokenizer
    corpus = prepare_and_open_data(settings, loaded.mesh.rank_info, settings.data, tokenizer, loaded.mesh)
    splits = []
    for loader in (corpus.train, corpus.validation):
        assert loader is not None
        data: Any = loader.data
        labels = decode_labels(data.column.tokens, data.labels).tolist()
        read_tokens = [data.texts.document(number)[: data.sample_length - 1] for number in range(len(labels))]
        words = [re.findall(r"\w+", tokenizer.decode(tokens)) for tokens in read_tokens]
        splits.append(list(zip(words, labels, strict=True)))
    return splits


@pytest.mark.nightly
def test_a_classifier_beats_the_most_frequent_class_and_a_bag_of_words(tmp_path: Path) -> None:
    assert run(recipe_of("classify", tmp_path, "train.eval_every=0")) == EXIT_DONE
    result = evaluate_run(tmp_path / "run", None)
    bag = bag_of_words(*words_and_labels(tmp_path / "run"))
    assert result["accuracy"] > bag > 2 * result["majority_accuracy"], (result, bag)
    assert metrics(tmp_path)[-1]["step"] == 800

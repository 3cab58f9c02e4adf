"""Recipes beat what learns little: copying the source, by BLEU; the most frequent class, and a bag of words."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny import ROOT, metrics, run
from xscale.core.errors import EXIT_DONE
from xscale.data.corpus.labels import decode_labels
from xscale.evaluate.evaluate_run import evaluate_run
from xscale.recipe import Recipe, read
from xscale.run.load_run import load_run
from xscale.run.run_data import prepare_and_open_data


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


def bags_of_words(train: list[tuple[str, int]], held_out: list[tuple[str, int]]) -> dict[str, float]:
    """Accuracy of classifiers of scikit-learn on counts of words.

    Support vectors on tf-idf reach 0.917, which the recipe beats with some seeds only: they are no bound here.
    """
    # Not where every process that only lists the tests imports it.
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline

    words: dict[str, Any] = {"lowercase": False, "token_pattern": r"\w+"}
    models = {
        "naive Bayes": (CountVectorizer(**words), MultinomialNB()),
        "logistic regression": (CountVectorizer(**words), LogisticRegression(max_iter=2000)),
    }
    (texts, labels), (unseen, answers) = (zip(*split, strict=True) for split in (train, held_out))
    return {
        name: float(make_pipeline(*steps).fit(texts, labels).score(unseen, answers)) for name, steps in models.items()
    }


def texts_and_labels(folder: Path) -> list[list[tuple[str, int]]]:
    """The text of the tokens that the model reads, and the labels, of the two splits of a run."""
    loaded = load_run(folder)
    settings, tokenizer = loaded.settings, loaded.tokenizer
    corpus = prepare_and_open_data(settings, loaded.mesh.rank_info, settings.data, tokenizer, loaded.mesh)
    splits = []
    for loader in (corpus.train, corpus.validation):
        assert loader is not None
        data: Any = loader.data
        labels = decode_labels(data.column.tokens, data.labels).tolist()
        read_tokens = [data.texts.document(number)[: data.sample_length - 1] for number in range(len(labels))]
        splits.append(list(zip(map(tokenizer.decode, read_tokens), labels, strict=True)))
    return splits


@pytest.mark.nightly
def test_a_classifier_beats_the_most_frequent_class_and_bags_of_words(tmp_path: Path) -> None:
    """By the average of its weights, as `xscale eval RUN --ema` prints it."""
    assert run(recipe_of("classify", tmp_path, "train.eval_every=0")) == EXIT_DONE
    result = evaluate_run(tmp_path / "run", None, ema=True)
    bags = bags_of_words(*texts_and_labels(tmp_path / "run"))
    assert result["accuracy"] > max(bags.values()), (result, bags)
    assert min(bags.values()) > 2 * result["majority_accuracy"], (result, bags)
    assert metrics(tmp_path)[-1]["step"] == 400

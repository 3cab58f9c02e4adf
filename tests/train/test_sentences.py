"""Runs on pairs of sentences: what they write, resume bit for bit, evaluate; and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny import losses, metrics, recipe, run
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.data.source.stdlib_pairs import StdlibPairs
from xscale.evaluate.evaluate_run import evaluate_run
from xscale.recipe import Recipe

MODEL: dict[str, Any] = {
    "kind": "encoder",
    "width": 32,
    "position": "learned",
    "embedding_norm": "layer",
    "transform": "gelu",
    "token_types": 2,
    "sentence_head": {"classes": 2},
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4},
            "ffn": {"kind": "dense", "hidden": 48},
            "residual": "post",
            "dropout": 0.1,
        },
    },
}
OBJECTIVE = {"kind": "masked_sentences"}


def asked(folder: Path, name: str = "run", **sections: Any) -> Recipe:
    data = {"split_sentences": True, "sequence_length": 64, **sections.pop("data", {})}
    return recipe(folder, name, data=data, **{"model": MODEL, "objective": OBJECTIVE, **sections})


@pytest.mark.long
def test_a_run_resumes_bit_for_bit_and_reports_its_classes(tmp_path: Path) -> None:
    assert run(asked(tmp_path, "whole")) == EXIT_DONE
    assert run(asked(tmp_path, "cut", train={"stop_after": 4})) == EXIT_REQUEUE
    assert run(asked(tmp_path, "cut")) == EXIT_DONE
    assert losses(tmp_path, "whole") == losses(tmp_path, "cut")
    lines = metrics(tmp_path, "whole")
    assert [line["eval_sentence_loss"] for line in lines if "eval_loss" in line] == [
        line["eval_sentence_loss"] for line in metrics(tmp_path, "cut") if "eval_loss" in line
    ]
    first = next(line for line in lines if "loss" in line)
    assert first["tokens"] == 8 * 64
    assert {"head.sentence/loss", "head.sentence/accuracy"} <= first.keys()
    evaluation = evaluate_run(tmp_path / "whole", None)
    assert 0 < evaluation["sentence_accuracy"] < 1
    assert 0.5 < evaluation["sentence_loss"] < 1.2
    log = (tmp_path / "whole" / "log.txt").read_text()
    assert ", sentence loss " in log
    assert ", sentence accuracy " in log
    json.dumps(evaluation)


@pytest.mark.parametrize(
    ("sections", "paths", "words"),
    [
        ({"data": {"split_sentences": False}}, ["data.split_sentences"], "the text is not split into them"),
        ({"data": {"cross_documents": True}}, ["data.cross_documents"], "hides padding"),
        ({"data": {"max_source_length": 9}}, ["data.max_source_length"], "reads one text"),
        ({"data": {"sequence_length": 4}}, ["data.sequence_length"], "are five tokens"),
        ({"run": {"allow_changed": ("data.sequence_length",)}}, ["run.allow_changed"], "split into other samples"),
        ({"model": {**MODEL, "sentence_head": None}}, ["model.sentence_head"], "the model has no head for them"),
        ({"objective": {**OBJECTIVE, "task": "three_way"}}, ["model.sentence_head.classes"], "and the head 2"),
        ({"model": {**MODEL, "token_types": 1}}, ["model.token_types"], "and the model knows 1"),
        (
            {"objective": {"kind": "masked"}},
            ["data.split_sentences", "model.sentence_head"],
            "'masked' reads no sentences",
        ),
        (
            {"data": {"source": {"kind": "stdlib_pairs"}}},
            ["data.source"],
            "are pairs of a source and a target",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, sections: dict[str, Any], paths: list[str], words: str) -> None:
    data = sections.get("data", {})
    made = asked(tmp_path, **{**sections, "data": {name: data[name] for name in data if name != "source"}})
    if "source" in data:
        made = made.model_copy(update={"data": made.data.model_copy(update={"source": StdlibPairs.Config()})})
    problems = made.check()
    assert [problem.path for problem in problems] == paths, problems
    assert words in problems[0].what
    assert all(problem.advice for problem in problems)


def test_one_sentence_documents_and_a_tokenizer_without_cls_are_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(9):
        (corpus / f"{number}.txt").write_text(f"Only one sentence is here, number {number}")
    data: dict[str, Any] = {"source": {"kind": "text", "paths": [str(corpus / "*.txt")]}}
    with pytest.raises(ConfigError, match="no document of the train split has two sentences"):
        run(asked(tmp_path, data=data))
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[SEP]", "[MASK]", "only", "one"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = {"kind": "huggingface", "file": str(tmp_path / "tokenizer.json"), "eos": "[SEP]", "mask": "[MASK]"}
    data["validation"] = 0.0
    for number in range(9):
        (corpus / f"{number}.txt").write_text(f"Only one. Only two. Only {number}.")
    with pytest.raises(ConfigError, match="the tokenizer has no token for"):
        run(asked(tmp_path, "other", data={**data, "tokenizer": names, "sequence_length": 16}))


def test_the_log_says_how_many_documents_are_left_out(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    texts = [
        f"Line {number} begins. It ends." if number % 3 else f"Line {number} stands alone." for number in range(30)
    ]
    lines.write_text("\n".join(texts))
    source = {"kind": "text", "paths": [str(lines)], "document": "line"}
    train = {"steps": 1, "eval_every": 0, "eval_sequences": None}
    assert run(asked(tmp_path, data={"source": source, "validation": 0.0}, train=train)) == EXIT_DONE
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("data left out: 10 of 30 documents have no two sentences close enough for a sample") == 1

"""Runs on tags of words that mark spans: where F1 of spans is told, and that every layout has the same."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.distributed import Pool
from tests.train.test_finetune import MODEL as FINETUNED
from tests.train.tiny import metrics, recipe, run
from xscale.core.errors import EXIT_DONE
from xscale.evaluate import evaluate
from xscale.evaluate.evaluate_run import evaluate_run

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
SPANS = ("span_precision", "span_recall", "span_f1")
DOUBLE = {"compute": "float64", "master": "float64"}
# Weights of this size learn in a few steps.
MODEL: dict[str, Any] = {**FINETUNED, "init_std": 0.3}
DECODER: dict[str, Any] = {"kind": "decoder", "width": 32, "init_std": 0.3, "stack": MODEL["stack"]}
LAYOUTS: dict[str, Any] = {
    "dp": {"mesh": {"dp_shard": 2}},
    "tp": {"mesh": {"tp": 2}},
    "cp": {"mesh": {"cp": 2}},
    "pp": {"mesh": {"pp": 2}},
}


def sentences(folder: Path, tags: tuple[str, ...]) -> str:
    """Ninety sentences of letters: p begins a person, l a place, and each i after them is inside; sometimes wrongly."""
    rows = []
    for number in range(90):
        words = [("pliooi" if number % 2 else "lipooi")[(number * 7 + at * at) % 6] for at in range(5 + number % 7)]
        found = ["O"]
        for at, word in enumerate(words):
            before = found[-1]
            inside = f"I-{before[2:]}" if before != "O" and word == "i" and (number + at) % 5 else "O"
            found.append({"p": "B-PER", "l": "B-LOC"}.get(word, inside))
        rows.append({"text": words, "label": [tags[TAGS.index(name)] for name in found[1:]]})
    file = folder / "sentences.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def tagged(folder: Path, name: str = "run", tags: tuple[str, ...] = TAGS, **sections: Any) -> int:
    """A run of some steps, whose evaluations read an odd number of micro-batches."""
    source = {"kind": "labelled", "paths": [sentences(folder, tags)], "labels": "tags", "classes": list(tags)}
    train = {"steps": 24, "eval_every": 12, "eval_sequences": 9, "micro_batch_size": 2, **sections.pop("train", {})}
    shared = {"model": MODEL, "objective": {"kind": "tag", "classes": len(tags)}, "data": {"source": source}}
    optimizer = {"kind": "adamw", "lr": 0.01}
    return run(recipe(folder, name, **{**shared, "optimizer": optimizer, "train": train, **sections}))


def evaluations(folder: Path, name: str = "run") -> list[dict[str, float]]:
    return [line for line in metrics(folder, name) if "eval_loss" in line]


def test_a_run_tells_the_f1_of_spans(tmp_path: Path) -> None:
    train = {"steps": 12, "eval_sequences": None}
    assert tagged(tmp_path, observe={"report": True}, train=train) == EXIT_DONE
    newest = evaluations(tmp_path)[-1]
    assert 0 < newest["eval_span_f1"] < 1
    mean = (1 / newest["eval_span_precision"] + 1 / newest["eval_span_recall"]) / 2
    assert newest["eval_span_f1"] == pytest.approx(1 / mean)
    wanted = (
        f"span precision {newest['eval_span_precision']:.4f}, span recall {newest['eval_span_recall']:.4f}, span F1"
    )
    assert wanted in (tmp_path / "run" / "log.txt").read_text()
    report = (tmp_path / "run" / "report.html").read_text()
    assert "<th>span F1</th>" in report
    assert f">{newest['eval_span_f1']:.5g}<" in report
    again = evaluate_run(tmp_path / "run", None)
    assert {name: again[name] for name in SPANS} == {name: newest[f"eval_{name}"] for name in SPANS}


def test_other_tags_have_no_spans(tmp_path: Path) -> None:
    other = ("none", "person", "person2", "place", "place2")
    assert tagged(tmp_path, tags=other, train={"steps": 1, "eval_every": 1}) == EXIT_DONE
    newest = evaluations(tmp_path)[-1]
    assert "eval_macro_f1" in newest
    assert not [name for name in newest if "span" in name]


def tagged_without_order(folder: Path, name: str, **sections: Any) -> int:
    """A run whose predictions stay as the ranks have them, one rank after another."""
    in_order = evaluate.in_order

    def by_rank(rows: Tensor) -> Tensor:
        return rows

    try:
        evaluate.in_order = by_rank
        return tagged(folder, name, **sections)
    finally:
        evaluate.in_order = in_order


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of one process: of an encoder, and of a decoder."""
    folder = tmp_path_factory.mktemp("alone")
    for name, model in (("encoder", MODEL), ("decoder", DECODER)):
        assert pool.run(tagged, 1, folder, name, model=model, precision=DOUBLE) == [EXIT_DONE]
        assert all(0 < line[f"eval_{metric}"] < 1 for line in evaluations(folder, name)[1:] for metric in SPANS)
    return folder


def same_metrics(folder: Path, name: str, wanted: list[dict[str, float]]) -> bool:
    """Whether all metrics of a run are equal to those `wanted`; its losses have to be nearly."""
    found = evaluations(folder, name)
    assert [line["step"] for line in found] == [line["step"] for line in wanted] != []
    for line, expected in zip(found, wanted, strict=True):
        assert line.keys() == expected.keys()
        assert math.isclose(line["eval_loss"], expected["eval_loss"], rel_tol=1e-9)
    names = [name for name in wanted[0] if name.startswith("eval_") and name not in ("eval_loss", "eval_seconds")]
    assert {f"eval_{name}" for name in SPANS} < set(names)
    return [[line[name] for name in names] for line in found] == [[line[name] for name in names] for line in wanted]


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("model", ["encoder", "decoder"])
def test_every_layout_has_the_spans_of_one_process(pool: Pool, alone: Path, model: str, layout: str) -> None:
    sections = {"model": MODEL if model == "encoder" else DECODER, "precision": DOUBLE, "parallel": LAYOUTS[layout]}
    name, wanted = f"{model}-{layout}", evaluations(alone, model)
    assert pool.run(tagged, 2, alone, name, **sections) == [EXIT_DONE] * 2
    assert same_metrics(alone, name, wanted)
    if layout == "cp":
        assert pool.run(tagged_without_order, 2, alone, f"{name}-control", **sections) == [EXIT_DONE] * 2
        assert not same_metrics(alone, f"{name}-control", wanted)

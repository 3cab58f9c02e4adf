"""Runs on pairs: what they write, resume bit for bit, evaluate and generate; and what they refuse."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import Pool
from tests.train.test_load_run import call
from tests.train.tiny import ROOT, losses, recipe, run
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.evaluate.evaluate_run import evaluate_run
from xscale.generate.generate_text import generate_text
from xscale.recipe import Recipe

STACK: dict[str, Any] = {
    "depth": 2,
    "block": {
        "mixer": {"kind": "attention", "heads": 4},
        "ffn": {"kind": "dense", "hidden": 48},
        "residual": "post",
        "dropout": 0.1,
    },
}
MODEL: dict[str, Any] = {
    "kind": "encoder_decoder",
    "width": 32,
    "position": "sinusoidal",
    "encoder": STACK,
    "decoder": STACK,
}
OBJECTIVE = {"kind": "seq2seq", "label_smoothing": 0.1}
DATA: dict[str, Any] = {"max_source_length": 20, "max_target_length": 12, "validation": 0.2}


def pairs_file(folder: Path) -> str:
    """Sixty numbers and their digits backwards; the first two sources are too long."""
    rows = [{"code": f"{number**3:,}" * (5 if number < 2 else 1), "doc": str(number)[::-1]} for number in range(60)]
    file = folder / "pairs.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def asked(folder: Path, name: str = "run", **sections: Any) -> Recipe:
    source = {"kind": "pairs", "paths": [pairs_file(folder)], "source_field": "code", "target_field": "doc"}
    data = {"source": source, **DATA, **sections.pop("data", {})}
    sections = {"model": MODEL, "objective": OBJECTIVE, **sections}
    return recipe(folder, name, data=data, **sections)


def trained(folder: Path, name: str = "run", **sections: Any) -> int:
    return run(asked(folder, name, **sections))


@pytest.mark.long
def test_a_run_says_what_it_truncates_and_learns(tmp_path: Path) -> None:
    assert (
        trained(tmp_path, train={"steps": 30, "baseline": True}, optimizer={"kind": "adamw", "lr": 0.01}) == EXIT_DONE
    )
    found = losses(tmp_path)
    assert found[-1] < found[0] - 1
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "pairs; truncated: " in log
    assert "sources to 20 tokens (data.max_source_length), 0 targets to 12 (data.max_target_length)" in log
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["tokens"] == 8 * (20 + 12)
    evaluation = evaluate_run(tmp_path / "run", None)
    other = evaluate_run(tmp_path / "run", None, source=pairs_file(tmp_path))
    assert evaluation["step"] == other["step"] == 30
    assert 0 < other["loss"] < found[0]
    searched = call("generate", tmp_path / "run", "--prompt", "1,728", "--tokens", 6, "--beams", 3)
    assert "1,728" not in searched
    greedy = generate_text(tmp_path / "run", "1,728", 6, 0.0, None, 0)
    assert len(greedy) <= 6
    longer = call("generate", tmp_path / "run", "--prompt", "1,728", "--beams", 2, "--length-penalty", 1, "--tokens", 3)
    assert len(longer) <= 4
    with pytest.raises(ConfigError, match="has 31 tokens, and at most 19 leave room"):
        generate_text(tmp_path / "run", "1" * 31, 6, 0.0, None, 0)


def test_beam_search_samples_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)--temperature: beam search samples nothing.*--top-k"):
        call("generate", tmp_path, "--beams", 2, "--temperature", 0.5, "--top-k", 3)
    with pytest.raises(ConfigError, match=r"--length-penalty: it is that of beam search.*--beams 4"):
        call("generate", tmp_path, "--length-penalty", 0.5)
    with pytest.raises(ConfigError, match=r"--penalty-form: it is that of beam search.*--beams 4"):
        call("generate", tmp_path, "--penalty-form", "power")


@pytest.mark.long
@pytest.mark.parametrize("parallel", [{}, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}], ids=["one", "zero3"])
def test_a_run_resumes_bit_for_bit(tmp_path: Path, pool: Pool, parallel: dict[str, Any]) -> None:
    ranks = 2 if parallel else 1
    assert pool.run(trained, ranks, tmp_path, "whole", parallel=parallel) == [EXIT_DONE] * ranks
    short: dict[str, Any] = {"train": {"stop_after": 3}, "parallel": parallel}
    assert pool.run(trained, ranks, tmp_path, "parts", **short) == [EXIT_REQUEUE] * ranks
    assert pool.run(trained, ranks, tmp_path, "parts", parallel=parallel) == [EXIT_DONE] * ranks
    assert losses(tmp_path, "parts") == losses(tmp_path, "whole")


def problems_of(folder: Path, **sections: Any) -> str:
    return "\n".join(map(str, asked(folder, **sections).check()))


def test_what_does_not_fit_pairs_is_refused(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == ""
    refused = problems_of(tmp_path, objective={"kind": "span"})
    assert "data.source: the documents of the source 'pairs' are pairs of a source and a target" in refused
    assert "a target, and 'span' reads texts" in refused
    assert "Take data.source.kind=hub, jsonl, parquet, stdlib or text, or objective.kind=seq2seq." in refused, refused
    assert "data.max_source_length: objective 'span' reads one text" in refused
    refused = problems_of(tmp_path, data={"source": {"kind": "stdlib"}})
    assert "the documents of the source 'stdlib' are texts" in refused
    lengths = "data.max_source_length=null and data.max_target_length=null"
    assert f"or objective.kind=denoising, span or ul2, each with {lengths}." in refused, "those that read no pairs"
    refused = problems_of(tmp_path, data={"cross_documents": True})
    assert "data.cross_documents: 'seq2seq' hides padding as a document of its own. Take false." in refused
    refused = problems_of(tmp_path, data={"max_target_length": 33})
    assert "data.max_target_length: 33 exceeds data.sequence_length=32" in refused
    refused = problems_of(tmp_path, data={"sequence_length": 1, "max_source_length": None, "max_target_length": None})
    assert "a source needs two tokens" in refused
    refused = problems_of(tmp_path, run={"allow_changed": ["data.sequence_length"]})
    assert "run.allow_changed: pairs of a source and a target are not split anew" in refused
    decoder = {"kind": "decoder", "width": 32}
    assert "'seq2seq' needs a model that reads a source sequence" in problems_of(tmp_path, model=decoder)


AVERAGING: dict[str, dict[str, Any]] = {
    "Moe": {"ffn": {"kind": "moe", "experts": 2}},
    "Disagreement": {"mixer": {"kind": "attention", "heads": 4, "core": "disagreement"}},
    "GuidedAttention": {"mixer": {"kind": "guided_attention", "heads": 4}},
    "DynamicSpan": {"mixer": {"kind": "dynamic_span", "heads": 4}},
}


@pytest.mark.parametrize("name", AVERAGING)
def test_parts_that_average_leave_padding_out(tmp_path: Path, name: str) -> None:
    stack = {**STACK, "block": {**STACK["block"], **AVERAGING[name]}}
    assert problems_of(tmp_path, model={**MODEL, "encoder": stack}) == ""


def test_halting_leaves_padding_out(tmp_path: Path) -> None:
    stack = {**STACK, "share": "all", "halting": {}}
    assert problems_of(tmp_path, model={**MODEL, "encoder": stack}) == ""


@pytest.mark.long
def test_prepared_text_is_no_pairs(tmp_path: Path) -> None:
    text = recipe(tmp_path, "text", model=MODEL, objective={"kind": "span"}, train={"steps": 1, "eval_every": 0})
    assert run(text) == EXIT_DONE
    (prepared,) = [folder for folder in (tmp_path / "data").iterdir() if folder.name.startswith("text")]
    with pytest.raises(ConfigError, match="are texts, and 'seq2seq' reads pairs of a source and a target"):
        trained(tmp_path, data={"prepared": str(prepared)})
    train = {"steps": 1, "eval_every": 0}
    assert trained(tmp_path, "pairs", train=train) == EXIT_DONE
    (prepared,) = [folder for folder in (tmp_path / "data").iterdir() if folder.name.startswith("pairs")]
    assert trained(tmp_path, "again", data={"prepared": str(prepared)}, train=train) == EXIT_DONE
    assert losses(tmp_path, "again") == losses(tmp_path, "pairs")


PADDING_WEIGHS_NOTHING = {
    "AdaptiveSpan",
    "Exits",
    "Head",
    "LengthHead",
    "MemoryOfForward",
    "MultiToken",
    "SentenceContrast",
    "SentenceHead",
    "StudentLosses",
}
"""Classes whose auxiliary loss is of parameters, of targets, or of sequences or sentences and their classes, of which
padding has none; the losses of a student that are of all tokens are refused where samples have padding."""


def test_every_part_with_an_auxiliary_loss_of_tokens_says_so() -> None:
    attaching = {}
    for file in (ROOT / "xscale/nn").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and "attach(" in ast.unparse(node):
                attaching[node.name] = "averages_tokens = " in ast.unparse(node)
    assert {"Moe", "Halting", "Disagreement"} <= attaching.keys()
    assert {name for name, says in attaching.items() if not says} == PADDING_WEIGHS_NOTHING

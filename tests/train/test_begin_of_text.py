"""The begin of a text in a run: documents, prompts and tasks have the same; runs of before keep theirs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.commands.test_import_hf import call
from tests.data.tokenizer.test_template import BOS, EOS, one, write
from tests.train.test_run_tokenizer import MODEL
from tests.train.tiny import losses, recipe, run
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.data.corpus.prepare import prepare
from xscale.data.corpus.stored_tokenizer import open_stored_tokenizer
from xscale.data.tokenizer import huggingface
from xscale.data.tokenizer.byte import Byte
from xscale.data.tokenizer.template import Template
from xscale.evaluate.evaluate_run import evaluate_run
from xscale.generate.generate import encode_prompt
from xscale.generate.generate_text import encode_sides, generate_text
from xscale.objective.objective import OBJECTIVES
from xscale.run.load_run import load_run
from xscale.run.run_data import special_tokens_of

TEXT = "abcddcba" * 8
STOPPED = {"steps": 4, "batch_size": 4, "micro_batch_size": 2, "stop_after": 2, "eval_every": 0}


def config(folder: Path, name: str = "run", tokenizer: dict[str, Any] | None = None, **sections: Any) -> Any:
    """A recipe with an existing tokenizer whose template begins a text with <s>."""
    if not (folder / "hf").exists():
        write(folder / "hf", one("<s> $A"))
        lines = [json.dumps({"text": TEXT + "a" * number}) for number in range(24)]
        (folder / "a.jsonl").write_text("\n".join(lines))
    data = {
        "source": {"kind": "jsonl", "paths": [str(folder / "a.jsonl")]},
        "tokenizer": {"kind": "huggingface", "file": str(folder / "hf" / "tokenizer.json"), **(tokenizer or {})},
        "folder": str(folder / "data"),
        **sections.pop("data", {}),
    }
    return recipe(folder, name, model=MODEL, data=data, train=STOPPED | sections.pop("train", {}), **sections)


def test_documents_and_prompts_of_a_run(tmp_path: Path) -> None:
    settings = config(tmp_path)
    data = prepare(settings.data, processes=1, progress=False)
    document = data.train.indexed.document(0).tolist()
    assert (document[0], document[-1], document.count(BOS)) == (BOS, EOS, 1)
    assert data.tokenizer.decode(document).startswith(TEXT)
    assert encode_prompt("ab", data.tokenizer, 8, "prompt") == [BOS, *data.tokenizer.encode("ab")]
    assert encode_prompt("", data.tokenizer, 8, "prompt") == [BOS]
    assert run(settings) == EXIT_REQUEUE
    stored = open_stored_tokenizer(tmp_path / "run")
    assert stored is not None
    assert stored.prefix == (BOS,)
    assert stored.fingerprint == data.tokenizer.fingerprint


def test_only_the_text_before_a_gap_begins(tmp_path: Path) -> None:
    settings = recipe(tmp_path, objective={"kind": "fill_in_middle"})
    tokenizer = Byte(Byte.Config(add_bos=True), tmp_path)
    gap = OBJECTIVES.build(settings.objective, special_tokens_of(tokenizer), 32, 0)
    for prompt in ("ab", ""):
        ids = encode_sides(prompt, "cd", tokenizer, gap, None)
        assert ids.count(tokenizer.bos) == 1
        assert ids.index(tokenizer.bos) < min(map(ids.index, tokenizer.encode("cd")))


def run_of_before(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train as a version did that knew no template and no `add_bos`, and had no such key in its files."""
    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "read_template", lambda section: Template())
        patch.setattr(huggingface, "template_of_file", lambda file: Template())
        assert run(settings) == EXIT_REQUEUE
    folder = Path(settings.run.dir)
    description = json.loads((folder / "tokenizer" / "fingerprint.json").read_text())
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for section in (description["tokenizer"], config["data"]["tokenizer"]):
        for key in ("add_bos", "add_eos"):
            section.pop(key)
    (folder / "tokenizer" / "fingerprint.json").write_text(json.dumps(description))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.long
@pytest.mark.parametrize("copy", ["own", "none"])
def test_a_run_of_before_keeps_its_data(copy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was trained without a begin, which its tokenizer's file has: it resumes, evaluates and generates so."""
    assert run(config(tmp_path, "whole", {"add_bos": False}, train={"stop_after": None})) == EXIT_DONE
    run_of_before(config(tmp_path), monkeypatch)
    if copy == "none":
        shutil.rmtree(tmp_path / "run" / "tokenizer")
    ids = torch.tensor(encode_prompt("abc", load_run(tmp_path / "run").tokenizer, 8, "prompt"))
    assert BOS not in ids
    assert generate_text(tmp_path / "run", "abc", 4, 0.0, None, 0).startswith("abc")
    evaluate_run(tmp_path / "run", None)
    data = sorted(path.name for path in (tmp_path / "data").iterdir())
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.add_bos was null and is now true"):
        run(config(tmp_path, tokenizer={"add_bos": True}, train={"stop_after": None}))
    settings = config(tmp_path, train={"stop_after": None})
    if copy == "none":
        with pytest.raises(ConfigError, match=r"without <s> before each.*set data\.tokenizer\.add_bos=false"):
            run(settings)
        return
    assert run(settings) == EXIT_DONE
    assert losses(tmp_path) == losses(tmp_path, "whole")
    assert load_run(tmp_path / "run").tokenizer.prefix == ()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == data


def test_data_of_before_is_refused_for_a_new_run(tmp_path: Path) -> None:
    """Documents without a begin, and prompts with one, would be another distribution."""
    old = prepare(config(tmp_path, tokenizer={"add_bos": False}).data, processes=1, progress=False)
    given = {"data": {"prepared": str(old.path)}}
    with pytest.raises(ConfigError, match=r"manifest\.json: the documents were written without <s> before each"):
        run(config(tmp_path, **given))
    assert run(config(tmp_path, tokenizer={"add_bos": False}, **given)) == EXIT_REQUEUE


def test_tasks_are_scored_as_by_lm_eval(tmp_path: Path) -> None:
    """With no option that corrects it: the begin of a context, and a text that spells special tokens."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    pytest.importorskip("accelerate", reason="lm_eval's model for transformers needs accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from xscale.evaluate.lm_eval_model import lm_eval_model
    from xscale.evaluate.text_scorer import TextScorer

    assert run(config(tmp_path, precision={"compute": "float64", "master": "float64"})) == EXIT_REQUEUE
    status, said = call("checkpoint", "export", tmp_path / "run", tmp_path / "exported")
    assert status == 0, said
    options = {"dtype": "float64", "device": "cpu", "batch_size": 2, "max_length": 32}
    reference = HFLM(str(tmp_path / "exported"), **options)
    loaded = load_run(tmp_path / "run")
    scorer = TextScorer(loaded.model, loaded.mesh, 32, 3, loaded.tokenizer.decode, loaded.tokenizer.eos)
    ours = lm_eval_model(scorer, loaded.tokenizer, 32)
    rolling = ["abcd", "ab</s>cd", "<s>abcd", "dcba" * 20, "a</s><s>b"]
    pairs = [("abcd", " dcba"), ("ab</s>", "cd"), ("", "abc"), ("<s>ab", "cd"), ("", "<s>ab"), ("abcd" * 20, "a")]
    for kind, texts in {"loglikelihood_rolling": [(text,) for text in rolling], "loglikelihood": pairs}.items():
        requests = [Instance(kind, {}, text, number) for number, text in enumerate(texts)]
        result, expected = getattr(ours, kind)(requests), getattr(reference, kind)(requests)
        if kind == "loglikelihood":
            assert [greedy for _, greedy in result] == [greedy for _, greedy in expected]
            result, expected = ([score for score, _ in scores] for scores in (result, expected))
        assert result == pytest.approx(expected, abs=1e-6), kind

"""Fine-tuning on labels: what it reads and draws anew, resume bit for bit, frozen weights, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.train.tiny import losses, metrics, recipe, run
from xscale.api import load_model
from xscale.checkpoint.load import load_tensors
from xscale.commands.checkpoints.convert import export_checkpoint
from xscale.commands.checkpoints.merge_lora import merge_run
from xscale.core.config import decode, encode
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.data.corpus.stored_tokenizer import open_stored_tokenizer, store_tokenizer
from xscale.data.tokenizer.byte import Byte
from xscale.evaluate.evaluate_run import evaluate_run
from xscale.objective.labelled import Classify
from xscale.objective.objective import SpecialTokens
from xscale.recipe import Recipe
from xscale.run import init_weights

MODEL: dict[str, Any] = {
    "kind": "encoder",
    "width": 32,
    "position": "learned",
    "transform": "gelu",
    "head_bias": True,
    "stack": {
        "depth": 2,
        "block": {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "dense", "hidden": 48}},
    },
}
CLASSES = ["even", "odd", "big"]


def examples(folder: Path) -> str:
    """Ninety numbers in letters; the class says what they are."""
    file = folder / "examples.jsonl"
    rows = [
        {"text": " ".join("abcdefghij"[int(digit)] for digit in str(number)), "label": CLASSES[number % 3]}
        for number in range(90)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def pretrained(folder: Path, **sections: Any) -> int:
    return run(recipe(folder, "base", model=MODEL, objective={"kind": "masked"}, **sections))


def asked(folder: Path, name: str = "run", **sections: Any) -> Recipe:
    data = {"source": {"kind": "labelled", "paths": [examples(folder)], "classes": CLASSES}, **sections.pop("data", {})}
    objective = {"kind": "classify", "classes": 3, **sections.pop("objective", {})}
    return recipe(folder, name, **{"model": MODEL, "objective": objective, "data": data, **sections})


def finetuned(folder: Path, name: str = "run", **sections: Any) -> int:
    return run(asked(folder, name, **sections))


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    newest = max((folder / name / "checkpoints").glob("step-*"))
    return {key: value for key, value in load_tensors(newest).items() if key.startswith("model.")}


def test_a_run_learns_and_reports_its_metrics(tmp_path: Path) -> None:
    train = {"steps": 40, "eval_every": 20, "eval_sequences": None, "micro_batch_size": 8}
    assert finetuned(tmp_path, train=train, optimizer={"kind": "adamw", "lr": 0.01}) == EXIT_DONE
    line = next(item for item in reversed(metrics(tmp_path)) if "eval_accuracy" in item)
    assert {"eval_loss", "eval_accuracy", "eval_macro_f1", "eval_matthews"} <= line.keys()
    assert line["perplexity"] is None
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "baseline: the most frequent class '" in log
    assert "labelled examples for training and" in log
    evaluation = evaluate_run(tmp_path / "run", None)
    assert evaluation["accuracy"] == line["eval_accuracy"]
    assert evaluation.keys() == {"step", "loss", "accuracy", "majority_accuracy", "macro_f1", "matthews"}
    assert evaluation["majority_accuracy"] >= 1 / 3


@pytest.mark.long
def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    assert pretrained(tmp_path) == EXIT_DONE
    start = {"init": {"from": str(tmp_path / "base")}, "train": {"steps": 4, "freeze": ["embed.*", "stack.*"]}}
    assert finetuned(tmp_path, **start) == EXIT_DONE
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "new, drawn from the seed: head.classes.weight, head.classes.bias" in log
    assert "left out of" in log
    assert "head.transform.dense.weight" in log
    base, tuned = weights(tmp_path, "base"), weights(tmp_path, "run")
    for name, value in tuned.items():
        assert name.startswith("model.head.") or torch.equal(value, base[name]), name
    # Another process starts without the first run: its checkpoint is complete.
    (tmp_path / "base").rename(tmp_path / "gone")
    assert finetuned(tmp_path, **{**start, "train": {**start["train"], "steps": 6}}) == EXIT_DONE
    assert evaluate_run(tmp_path / "run", None)["step"] == 6


def test_lora_is_merged_into_a_run_of_its_own(tmp_path: Path) -> None:
    assert pretrained(tmp_path) == EXIT_DONE
    start = {"init": {"from": str(tmp_path / "base")}, "lora": {"rank": 2, "match": ["*.q", "*.down"]}}
    assert finetuned(tmp_path, **start, optimizer={"kind": "adamw", "lr": 0.05}) == EXIT_DONE
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    states = {name for name in load_tensors(newest) if name.startswith("optimizer.")}
    assert states
    assert all(".lora." in name or ".head." in name for name in states)
    written: list[str] = []
    assert merge_run(tmp_path / "run", tmp_path / "merged", written.append) == EXIT_DONE
    assert not any(".lora." in name for name in weights(tmp_path, "merged"))
    adapted, merged = (evaluate_run(tmp_path / name, None) for name in ("run", "merged"))
    assert merged["loss"] == pytest.approx(adapted["loss"], rel=1e-5)
    with pytest.raises(ConfigError, match="the run has no LoRA to merge"):
        merge_run(tmp_path / "merged", tmp_path / "again")
    refused = problems_of(tmp_path, lora={"match": ["*.quary"]})
    assert "lora.match.0: no linear map has a path that matches '*.quary'" in refused
    assert "Take stack.blocks.*.mixer.part.q" in refused
    # What was to be trained matched nothing, which is one problem and not two.
    decoder = {"kind": "decoder", "width": 32, "stack": MODEL["stack"]}
    one = recipe(tmp_path, model=decoder, lora={"match": ["*.quary"]}).check()
    assert [problem.path for problem in one] == ["lora.match.0"]


@pytest.mark.long
def test_merged_lora_is_exported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    block = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "gated", "hidden": 48}, "norm": "rms"}
    model = {"kind": "decoder", "width": 32, "tied": False, "stack": {"depth": 2, "block": block}}
    asked = {"model": model, "objective": {"kind": "causal"}, "lora": {"rank": 2, "match": ["*.q", "*.down"]}}
    assert run(recipe(tmp_path, "run", optimizer={"kind": "adamw", "lr": 0.1}, **asked)) == EXIT_DONE
    with pytest.raises(ConfigError, match="Merge it with `xscale checkpoint merge-lora"):
        export_checkpoint(tmp_path / "run", tmp_path / "hf", "hf", None, 1e-3)
    assert merge_run(tmp_path / "run", tmp_path / "merged") == EXIT_DONE
    assert export_checkpoint(tmp_path / "merged", tmp_path / "hf", "hf", None, 1e-3) == EXIT_DONE
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.arange(20)[None]
    adapted = load_model(tmp_path / "run")
    logits = theirs(ids).logits
    # An export has no padding rows.
    ours = adapted(ids)[..., : logits.shape[-1]]
    torch.testing.assert_close(logits, ours, rtol=1e-4, atol=1e-4)
    # What LoRA learned shows: without it the logits are others.
    for name, parameter in adapted.named_parameters():
        if name.endswith(".lora.b"):
            torch.nn.init.zeros_(parameter)
    assert (theirs(ids).logits - adapted(ids)[..., : logits.shape[-1]]).abs().max() > 0.01


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "freeze"),
    [
        ({"mesh": {"tp": 2}}, []),
        ({"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}, []),
        ({"mesh": {"pp": 2}}, ["embed.*", "stack.blocks.0.*"]),
    ],
    ids=["tp", "zero3", "pp_with_a_frozen_stage"],
)
def test_layouts_begin_and_resume_alike(
    tmp_path: Path, pool: Pool, parallel: dict[str, Any], freeze: list[str]
) -> None:
    assert pretrained(tmp_path) == EXIT_DONE
    start: dict[str, Any] = {"init": {"from": str(tmp_path / "base")}, "train": {"freeze": freeze}}
    assert finetuned(tmp_path, "alone", **start) == EXIT_DONE
    short = {**start, "train": {"freeze": freeze, "stop_after": 3}, "parallel": parallel}
    assert pool.run(finetuned, 2, tmp_path, "parts", **short) == [EXIT_REQUEUE] * 2
    assert pool.run(finetuned, 2, tmp_path, "parts", **start, parallel=parallel) == [EXIT_DONE] * 2
    assert losses(tmp_path, "parts") == pytest.approx(losses(tmp_path, "alone"), rel=1e-3)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    assert pretrained(tmp_path) == EXIT_DONE
    base = {"init": {"from": str(tmp_path / "base")}}
    deeper = {**MODEL, "stack": {**MODEL["stack"], "depth": 3}}
    with pytest.raises(ConfigError, match=r"init\.from: .* of another model: it lacks stack\.blocks\.2\."):
        finetuned(tmp_path, model=deeper, **base)
    wider = {**MODEL, "width": 64}
    with pytest.raises(ConfigError, match=r"embed\.table\.weight is \[\d+, 32\] there and \[\d+, 64\] here"):
        finetuned(tmp_path, model=wider, **base)
    with pytest.raises(ConfigError, match=r"init\.from: 'nowhere' is neither a run"):
        finetuned(tmp_path, init={"from": "nowhere"})
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("kept")
    with pytest.raises(ConfigError, match="of another model"):
        finetuned(tmp_path, model=wider, **base)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def refused_weights(folder: Path) -> None:
    with pytest.raises(ConfigError, match="of another model"):
        finetuned(folder, model={**MODEL, "width": 64}, init={"from": str(folder / "base")})


@pytest.mark.long
def test_a_refusal_on_two_ranks_leaves_no_lock_and_no_tokenizer(tmp_path: Path, pool: Pool) -> None:
    assert pretrained(tmp_path) == EXIT_DONE
    pool.run(refused_weights, 2, tmp_path)
    assert not list(tmp_path.glob("run/*"))


def test_a_tokenizer_that_was_left_behind_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of transformers has no tokenizer of ours: the run takes the configured one, whatever its folder has."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    monkeypatch.setattr(init_weights, "_read_hf", lambda *_: ({}, []))
    monkeypatch.setattr(init_weights, "_load_hf", lambda *_: [])
    left = Byte(Byte.Config(sentinels=5), tmp_path)
    (tmp_path / "run").mkdir()
    store_tokenizer(left, tmp_path / "run")
    assert finetuned(tmp_path, init={"from": str(tmp_path / "hf")}, train={"steps": 1, "eval_every": 0}) == EXIT_DONE
    stored = open_stored_tokenizer(tmp_path / "run")
    assert stored is not None
    assert stored.fingerprint == Byte(Byte.Config(), tmp_path).fingerprint != left.fingerprint


def problems_of(folder: Path, **sections: Any) -> str:
    return "\n".join(map(str, asked(folder, **sections).check()))


def test_what_does_not_fit_labels_is_refused(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == ""
    assert "objective.classes: is 5, and the source 'labelled' has 3 classes: even, odd, big" in problems_of(
        tmp_path, objective={"classes": 5}
    )
    decoder = {"kind": "decoder", "width": 32, "stack": MODEL["stack"]}
    assert "objective.pool: the first token of a causal model has read no other" in problems_of(tmp_path, model=decoder)
    assert problems_of(tmp_path, model=decoder, objective={"pool": "last"}) == ""
    assert "'tag' reads 'tags'" in problems_of(tmp_path, objective={"kind": "tag"})
    refused = problems_of(tmp_path, data={"source": {"kind": "stdlib"}})
    assert "the documents of the source 'stdlib' are texts, and 'classify' reads labelled examples" in refused
    assert "Take data.source.kind=" in refused
    refused = problems_of(tmp_path, train={"freeze": ["stack.block.*"]})
    assert "train.freeze.0: no parameter has a name that matches 'stack.block.*'" in refused
    assert "objective.pair_types: tells" in problems_of(tmp_path, objective={"pair_types": True})
    assert "head" not in problems_of(tmp_path, model={**MODEL, "token_types": 2}, objective={"pair_types": True})
    sharded = {"lora": {"match": ["*.q", "*.down"], "dropout": 0.1}, "parallel": {"mesh": {"tp": 2}}}
    listed = [str(problem) for problem in asked(tmp_path, **sharded).check(2)]
    assert len(listed) == 1
    assert "down reads channels that tp=2 shards" in listed[0]
    assert "freezes all parameters" in problems_of(tmp_path, train={"freeze": ["*"]})
    refused = problems_of(tmp_path, data={"cross_documents": True})
    assert "data.cross_documents: 'classify' hides padding" in refused


@pytest.mark.parametrize("pair_types", [False, True])
def test_the_second_of_two_texts_has_a_type(pair_types: bool) -> None:
    """Devlin et al. 2019, section 3: [CLS] A [SEP] has the first type and B [SEP] the second; padding is of neither."""
    specials = SpecialTokens(vocabulary=20, pad=0, eos=2, mask=None, sentinels=range(0), bos=1)
    objective = Classify(Classify.Config(classes=2, pair_types=pair_types), specials, 9, 0)
    tokens = torch.tensor([[1, 5, 6, 2, 7, 2, 0, 0, 0], [1, 5, 2, 0, 0, 0, 0, 0, 0]])
    documents = torch.tensor([[0] * 6 + [1] * 3, [0] * 3 + [1] * 6])
    types = objective.batch(tokens, documents, torch.arange(2), labels=torch.zeros(2, 1).long()).tokens.types
    wanted = [[0, 0, 0, 0, 1, 1, 0, 0, 0], [0] * 9] if pair_types else None
    assert (None if types is None else types.tolist()) == wanted


def test_the_key_from_is_data(tmp_path: Path) -> None:
    settings = asked(tmp_path, init={"from": "runs/x"})
    data = encode(settings)
    assert data["init"] == {"from": "runs/x"}
    assert decode(Recipe, data) == settings

"""A fine-tuned classifier is BertForSequenceClassification or BertForTokenClassification of `transformers`, and begins
with the encoder of any folder of BERT."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.hf.models import SECTIONS
from tests.train.test_finetune import CLASSES, examples
from tests.train.tiny import recipe, run
from xscale.api import load_model
from xscale.checkpoint.load import load_tensors
from xscale.convert.hf.export_model import export_model
from xscale.convert.hf.import_model import import_body
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.nn.tokens import Tokens

BERT: dict[str, Any] = {**SECTIONS["bert"][1], "token_types": 2}
CLASSIFIER = "BertForSequenceClassification"
LABELLED = {"kind": "labelled", "classes": CLASSES}


def classify(folder: Path, name: str = "run", **sections: Any) -> Path:
    """Train a classifier for one step, with a learning rate of next to nothing."""
    sections = {
        "model": BERT,
        "data": {"source": {**LABELLED, "paths": [examples(folder)]}},
        "train": {"steps": 1, "eval_every": 0},
        "optimizer": {"kind": "adamw", "lr": 1e-9},
        **sections,
        "objective": {"kind": "classify", "classes": 3, "dense": True, **sections.get("objective", {})},
    }
    assert run(recipe(folder, name, **sections)) == EXIT_DONE
    return folder / name


def weights(path: Path) -> dict[str, torch.Tensor]:
    tensors = load_tensors(next(path.glob("checkpoints/step-*")))
    return {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}


# The keys of the language-model head, which a classifier has not, change nothing.
@pytest.mark.parametrize("changes", [{}, {"transform": None, "head_bias": False}])
def test_a_classifier_goes_out_and_back(changes: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path, out = classify(tmp_path, model={**BERT, **changes}, optimizer={"kind": "adamw", "lr": 0.01}), tmp_path / "out"
    said: list[str] = []
    assert export_model(path, out, architecture="bert", say=said.append) == EXIT_DONE, said
    assert "transformers.BertForSequenceClassification.from_pretrained" in said[-1]
    config = json.loads((out / "config.json").read_text())
    assert list(config["id2label"].values()) == CLASSES
    external = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    ids, types = torch.arange(10, 22).view(2, 6), torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    model = load_model(path)
    with torch.no_grad():
        logits = external(input_ids=ids, token_type_ids=types).logits
        torch.testing.assert_close(model.model(Tokens.from_ids(ids, types=types))[:, 0], logits, rtol=1e-4, atol=1e-5)
    again = weights(classify(tmp_path, "again", model={**BERT, **changes}, init={"from": str(out)}))
    for name, value in weights(path).items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "loader"), [("tag", "BertForTokenClassification"), ("regress", CLASSIFIER)])
def test_scores_and_tags_go_out(kind: str, loader: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    file = tmp_path / "rows.jsonl"
    label: Any = "odd big" if kind == "tag" else 0.5
    file.write_text((json.dumps({"text": "one two", "label": label}) + "\n") * 40)
    source = {"kind": "labelled", "paths": [str(file)], "labels": "tags" if kind == "tag" else "score"}
    source |= {"classes": CLASSES} if kind == "tag" else {}
    objective = {"kind": kind, "dense": kind == "regress"} | ({"classes": 3} if kind == "tag" else {})
    sections = {
        "data": {"source": source, "validation": 0},
        "objective": objective,
        "train": {"steps": 1, "eval_every": 0},
    }
    assert run(recipe(tmp_path, model=BERT, **sections)) == EXIT_DONE
    said: list[str] = []
    assert export_model(tmp_path / "run", tmp_path / "out", say=said.append) == EXIT_DONE, said
    assert f"transformers.{loader}.from_pretrained" in said[-1]
    external = getattr(transformers, loader).from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(10, 22).view(2, 6)
    with torch.no_grad():
        outputs = load_model(tmp_path / "run").model(Tokens.from_ids(ids))
        outputs = outputs if kind == "tag" else outputs[:, 0]
        torch.testing.assert_close(outputs, external(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def test_a_head_without_counterpart_is_refused(tmp_path: Path) -> None:
    path = classify(tmp_path, objective={"dense": False})

    def refused(architecture: str | None) -> str:
        with pytest.raises(ConfigError) as error:
            export_model(path, tmp_path / "out", architecture=architecture, say=lambda _: None)
        return str(error.value)

    assert "objective.dense: BertForSequenceClassification has a dense layer" in refused("bert")
    assert "A run with objective.dense=true would map." in refused(None)
    assert "'roberta' has no mapping for the head of classes that objective 'classify' trains" in refused("roberta")
    assert not (tmp_path / "out").exists()


FOLDERS = {
    "BertModel": (["pooler.dense.weight"], "head.classes.weight, head.classes.bias"),
    "BertForMaskedLM": ([], "head.dense.weight, head.dense.bias, head.classes.weight"),
    "BertForSequenceClassification": (["bert.pooler.dense.weight", "classifier.weight"], ""),
    "of five classes": (["bert.pooler.dense.weight"], "head.classes.weight, head.classes.bias"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_classifier_begins_with_an_encoder(name: str, tmp_path: Path) -> None:
    """The head is the folder's where it has the same shape, and new where it has none."""
    transformers = pytest.importorskip("transformers")
    of_head, new = FOLDERS[name]
    config = transformers.BertConfig(
        vocab_size=384,
        hidden_size=BERT["width"],
        intermediate_size=4 * BERT["width"],
        num_hidden_layers=BERT["stack"]["depth"],
        num_attention_heads=BERT["stack"]["block"]["mixer"]["heads"],
        max_position_embeddings=32,
        num_labels=5 if "five" in name else 3,
    )
    torch.manual_seed(0)
    external = getattr(transformers, name if name.startswith("Bert") else "BertForSequenceClassification")(config)
    external.save_pretrained(tmp_path / "folder")
    path = classify(tmp_path, init={"from": str(tmp_path / "folder")})
    log, tensors, state = (path / "log.txt").read_text(), weights(path), external.eval().state_dict()
    assert (f"new, drawn from the seed: {new}" in log) if new else ("drawn from the seed" not in log)
    assert ("not used of" in log) == (name == "BertForMaskedLM")
    assert ("left out of" in log) == ("five" in name)
    for hf_name in of_head:
        parameter = "head.dense.weight" if "pooler" in hf_name else "head.classes.weight"
        torch.testing.assert_close(tensors[parameter], state[hf_name], rtol=0, atol=1e-7)
    # A head without a dense layer takes no classifier that reads a pooler's output.
    without_pooler, unused = import_body(tmp_path / "folder", dense=False)
    assert not any(parameter.startswith("head.") for parameter in without_pooler)
    assert set(of_head) <= set(unused)
    ids = torch.arange(10, 22).view(2, 6)
    model = load_model(path).model
    with torch.no_grad():
        states = getattr(external, "bert", external)(input_ids=ids).last_hidden_state
        tokens = Tokens.from_ids(ids)
        torch.testing.assert_close(model.stack(model.embed(tokens), tokens), states, rtol=1e-4, atol=1e-5)

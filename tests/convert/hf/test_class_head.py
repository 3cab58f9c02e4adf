"""A fine-tuned classifier is BertForSequenceClassification or BertForTokenClassification of `transformers`, or that of
RoBERTa or DistilBERT, and begins with the encoder of any folder of these."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.hf.models import SECTIONS, encoder
from tests.train.test_finetune import CLASSES, examples
from tests.train.tiny import recipe, run
from xscale.api import load_model
from xscale.checkpoint.load import load_tensors
from xscale.convert.hf.class_head import _with_language_head
from xscale.convert.hf.export_model import export_model
from xscale.convert.hf.import_model import import_body, import_model
from xscale.convert.hf.registry import model_of
from xscale.convert.hf.types.bert import BERT as BERT_TYPE
from xscale.convert.hf.types.bert import ROBERTA
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.nn.tokens import Tokens

TABLE = "embed.table.weight"
"""Parameter with a row for each token; an export leaves out those of padding."""
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


@pytest.mark.long
# The keys of the language-model head, which a classifier has not, change nothing.
@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"transform": None, "head_bias": False}, marks=pytest.mark.long)],
    ids=["whole", "bare"],
)
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
        rows = external.get_input_embeddings().num_embeddings if name == TABLE else None
        torch.testing.assert_close(again[name][:rows], value[:rows], rtol=0, atol=1e-6, msg=name)


# Without --architecture the head decides where the blocks do not.
SEQUENCES = {
    "roberta": ("RobertaForSequenceClassification", "tanh", "roberta"),
    "distilbert": ("DistilBertForSequenceClassification", "relu", None),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SEQUENCES)
def test_classifiers_of_other_architectures_go_out_and_back(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    loader, activation, wanted = SEQUENCES[name]
    # RoBERTa has a table of one token type.
    section = {**SECTIONS[name][1], "token_types": int(name == "roberta")}
    objective = {"dense_activation": activation}
    sections: dict[str, Any] = {"model": section, "objective": objective}
    path = classify(tmp_path, **sections, optimizer={"kind": "adamw", "lr": 0.01})
    said: list[str] = []
    assert export_model(path, tmp_path / "out", architecture=wanted, say=said.append) == EXIT_DONE, said
    assert f"transformers.{loader}.from_pretrained" in said[-1]
    external = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert type(external).__name__ == loader
    ids = torch.arange(10, 22).view(2, 6)
    with torch.no_grad():
        logits = load_model(path).model(Tokens.from_ids(ids))[:, 0]
        torch.testing.assert_close(logits, external(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    again = classify(tmp_path, "again", **sections, init={"from": str(tmp_path / "out")})
    assert "drawn from the seed" not in (again / "log.txt").read_text()
    ours, theirs = weights(again), weights(path)
    for parameter, value in theirs.items():
        rows = external.get_input_embeddings().num_embeddings if parameter == TABLE else None
        torch.testing.assert_close(ours[parameter][:rows], value[:rows], rtol=0, atol=1e-6, msg=parameter)
    # A dense layer with another activation is another head.
    other = {"tanh": "relu", "relu": "tanh"}[activation]
    read, unused = import_body(tmp_path / "out", dense=other)
    assert not any(parameter.startswith("head.") for parameter in read)
    assert len(unused) == 4


TAGGERS = {
    "tag": ("bert", "BertForTokenClassification"),
    "regress": ("bert", CLASSIFIER),
    "tag roberta": ("roberta", "RobertaForTokenClassification"),
    "tag distilbert": ("distilbert", "DistilBertForTokenClassification"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TAGGERS)
def test_scores_and_tags_go_out(name: str, tmp_path: Path) -> None:
    (architecture, loader), kind = TAGGERS[name], name.split()[0]
    section = BERT if architecture == "bert" else SECTIONS[architecture][1]
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
    assert run(recipe(tmp_path, model=section, **sections)) == EXIT_DONE
    said: list[str] = []
    out = tmp_path / "out"
    assert export_model(tmp_path / "run", out, architecture=architecture, say=said.append) == EXIT_DONE, said
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
    assert "objective.dense: RobertaForSequenceClassification has a dense layer with tanh" in refused("roberta")
    assert "'albert' has no mapping for the head of classes that objective 'classify' trains" in refused("albert")
    assert not (tmp_path / "out").exists()


def test_a_relu_is_another_head_and_one_without_a_dense_layer_is_refused(tmp_path: Path) -> None:
    path = classify(tmp_path, objective={"dense_activation": "relu"})
    with pytest.raises(ConfigError, match=r"the dense layer of BertForSequenceClassification has the activation tanh"):
        export_model(path, tmp_path / "out", architecture="bert", say=lambda _: None)
    asked = recipe(tmp_path, objective={"kind": "regress", "dense_activation": "relu", "label_smoothing": 0.1})
    problems = {problem.path: problem.what for problem in asked.check()}
    assert problems["objective.dense_activation"] == "is the activation of a dense layer, and there is none"
    assert "objective.label_smoothing" in problems


def test_a_folder_without_a_language_model_head_is_told(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 384, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=32)
    transformers.BertModel(config).save_pretrained(tmp_path / "folder")
    with pytest.raises(ConfigError) as error:
        import_model(tmp_path / "folder")
    assert "a model without its language-model head: its tensors lack the prefix 'bert.', and it has no cls.pred" in (
        str(error.value)
    )
    assert "bert.embeddings" not in str(error.value)
    assert f"by a run with init.from={tmp_path / 'folder'}" in str(error.value)


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
    without_pooler, unused = import_body(tmp_path / "folder", dense=None)
    assert not any(parameter.startswith("head.") for parameter in without_pooler)
    assert set(of_head) <= set(unused)
    ids = torch.arange(10, 22).view(2, 6)
    model = load_model(path).model
    with torch.no_grad():
        states = getattr(external, "bert", external)(input_ids=ids).last_hidden_state
        tokens = Tokens.from_ids(ids)
        torch.testing.assert_close(model.stack(model.embed(tokens), tokens), states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "transform"), [(ROBERTA, "gelu"), (BERT_TYPE, "relu")], ids=["roberta", "bert"])
def test_the_language_head_that_a_classifier_does_not_have(kind: Any, transform: str) -> None:
    """RoBERTa's has gelu whatever the blocks have, and BERT's the activation of the blocks."""
    model = model_of(encoder(activation="relu"))
    assert _with_language_head(model, kind.architecture()).transform == transform

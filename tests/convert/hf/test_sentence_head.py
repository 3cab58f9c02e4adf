"""A model with a head for pairs of sentences is BertForPreTraining or AlbertForPreTraining of `transformers`: out and
in, with token types and equal logits of tokens and classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands.test_import_hf import call
from tests.convert.hf.models import SECTIONS, checkpoint
from tests.train.tiny import recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.convert.hf import export_model as write
from xscale.convert.hf.compare import TOLERANCE, build, compare_logits
from xscale.convert.hf.import_model import import_model
from xscale.convert.hf.registry import model_of
from xscale.core.compose import dump
from xscale.core.config import encode
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.nn.tokens import Tokens

CLASSES = {
    "bert": ("BertForPreTraining", "seq_relationship_logits", "cls.seq_relationship"),
    "albert": ("AlbertForPreTraining", "sop_logits", "sop_classifier.classifier"),
}


def section_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**SECTIONS[name][1], "token_types": 2, "sentence_head": {"classes": 2}, **changes}


def exported(folder: Path, name: str, **changes: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    path, weights = checkpoint(folder / "source", section_of(name, **changes))
    said: list[str] = []
    assert write.export_model(path, folder / "out", architecture=name, say=said.append) == 0, said
    assert f"transformers.{CLASSES[name][0]}.from_pretrained" in said[-1]
    return folder / "out", weights


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_out_and_back(name: str, tied: bool, tmp_path: Path) -> None:
    out, weights = exported(tmp_path, name, tied=tied)
    assert json.loads((out / "config.json").read_text())["architectures"] == [CLASSES[name][0]]
    back = import_model(out, sentence_head=True)
    assert back.model["sentence_head"] == {"classes": 2}
    assert back.ignored_tensors == ()
    assert back.comparison.within(TOLERANCE)
    assert back.weights.keys() == weights.keys()
    for parameter, value in weights.items():
        assert torch.equal(back.weights[parameter], value), parameter
    without = import_model(out)
    assert "sentence_head" not in without.model
    assert len(without.ignored_tensors) == 4


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSES)
def test_logits_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    """The library's own random weights, as its own `save_pretrained` lays them out, on texts of two types."""
    transformers = pytest.importorskip("transformers")
    out, _ = exported(tmp_path, name)
    loader, output, classifier = CLASSES[name]
    torch.manual_seed(0)
    kind = getattr(transformers, loader)
    theirs = kind(kind.config_class.from_pretrained(out)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    converted = import_model(tmp_path / "theirs", sentence_head=True)
    assert converted.comparison.within(TOLERANCE), converted.comparison
    ours: Any = build(model_of(converted.model), converted.sizes, converted.weights)
    ids = torch.arange(10, 22).view(2, 6)
    types = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    tokens = Tokens.from_ids(ids, types=types)
    with torch.no_grad():
        wanted = theirs(ids, token_type_ids=types)
        classes = ours.head.sentence(ours.stack(ours.embed(tokens), tokens))
        torch.testing.assert_close(classes, wanted[output], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours(tokens), wanted.prediction_logits, rtol=1e-4, atol=1e-4)
        untyped = theirs(ids)[output]
    assert (untyped - wanted[output]).abs().max() > 1e-3
    # The comparison of an import sees the classes: with the two exchanged it is another model.
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    weights = dict(converted.weights)
    weights["head.sentence.classifier.weight"] = tensors[f"{classifier}.weight"].flip(0)
    wrong = compare_logits(
        model_of(converted.model), converted.sizes, weights, converted.architecture, tmp_path / "theirs"
    )
    assert not wrong.within(TOLERANCE)
    del tensors[f"{classifier}.weight"], tensors[f"{classifier}.bias"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert "sentence_head" not in import_model(tmp_path / "theirs", sentence_head=True).model


@pytest.mark.long
def test_a_run_keeps_the_head_that_its_objective_reads(tmp_path: Path) -> None:
    out, weights = exported(tmp_path, "bert")
    asked = recipe(
        tmp_path,
        model=section_of("bert"),
        objective={"kind": "masked_sentences"},
        data={"split_sentences": True, "sequence_length": 24},
    )
    config = tmp_path / "config.yaml"
    config.write_text(dump(encode(asked)))
    status, said = call("checkpoint", "import", out, tmp_path / "in", config, "--from", "hf")
    assert status == 0, said
    tensors = load_tensors(next((tmp_path / "in").glob("checkpoints/step-*")))
    for name, value in weights.items():
        assert torch.equal(tensors[f"model.{name}"], value), name
    status, said = call("checkpoint", "import", out, tmp_path / "masked", "--from", "hf")
    assert status == 0, said
    assert "ignored: cls.seq_relationship.weight" in said
    bare, _ = checkpoint(tmp_path / "bare", SECTIONS["bert"][1])
    assert write.export_model(bare, tmp_path / "plain", architecture="bert", say=lambda _: None) == 0
    with pytest.raises(ConfigError, match="it has no head for the classes of sequences that objective 'masked_sent"):
        call("checkpoint", "import", tmp_path / "plain", tmp_path / "none", config, "--from", "hf")
    assert not (tmp_path / "none").exists()


@pytest.mark.long
def test_a_run_begins_with_the_head_of_a_folder(tmp_path: Path) -> None:
    """`init.from` reads the classifier too; with a learning rate of next to nothing one step leaves it as it was."""

    def trained(name: str, **sections: Any) -> dict[str, torch.Tensor]:
        data = {"split_sentences": True, "sequence_length": 24}
        train = {"steps": 1, "eval_every": 0}
        objective = {"kind": "masked_sentences"}
        asked = recipe(
            tmp_path, name, model=section_of("bert"), objective=objective, data=data, train=train, **sections
        )
        assert run(asked) == EXIT_DONE
        return load_tensors(next((tmp_path / name).glob("checkpoints/step-*")))

    base = trained("base")
    said: list[str] = []
    assert write.export_model(tmp_path / "base", tmp_path / "out", architecture="bert", say=said.append) == 0, said
    sections = {"init": {"from": str(tmp_path / "out")}, "optimizer": {"kind": "adamw", "lr": 1e-9}}
    tensors = trained("next", run={"seed": 4}, **sections)
    names = [name for name in base if name.startswith("model.")]
    assert any("sentence.classifier" in name for name in names)
    for name in names:
        # An export has no padding rows.
        rows = 361 if len(base[name]) == 384 else None
        torch.testing.assert_close(tensors[name][:rows], base[name][:rows], rtol=0, atol=1e-7, msg=name)


@pytest.mark.parametrize("name", CLASSES)
def test_three_classes_have_no_place_in_the_library(name: str, tmp_path: Path) -> None:
    path, _ = checkpoint(tmp_path / "run", section_of(name, sentence_head={"classes": 3}))
    with pytest.raises(ConfigError, match=r"model.sentence_head.classes: .* does not support 3"):
        write.export_model(path, tmp_path / "out", architecture=name, say=lambda _: None)

"""`python -m xscale_tinybert`: the algorithm with a run's model in literal loops, resumed, and read as in training."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from tests.commands.test_import_hf import call
from tests.convert.hf.models import drawn, encoder
from tests.plugins.tinybert.test_augment import (
    CLS,
    MASK,
    SEP,
    VECTORS,
    VOCABULARY,
    WORDS,
    Logits,
    algorithm_1,
    word_pieces,
)
from tests.train.tiny import recipe
from xscale.api import load_model
from xscale.cli.main import main
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepare import prepare
from xscale.data.corpus.prepared import open_prepared
from xscale.data.source.labelled import Labelled
from xscale.data.source.source import Labels, document_hash, validation_below
from xscale.data.tokenizer.byte import Byte
from xscale.run.init_run import create_run, model_from_weights
from xscale_tinybert import augment_data as augment_data_module
from xscale_tinybert import fill_masks
from xscale_tinybert.__main__ import app
from xscale_tinybert.augment import Augmentation, MaskedWord
from xscale_tinybert.augment_data import AugmentRequest, augment_data
from xscale_tinybert.resumable_file import ResumableFile

MODEL = encoder()
TEXTS = [
    "the quick dog sees a red cat",
    "quickly the old fox runs",
    "dogs of the cat",
    "a cat likes unseen dogs",
    "red",
    "the fox, a dog and the cat sees dogs.",
]
CLASSES = ["no", "yes"]
SETTINGS = Augmentation(copies=3, probability=0.6, candidates=4, seed=5)


def masked_run(folder: Path, **sections: Any) -> Path:
    """A run at step 0 of a masked language model with large weights, whose pieces are the words of the tests."""
    tokenizer = word_pieces(folder / "tokenizer")
    data = {"tokenizer": encode(tokenizer.config), "sequence_length": 24}
    sections = {"model": MODEL, "objective": {"kind": "masked"}, "data": data, **sections}
    settings = recipe(folder, "bert", **sections)
    model = model_from_weights(settings, tokenizer.vocabulary, drawn(sections["model"]))
    create_run(settings, model, folder / "bert", tokenizer=tokenizer)
    return folder / "bert"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return masked_run(tmp_path_factory.mktemp("run"))


def vector_file(folder: Path) -> Path:
    lines = [f"{word} {' '.join(map(str, values))}\n" for word, values in VECTORS.items()]
    (folder / "vectors.txt").write_text("".join(lines))
    return folder / "vectors.txt"


def examples(folder: Path, texts: list[str] = TEXTS) -> Path:
    rows = [{"text": text, "label": CLASSES[number % 2], "id": number} for number, text in enumerate(texts)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def request(folder: Path, bert: Path, validation: float = 0, **fields: Any) -> AugmentRequest:
    source = fields.pop("source", {})
    if "paths" not in source:
        source = {"paths": str(examples(folder)), **source}
    source = {"kind": "labelled", "classes": CLASSES, **source} if "kind" not in source else source
    data = decode(DataConfig, {"source": source, "validation": validation})
    given = {"vectors": vector_file(folder), "settings": SETTINGS, **fields}
    return AugmentRequest(data, folder / "out.jsonl", bert, **given)


def augmented(asked_for: AugmentRequest) -> list[dict[str, Any]]:
    augment_data(asked_for, progress=False)
    return [json.loads(line) for line in asked_for.output.read_text(encoding="utf-8").splitlines()]


def run_logits(bert: Path) -> Logits:
    model = load_model(bert)

    def logits_of(ids: list[int], position: int) -> list[float]:
        with torch.no_grad():
            logits: list[float] = model(torch.tensor([ids]))[0, position].tolist()
        return logits

    return logits_of


@pytest.mark.parametrize("context", ["augmented", "original"])
def test_it_is_algorithm_1_with_the_model_of_a_run(tmp_path: Path, bert: Path, context: Any) -> None:
    settings = replace(SETTINGS, context=context)
    rows = augmented(request(tmp_path, bert, settings=settings))
    logits_of = run_logits(bert)
    expected = []
    for number, text in enumerate(TEXTS):
        for new_text in [text, *algorithm_1(text, number, 0, settings, logits_of)]:
            expected.append({"text": new_text, "label": CLASSES[number % 2], "original": text})
    assert rows == expected
    assert len({row["text"] for row in rows}) > 2 * len(TEXTS)


@pytest.mark.long
def test_it_is_algorithm_1_with_bert_of_transformers(tmp_path: Path) -> None:
    """A folder of transformers, imported as a run: [CLS] and [SEP] are around the text, as its tokenizer says."""
    import transformers

    folder = tmp_path / "bert-tiny"
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    config = transformers.BertConfig(
        vocab_size=320, max_position_embeddings=24, initializer_range=0.6, type_vocab_size=2, **sizes
    )
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config)
    model.train(False)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    status, said = call("checkpoint", "import", folder, tmp_path / "bert", "--from", "hf")
    assert status == 0, said

    def logits_of(ids: list[int], position: int) -> list[float]:
        with torch.no_grad():
            logits: list[float] = model(input_ids=torch.tensor([ids])).logits[0, position].tolist()
        return logits

    rows = augmented(request(tmp_path, tmp_path / "bert"))
    for number, text in enumerate(TEXTS):
        written = [row["text"] for row in rows if row["original"] == text]
        assert written == [text, *algorithm_1(text, number, 0, SETTINGS, logits_of)]
    message = r"bert-tiny: .* xscale checkpoint import"
    with pytest.raises(ConfigError, match=message):
        augment_data(replace(request(tmp_path, folder), output=tmp_path / "other.jsonl"), progress=False)


def test_batches_and_interruptions_change_nothing(
    tmp_path: Path, bert: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_for = request(tmp_path, bert)
    expected = augmented(asked_for)
    asked_for.output.unlink()
    monkeypatch.setattr(augment_data_module, "EXAMPLES", 2)
    append, calls = ResumableFile.append, 0

    def interrupted(file: ResumableFile, text: str, state: dict[str, Any]) -> None:
        nonlocal calls
        append(file, text, state)
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(ResumableFile, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        augment_data(asked_for, progress=False)
    assert not asked_for.output.exists()
    with pytest.raises(ConfigError, match="it was begun with another --seed"):
        augment_data(replace(asked_for, settings=replace(SETTINGS, seed=6)), progress=False)
    said = augment_data(replace(asked_for, rows=1))
    assert "resuming after 4 examples" in capsys.readouterr().err
    assert [json.loads(line) for line in asked_for.output.read_text().splitlines()] == expected
    assert said[0] == f"{asked_for.output}: 24 examples, 18 of them new"
    asked_for.output.unlink()
    assert augment_data(asked_for, progress=False)[1:3] == said[1:3], "words are counted over both processes"


def test_examples_of_the_validation_split_get_no_new_ones(tmp_path: Path, bert: Path) -> None:
    """The run that trains on the file has the same validation examples, and no copy of them in training."""
    texts = [f"{one} {other} cat" for one in WORDS[:6] for other in WORDS[6:11]]
    source = {"paths": str(examples(tmp_path, texts))}
    for validation, held_out in (
        (0.2, [text for text in texts if document_hash(text) < validation_below(0.2)]),
        (1e-9, [min(texts, key=document_hash)]),
    ):
        asked_for = request(tmp_path, bert, validation, source=source)
        rows = augmented(asked_for)
        assert 0 < len(held_out) < len(texts)
        for text in texts:
            copies = [row for row in rows if row["original"] == text]
            assert copies[0]["text"] == text
            assert len(copies) == (1 if text in held_out else 1 + SETTINGS.copies)
        assert augmented_split(asked_for) == sorted(held_out)
        asked_for.output.unlink()


def augmented_split(asked_for: AugmentRequest) -> list[str]:
    """The validation texts of the file as a run prepares it."""
    folder = asked_for.output.parent / f"data-{asked_for.data.validation}"
    source = {"kind": "labelled", "paths": str(asked_for.output), "classes": CLASSES, "group_field": "original"}
    section = {"source": source, "tokenizer": "byte", "folder": str(folder), "validation": asked_for.data.validation}
    data = decode(DataConfig, {**section, "workers": 1})
    prepare(data, progress=False)
    prepared = open_prepared(data)
    split = prepared.validation
    assert split is not None
    numbers = range(split.first, split.first + split.documents)
    return sorted(prepared.tokenizer.decode(split.indexed.document(number).tolist()) for number in numbers)


def write_table(file: Path, rows: list[dict[str, str]], delimiter: str) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def test_pairs_scores_and_tags_in_every_format(tmp_path: Path, bert: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pairs = [{"a": text, "b": "the old dog", "y": "yes"} for text in TEXTS[:2]]
    write_table(tmp_path / "pairs.tsv", pairs, "\t")
    source = {"paths": str(tmp_path / "pairs.tsv"), "text_field": "a", "pair_field": "b", "label_field": "y"}
    rows = augmented(request(tmp_path, bert, source=source))
    logits_of = run_logits(bert)
    for number, pair in enumerate(pairs):
        first, second = (algorithm_1(pair[key], number, text, SETTINGS, logits_of) for text, key in enumerate("ab"))
        copies = [(row["a"], row["b"], row["y"]) for row in rows if row["original"] == pair["a"]]
        assert copies == [(pair["a"], pair["b"], "yes"), *((*both, "yes") for both in zip(first, second, strict=True))]
    (tmp_path / "out.jsonl").unlink()

    write_table(tmp_path / "scores.csv", [{"text": text, "label": "0.1"} for text in TEXTS], ",")
    rows = augmented(request(tmp_path, bert, source={"paths": str(tmp_path / "scores.csv"), "labels": "score"}))
    assert {row["label"] for row in rows} == {0.1}
    (tmp_path / "out.jsonl").unlink()

    words = [text.split() for text in TEXTS]
    tags = [[CLASSES[len(word) % 2] for word in row] for row in words]
    pyarrow.parquet.write_table(pyarrow.table({"text": words, "label": tags}), tmp_path / "tags.parquet")
    source = {"paths": str(tmp_path / "tags.parquet"), "labels": "tags"}
    rows = augmented(request(tmp_path, bert, source=source))
    expected = dict(zip(map(" ".join, words), tags, strict=True))
    assert all(row["label"] == expected[row["original"]] for row in rows)
    assert all(len(row["text"].split()) == len(row["label"]) for row in rows)
    out = Labelled.Config(
        paths=(str(tmp_path / "out.jsonl"),), labels="tags", classes=tuple(CLASSES), group_field="original"
    )
    assert len(list(Labelled(out).documents())) == len(rows)


def test_the_command_prints_the_section_that_reads_the_file(
    tmp_path: Path, bert: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "task.yaml"
    source = {"kind": "labelled", "paths": str(examples(tmp_path)), "classes": CLASSES}
    config.write_text(json.dumps({"data": {"source": source}, "objective": {"kind": "classify", "classes": 2}}))
    output = tmp_path / "new" / "out.jsonl"
    options = ["--output", output, "--model", bert, "--copies", 2, "--context", "original"]
    done = CliRunner().invoke(app, [str(word) for word in (config, *options, "data.validation=0")])
    said = done.output
    assert done.exit_code == 0, said
    assert f"{output}: 18 examples, 12 of them new" in said
    assert "words: " in said
    assert "of several pieces stay, as there are no vectors (--vectors)" in said
    (section,) = [line for line in said.splitlines() if line.startswith("read by: ")]
    written = yaml.safe_load(section.removeprefix("read by: "))["data"]["source"]
    assert written == {"kind": "labelled", "paths": [str(output)], "classes": CLASSES, "group_field": "original"}
    (example, *_) = Labelled(decode(DataConfig, {"source": written}).source).documents()
    assert (example.text, example.group, example.label) == (TEXTS[0], TEXTS[0], 0)
    # A mistake of the user is a sentence with exit status 2, as of xscale's own commands.
    monkeypatch.setattr("sys.argv", ["xscale_tinybert", *(str(word) for word in (config, *options))])
    with pytest.raises(SystemExit) as ended:
        main(app)
    assert ended.value.code == 2
    assert "the file exists already. Remove it" in capsys.readouterr().err


def test_the_old_command_says_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"a plugin .* Run: python -m xscale_tinybert 'a b.yaml' --model runs/bert"):
        call("data", "augment", "a b.yaml", "--model", "runs/bert")


def test_a_source_without_fields_of_its_own(tmp_path: Path, bert: Path) -> None:
    asked_for = request(tmp_path, bert)
    data = decode(DataConfig, {"source": {"kind": "stdlib_labelled"}, "validation": 0})
    (line,) = augment_data_module.source_section(replace(asked_for, data=data), Labels("class", ("http", "xml")))
    assert "classes: [http, xml], group_field: original" in line


@pytest.mark.parametrize(
    ("source", "output", "message"),
    [
        (
            {"kind": "jsonl", "paths": "x"},
            "out.jsonl",
            r"data.source: the documents of the source 'jsonl' have no labels",
        ),
        ({}, "out.csv", r"--output: the file is written as JSON lines, and 'out.csv' has another ending"),
        ({"text_field": "original"}, "out.jsonl", r"data.source: a field has the name 'original'"),
        ({"paths": "bad.jsonl"}, "out.jsonl", r'bad.jsonl:2: the label "maybe" is no class'),
        ({"paths": "bad.jsonl", "bad": "skip"}, "out.jsonl", r"data.source.bad: 1 documents are bad .* 50.00%"),
        ({"paths": "empty.jsonl"}, "out.jsonl", r"data.source: the source has no examples"),
    ],
)
def test_it_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: dict[str, Any], output: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "a", "label": "no"}\n{"text": "b", "label": "maybe"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    asked_for = replace(request(tmp_path, tmp_path / "absent", source=source), output=tmp_path / output)
    with pytest.raises(ConfigError, match=message):
        augment_data(asked_for, progress=False)
    assert not (tmp_path / output).exists()


def test_files_that_are_missing_are_refused(tmp_path: Path, bert: Path) -> None:
    with pytest.raises(ConfigError, match=r"--vectors: there is no file .*absent.txt"):
        augment_data(request(tmp_path, bert, vectors=tmp_path / "absent.txt"), progress=False)
    with pytest.raises(ConfigError, match="the folder contains no run"):
        augment_data(request(tmp_path, tmp_path / "absent"), progress=False)


def test_bad_examples_are_skipped_and_told(tmp_path: Path, bert: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "red", "label": "no"}\n{"text": "b"}\n')
    source = {"paths": str(tmp_path / "rows.jsonl"), "bad": "skip", "max_bad_fraction": 0.5}
    said = augment_data(request(tmp_path, bert, source=source), progress=False)
    assert said[0].startswith(
        "data.source: 1 documents are bad and were skipped (1 without the field 'label'); first: "
    )
    assert f"{tmp_path}/rows.jsonl:2" in said[0]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"kind": "decoder", "width": 32}, "objective": {"kind": "causal"}}, "sees no later words"),
        ({"objective": {"kind": "classify", "classes": 2}}, "'classify' does not train the model to predict masked"),
    ],
)
def test_a_model_that_fills_no_masks_is_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    settings = recipe(tmp_path, **{"model": MODEL, **sections})
    (problem,) = fill_masks.check_fills_masks(settings, word_pieces(tmp_path), "--model")
    assert (problem.path, message in problem.what) == ("--model", True)


def test_a_tokenizer_without_a_mask_is_refused_and_begins_are_those_of_the_training(tmp_path: Path, bert: Path) -> None:
    tokenizer = word_pieces(tmp_path)
    settings = recipe(tmp_path, model=MODEL, objective={"kind": "masked"})
    assert fill_masks.check_fills_masks(settings, tokenizer, "--model") == []
    assert fill_masks.model_input(settings, tokenizer).begin == (CLS,)
    byte = Byte(Byte.Config(), tmp_path)
    assert fill_masks.model_input(settings, byte).begin == ()
    tokenizer.mask = None
    (problem,) = fill_masks.check_fills_masks(settings, tokenizer, "--model")
    assert problem.what == "the run's tokenizer has no mask token"


def test_logits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.forward = lambda tokens, targets, source: torch.full((*tokens.ids.shape, 320), torch.nan)
    filler = fill_masks.MaskFiller(model, torch.device("cpu"), 2)
    with pytest.raises(ConfigError, match="--model: its logits are not finite"):
        filler([MaskedWord((CLS, MASK, SEP), 1, np.array([7, 8]))], 1)

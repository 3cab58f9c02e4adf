"""Tokenizers that come with other libraries' weights: taken with their ids, through a run, and out again."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import BertWordPieceTokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Theirs

from tests.commands.test_import_hf import call
from tests.convert.hf.models import SECTIONS
from tests.train.tiny import recipe, run
from xscale.convert.hf import registry as choose
from xscale.convert.hf import special_ids
from xscale.convert.hf import tokenizer as export_tokenizer
from xscale.convert.hf.tokenizer import import_tokenizer
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepared import open_tokenizer
from xscale.run.load_run import load_run

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
IDS = 512
ENDS = {"gpt2": "<|endoftext|>", "gpt2 of two files": "<|endoftext|>", "bert": "[SEP]", "llama": "</s>", "t5": "</s>"}


def pieces(**fields: Any) -> bytes:
    import sentencepiece

    out = io.BytesIO()
    lines = iter(TEXT.splitlines())
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=lines, model_writer=out, vocab_size=400, character_coverage=1.0, minloglevel=2, **fields
    )
    return out.getvalue()


def lay(folder: Path, name: str) -> Path:
    """A folder with such a tokenizer, in the files that its library writes."""
    folder.mkdir(exist_ok=True)
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps({"model_type": name.split()[0]}))
    if name.startswith("gpt2"):
        made = Theirs(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        special = ["<|endoftext|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, initial_alphabet=letters, show_progress=False
        )
        made.train_from_iterator([TEXT], trainer)
        made.model.save(str(folder)) if "files" in name else made.save(str(folder / "tokenizer.json"))
    elif name == "bert":
        words = BertWordPieceTokenizer()
        words.train_from_iterator([TEXT], vocab_size=400, show_progress=False)
        words.save_model(str(folder))
    elif name == "llama":
        (folder / "tokenizer.model").write_bytes(pieces(model_type="bpe", byte_fallback=True))
    else:
        fields = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
        (folder / "spiece.model").write_bytes(pieces(**fields))
    return folder


@pytest.mark.parametrize("name", ENDS)
def test_an_imported_tokenizer_gives_the_same_ids(name: str, tmp_path: Path) -> None:
    import transformers

    source = lay(tmp_path / "theirs", name)
    section, said = import_tokenizer(source, tmp_path / "run", IDS)
    assert section is not None, said
    assert said.startswith("tokenizer: imported, ")
    ours = open_tokenizer(decode(DataConfig, {"tokenizer": section}))
    theirs = transformers.AutoTokenizer.from_pretrained(str(source))
    text = TEXT[:4000]
    ids = ours.encode(text)
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.piece(ours.eos) == ENDS[name]
    if name == "bert":
        assert ours.bos is not None
        assert ours.piece(ours.bos) == "[CLS]"
    assert ours.vocabulary == IDS
    if name != "bert":
        # White space is folded by T5, and nothing else by any.
        assert ours.decode(ids).split() == text.split()
    assert len(ours.sentinels) == (100 if name == "t5" else 0)


def test_a_model_with_its_tokenizer_in_and_out(tmp_path: Path) -> None:
    """GPT-2 of another library: trained on here, and back there with the same tokenizer."""
    import transformers

    section = SECTIONS["gpt2"][1]
    _, data = choose.select_architecture(choose.model_of(section), choose.ModelSizes(IDS, 24), "gpt2")
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**data | special))
    source = tmp_path / "theirs"
    theirs.save_pretrained(str(source))
    lay(source, "gpt2")
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(encode(recipe(tmp_path, data={"sequence_length": 16}))))
    status, said = call("checkpoint", "import", source, tmp_path / "run", config, "train.steps=2", "--from", "hf")
    assert status == 0, said
    assert f"tokenizer: imported, 500 ids (the embedding has {IDS} rows); 200 random texts become" in said.replace(
        "\n", " "
    )
    source.rename(tmp_path / "gone")
    status, said = call("train", tmp_path / "run" / "config.yaml")
    assert status == 0, said
    status, said = call("checkpoint", "export", tmp_path / "run", tmp_path / "back", "--architecture", "gpt2")
    assert status == 0, said
    assert "tokenizer: 200 random texts become the same ids; it is the run's own tokenizer.json" in said.replace(
        "\n", " "
    )
    first, last = (transformers.AutoTokenizer.from_pretrained(str(tmp_path / one)) for one in ("gone", "back"))
    assert type(last) is type(first)
    assert last(TEXT)["input_ids"] == first(TEXT)["input_ids"]
    told = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (told["eos_token_id"], told["bos_token_id"], told["vocab_size"]) == (0, 0, IDS)


@pytest.mark.long
@pytest.mark.parametrize(("name", "special"), [("roberta", {"pad_token_id": 1}), ("gpt2", {"eos_token_id": [7, 9]})])
def test_special_ids_without_a_tokenizer_are_kept(
    name: str, special: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RoBERTa counts positions from its padding id, so that another one shifts them wherever a text has it."""
    import transformers

    sizes = choose.ModelSizes(IDS, 24, special.get("pad_token_id", 0))
    found, data = choose.select_architecture(choose.model_of(SECTIONS[name][1]), sizes, name)
    kind = getattr(transformers, found.loader)
    torch.manual_seed(0)
    theirs = kind(kind.config_class(**data | special)).eval()
    source = tmp_path / "theirs"
    theirs.save_pretrained(str(source))
    generation = {"max_new_tokens": 7, "eos_token_id": 9, "transformers_version": "5.0.0"}
    (source / "generation_config.json").write_text(json.dumps(generation))
    status, said = call("checkpoint", "import", source, tmp_path / "run", "--from", "hf")
    assert status == 0, said
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"the run has no tokenizer.* kind huggingface or sentencepiece"):
        load_run(tmp_path / "run")
    status, said = call("checkpoint", "export", tmp_path / "run", tmp_path / "back", "--architecture", name)
    assert status == 0, said
    assert "tokenizer: not exported" in said
    before, after = (transformers.AutoConfig.from_pretrained(str(tmp_path / one)) for one in ("theirs", "back"))
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(before, key) == getattr(after, key), key
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text()) == generation
    # The padding id itself has a row of the position table that a model without padding does not have.
    ids = torch.tensor([[token for token in range(24) if token != special.get("pad_token_id")]])
    with torch.no_grad():
        logits = kind.from_pretrained(str(tmp_path / "back")).eval()(ids).logits
        torch.testing.assert_close(logits, theirs(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.long
def test_generation_settings_of_another_tokenizer_stay_behind(tmp_path: Path) -> None:
    source, run_folder = lay(tmp_path / "theirs", "gpt2"), tmp_path / "run"
    one = recipe(tmp_path, model=SECTIONS["gpt2"][1], data={"sequence_length": 16}, train={"steps": 1})
    assert run(one) == 0
    (source / "generation_config.json").write_text('{"eos_token_id": 9}')
    special_ids.keep_special_ids(source, {"eos_token_id": 9}, None, run_folder)
    status, said = call("checkpoint", "export", run_folder, tmp_path / "out")
    assert status == 0, said
    assert "generation_config.json: not exported" in said
    assert not (tmp_path / "out" / "generation_config.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2


@pytest.mark.long
def test_a_run_of_its_own(tmp_path: Path) -> None:
    """Trained with the library's pieces from the beginning: out, and in again as a run of the same tokenizer."""
    section = SECTIONS["llama"][1]
    tokenizer = {"kind": "huggingface", "vocabulary": 400, "sentinels": 10}
    one = recipe(tmp_path, model=section, data={"tokenizer": tokenizer}, train={"steps": 1})
    assert run(one) == 0
    assert call("checkpoint", "export", tmp_path / "run", tmp_path / "out")[0] == 0
    status, said = call("checkpoint", "import", tmp_path / "out", tmp_path / "again")
    assert status == 0, said
    text = (tmp_path / "again" / "config.yaml").read_text()
    assert "kind: huggingface" in text
    assert str(tmp_path / "again" / "tokenizer" / "tokenizer.json") in text


def test_a_tokenizer_that_is_not_imported_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = lay(tmp_path / "theirs", "gpt2"), tmp_path / "run"
    hint = f"; set data.tokenizer, or data.prepared, to one of {IDS} ids"
    section, said = import_tokenizer(source, out, 400)
    assert (section, said.split(";")[0]) == (
        None,
        "tokenizer: not imported (it has 500 ids, but the embedding has 400 rows)",
    )
    with monkeypatch.context() as patch:
        patch.setattr(export_tokenizer, "find_mismatches", lambda *given: [([1], [2])] * 3)
        assert "(3 of 200 random texts become other ids in xscale)" in import_tokenizer(source, out, IDS)[1]
    (source / "tokenizer.json").write_text("{")
    _, said = import_tokenizer(source, out, IDS)
    assert said.startswith("tokenizer: not imported (the file is no part of a tokenizer: ")
    assert said.endswith(hint)
    (source / "tokenizer.json").unlink()
    assert import_tokenizer(source, out, IDS) == (None, f"tokenizer: {source} has none{hint}")
    assert not list(out.iterdir()), "nothing of it stays"

"""Our tokenizers in the library's form: the same ids, beside the weights."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.convert.hf.models import SECTIONS, checkpoint
from xscale.convert.hf import tokenizer as files
from xscale.convert.hf import tokenizers_library
from xscale.convert.hf.export_model import export_model
from xscale.convert.hf.tokenizer import XSCALE_TOKENIZER_FILE, equal_score, export_tokenizer, restore_tokenizer
from xscale.core.config import decode
from xscale.data.config import DataConfig
from xscale.data.corpus.prepared import open_tokenizer
from xscale.data.corpus.train_tokenizer import train_tokenizer
from xscale.data.tokenizer.huggingface import HuggingFace

SAMPLE = """def grüße(name: str) -> str:
    \"\"\"Return a greeting, such as "Hallo Köln" (漢字 work too).\"\"\"
	return f"Hallo {name}: {len(name)} letters, 12345 --- 𝄞"
"""
"""A text that holds what corpora hold: tabs, indentation, quotation marks, numbers, characters of 2 to 4 bytes."""
QUOTES = (*('"""',) * 6, *('"',) * 6, '""', 'x"')
WORDS = ("alpha", "config", "value", "return", "self", "None", "tensor", "shape", "{key}", "(name)", "==", "#", *QUOTES)
KINDS: dict[str, dict[str, Any]] = {
    "byte": {"kind": "byte", "sentinels": 10},
    "bpe": {"kind": "sentencepiece", "vocabulary": 600, "sentinels": 10},
    "byte pieces": {"kind": "huggingface", "vocabulary": 600, "sentinels": 10},
    "unigram": {"kind": "sentencepiece", "vocabulary": 600, "sentinels": 10, "model": "unigram"},
}


def corpus(folder: Path, kind: str) -> DataConfig:
    """Train a tokenizer on a fixed text: code-like lines of words drawn with a fixed seed."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    letters = [f"{draw.choice('bcdfgklmnprst')}{draw.choice('aeiou')}" for _ in range(400)]
    words = [*WORDS * 4, *("".join(draw.choices(letters, k=draw.randint(1, 4))) for _ in range(300))]
    lines = [" " * 4 * draw.randint(0, 3) + " ".join(draw.choices(words, k=draw.randint(2, 12))) for _ in range(3000)]
    (folder / "corpus.txt").write_text("\n".join(lines) + SAMPLE, encoding="utf-8")
    source = {"kind": "text", "paths": [str(folder / "corpus.txt")]}
    data = {"source": source, "tokenizer": KINDS[kind], "folder": str(folder / "data"), "validation": 0.0}
    config = decode(DataConfig, data)
    train_tokenizer(config, progress=False)
    return config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["llama", "bert"])
def test_the_exported_tokenizer_gives_the_same_ids(kind: str, model: str, tmp_path: Path) -> None:
    import transformers

    config = corpus(tmp_path, kind)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": model}))
    said = export_tokenizer(open_tokenizer(config), tmp_path / "out")
    assert said[0].startswith("tokenizer: 200 random texts become the same ids")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out")), open_tokenizer(config)
    for text in (SAMPLE * 20, "  Grüße\taus  Köln 漢字 \U0001d11e\n\n 12345 ", ""):
        ids = ours.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids) == text
    found = (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id, theirs.mask_token_id)
    assert found == (0, 1, 2, 3, 4)
    section = restore_tokenizer(tmp_path / "out", tmp_path / "run")
    assert section is not None
    again = decode(DataConfig, {"tokenizer": section, "folder": str(tmp_path / "none")})
    assert open_tokenizer(again).fingerprint == ours.fingerprint


def test_segmentations_of_equal_score_are_ties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding alone decides between the orders of the same pieces; any other difference is an error of the export."""
    config = corpus(tmp_path, "unigram")
    tokenizer = open_tokenizer(config)
    pieces = tokenizer.token_bytes()
    long, short = pieces.index(b'"""'), len(pieces) - 1 - pieces[::-1].index(b'"')
    assert tokenizer.decode([long, short]) == tokenizer.decode([short, long]) == '""""'
    assert equal_score(tokenizer, [long, short], [short, long])
    assert not equal_score(tokenizer, [long, short], [short] * 4)
    assert not equal_score(tokenizer, [long, short], [long])
    assert not equal_score(open_tokenizer(corpus(tmp_path / "bpe", "bpe")), [long, short], [short, long])
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(files, "find_mismatches", lambda *given: [([long, short], [short, long])])
    assert (
        "199 random texts become the same ids, 1 other ids of the same unigram score"
        in export_tokenizer(open_tokenizer(config), tmp_path / "out")[0]
    )
    monkeypatch.setattr(files, "find_mismatches", lambda *given: [([long, short], [short] * 4)])
    assert "1 of 200 random texts become other ids" in export_tokenizer(open_tokenizer(config), tmp_path / "out")[0]


def test_other_ids_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: merges in the wrong order."""
    config, merges = corpus(tmp_path, "bpe"), tokenizers_library._merges
    monkeypatch.setattr(tokenizers_library, "_merges", lambda *given: merges(*given)[::-1])
    (tmp_path / "out").mkdir()
    (said,) = export_tokenizer(open_tokenizer(config), tmp_path / "out")
    assert "random texts become other ids" in said
    assert not (tmp_path / "out" / XSCALE_TOKENIZER_FILE).exists()
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_missing_tokenizer_is_reported(tmp_path: Path) -> None:
    config = corpus(tmp_path, "bpe")
    path, _ = checkpoint(tmp_path / "run", SECTIONS["llama"][1], config.model_copy(update={"folder": "nowhere"}))
    said: list[str] = []
    assert export_model(path, tmp_path / "out", say=said.append) == 0
    assert said[0].startswith("tokenizer: not exported, because it was not found: nowhere")
    assert not list((tmp_path / "out").glob("*token*"))
    assert restore_tokenizer(tmp_path / "out", tmp_path) is None


UNKNOWN: dict[str, Any] = {
    "WordPiece": lambda table: models.WordPiece(table, unk_token="[UNK]"),
    "WordLevel": lambda table: models.WordLevel(table, unk_token="[UNK]"),
    "BPE": lambda table: models.BPE(table, [], unk_token="[UNK]"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_the_unknown_token_of_a_foreign_file_is_exported(kind: str, tmp_path: Path) -> None:
    """It is in the file's model, and `transformers` knows it by the files beside."""
    import transformers

    made = Tokenizer(UNKNOWN[kind]({"[UNK]": 0, "a": 1, "b": 2, "</s>": 3}))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    made.add_special_tokens(["[UNK]", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    config = HuggingFace.Config(file=str(tmp_path / "tokenizer.json"), vocabulary=None)
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert export_tokenizer(HuggingFace(config, tmp_path), out)[0].startswith("tokenizer: 200 random texts")
    theirs = transformers.AutoTokenizer.from_pretrained(str(out))
    assert (theirs.unk_token, theirs.unk_token_id) == ("[UNK]", 0)
    assert theirs.encode("a z", add_special_tokens=False) == [1, 0]

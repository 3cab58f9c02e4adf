"""The share of unknown tokens is said where data is prepared, whatever a file calls its unknown token."""

from pathlib import Path

import pytest

from xscale.core.config import decode
from xscale.data.config import DataConfig
from xscale.data.corpus import shards
from xscale.data.corpus.merge_shards import unknown_sentence
from xscale.data.corpus.prepare import prepare

VOCABULARY = {"[UNK]": 0, "[SEP]": 1, "[PAD]": 2, "hello": 3}
UNKNOWN_SHARES = {
    "all": ("zebra giraffe\n" * 8, 16 / 24),
    "a third": ("zebra hello\n" * 8, 8 / 24),
    "none": ("hello hello\n" * 8, 0.0),
}
"""Text of eight lines, each of two words and an end -> share of unknown tokens."""


@pytest.mark.parametrize("case", UNKNOWN_SHARES)
@pytest.mark.parametrize("processes", [1, 2])
def test_the_share_of_unknown_tokens_is_printed(
    case: str, processes: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr(shards, "MIN_SHARD_BYTES", 20)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]", "[PAD]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text, share = UNKNOWN_SHARES[case]
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(text)
    file = {"kind": "huggingface", "file": f"{tmp_path}/tokenizer.json", "eos": "[SEP]", "pad": "[PAD]"}
    source = {"kind": "text", "paths": [f"{tmp_path}/*.txt"], "document": "line"}
    data = {"source": source, "tokenizer": file, "folder": str(tmp_path / "data"), "validation": 0}
    prepared = prepare(decode(DataConfig, data), processes=processes)
    assert prepared.manifest is not None
    assert prepared.manifest.unknown == share * len(prepared.train.tokens)
    said = [line for line in capfd.readouterr().err.splitlines() if "unknown" in line]
    assert [line.split(": the tok")[0] for line in said] == (
        [f"data.tokenizer: unknown tokens: {100 * share:.3g} %"] if share else []
    )
    assert unknown_sentence(prepared.manifest) == f"unknown tokens: {100 * share:.3g} %"

"""The sample on which a tokenizer is trained: within its size, of training documents only, the same however read."""

from pathlib import Path

import pytest

from tests.data.corpora import text_config
from xscale.core.errors import ConfigError
from xscale.data.corpus.prepare import prepare
from xscale.data.corpus.prepared import prepared_folder
from xscale.data.corpus.train_tokenizer import sample_documents, train_tokenizer
from xscale.data.source import files
from xscale.data.source.source import ByteRange, document_hash, validation_below
from xscale.data.source.text import Text
from xscale.data.tokenizer.sentencepiece import FILE, SentencePiece


def test_a_sample_is_drawn_by_hash_from_the_training_part(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    texts = [file.read_text() for file in sorted((tmp_path / "corpus").iterdir())]
    train = [text for text in texts if document_hash(text) >= validation_below(0.2)]
    assert sample_documents(config, 10**9) == train
    drawn = sample_documents(config, 4000)
    assert 4000 <= sum(map(len, drawn)) < 4000 + max(map(len, texts))
    assert drawn == [text for text in train if text in drawn]
    assert max(map(document_hash, drawn)) < min(document_hash(text) for text in train if text not in drawn)


def test_of_a_large_corpus_not_everything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = text_config(tmp_path, documents=1, count=5000)
    lines = config.model_copy(update={"source": Text.Config(paths=(str(tmp_path / "corpus"),), document="line")})
    monkeypatch.setattr(files.split_into_ranges, "__defaults__", (1000,))
    read = []
    original = Text.read

    def counted(self: Text, portion: ByteRange) -> object:
        read.append(portion.size)
        return original(self, portion)

    monkeypatch.setattr(Text, "read", counted)
    drawn = sample_documents(lines, 500)
    assert 500 <= sum(map(len, drawn)) < 700
    assert 4000 <= sum(read) <= 5000
    assert sample_documents(lines, 500) == drawn


def test_training_leaves_a_tokenizer_in_the_datas_folder(tmp_path: Path) -> None:
    config = text_config(tmp_path, tokenizer=SentencePiece.Config(vocabulary=380, sentinels=0))
    tokenizer = train_tokenizer(config, progress=False)
    (file,) = [one for one in (tmp_path / "data").rglob("*") if one.is_file()]
    assert file.name == FILE
    assert tokenizer.vocabulary == 380
    again = train_tokenizer(config, progress=False)
    assert again.fingerprint == tokenizer.fingerprint


def test_a_tokenizer_that_needs_no_training_writes_nothing(tmp_path: Path) -> None:
    assert train_tokenizer(text_config(tmp_path), progress=False).vocabulary == 384
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("before", [None, [], ["lock", "note"]])
def test_a_tokenizer_that_cannot_be_trained_leaves_what_was_there(tmp_path: Path, before: list[str] | None) -> None:
    config = text_config(tmp_path, documents=2, tokenizer=SentencePiece.Config(vocabulary=60000))
    folder = prepared_folder(config)
    if before is not None:
        folder.mkdir(parents=True)
        for name in before:
            (folder / name).touch()
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        prepare(config, processes=1, progress=False)
    assert folder.exists() == (before is not None)
    assert sorted(path.name for path in folder.glob("*")) == (before or [])


@pytest.mark.parametrize("before", ["", "new", "new/of"])
def test_data_that_is_refused_leaves_no_new_parents(tmp_path: Path, before: str) -> None:
    """Folders around data.folder stay where they were there before, and others are removed again."""
    config = text_config(tmp_path, documents=2, tokenizer=SentencePiece.Config(vocabulary=60000))
    config = config.model_copy(update={"folder": str(tmp_path / "new" / "of" / "data")})
    (tmp_path / before).mkdir(parents=True, exist_ok=True)
    earlier = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        prepare(config, processes=1, progress=False)
    assert sorted(tmp_path.rglob("*")) == earlier

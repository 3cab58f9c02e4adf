"""Preparation of tokens on disk: the same bytes however it was done, restartable, and clear about what does not fit."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.data.corpora import text_config, words
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus import shards
from xscale.data.corpus.inspect import inspect
from xscale.data.corpus.manifest import MANIFEST, DatasetManifest
from xscale.data.corpus.merge_shards import merge_shards
from xscale.data.corpus.prepare import prepare
from xscale.data.corpus.prepared import PreparedData, open_prepared, prepared_folder
from xscale.data.indexed import IndexedDataset
from xscale.data.source.source import document_hash, validation_below
from xscale.data.source.text import Text
from xscale.data.tokenizer.byte import Byte
from xscale.data.tokenizer.sentencepiece import SentencePiece

FILES = ("train.bin", "train.idx", "validation.bin", "validation.idx")


@pytest.fixture(autouse=True)
def many_small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MIN_SHARD_BYTES", 2000)


def quiet(config: DataConfig, processes: int = 1) -> PreparedData:
    return prepare(config, processes=processes, progress=False)


def contents(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


def test_every_document_is_in_one_part_and_whole(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    ready = quiet(config)
    texts = [file.read_text() for file in sorted((tmp_path / "corpus").iterdir())]
    kept = [document_hash(text) < validation_below(0.2) for text in texts]
    assert 2 <= sum(kept) <= 18
    assert ready.validation is not None
    assert ready.manifest is not None
    for split, wanted in ((ready.train, False), (ready.validation, True)):
        mine = [text for text, one in zip(texts, kept, strict=True) if one == wanted]
        assert [one.decode() for one in split.texts(ready.tokenizer)] == mine
        assert all(split.indexed.document(index)[-1] == ready.tokenizer.eos for index in range(split.documents))
        counts = ready.manifest.counts[split.name]
        assert dataclasses.astuple(counts) == (len(mine), len(split.tokens), sum(map(len, mine)))
        assert split.bytes(ready.tokenizer) == counts.bytes
    assert ready.manifest.files == contents(ready.path)
    assert ready.manifest.source["kind"] == "text"
    assert not (ready.path / "shards").exists()
    assert not list(ready.path.glob("*.part"))


def test_parallel_and_serial_give_the_same_bytes(tmp_path: Path) -> None:
    tokenizer = SentencePiece.Config(vocabulary=400, sentinels=2)
    config = text_config(tmp_path, tokenizer=tokenizer)
    one = quiet(config)
    assert len(shards.plan_shards(config)) > 5
    two = quiet(config.model_copy(update={"folder": str(tmp_path / "two")}), processes=3)
    assert one.tokenizer.fingerprint == two.tokenizer.fingerprint
    assert one.path != two.path
    assert contents(one.path) == contents(two.path)


def test_ready_data_is_opened_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = text_config(tmp_path)
    before = {file: file.stat().st_mtime_ns for file in quiet(config).path.iterdir()}
    monkeypatch.setattr(shards, "prepare_shard", None)
    assert {file: file.stat().st_mtime_ns for file in quiet(config).path.iterdir()} == before


def test_other_choices_live_in_other_folders(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    others = [
        config,
        config.model_copy(update={"validation": 0.3}),
        config.model_copy(update={"tokenizer": Byte.Config(sentinels=3)}),
        config.model_copy(update={"source": Text.Config(paths=config.source.paths, document="line")}),  # type: ignore[attr-defined]
    ]
    assert len({prepared_folder(one) for one in others}) == len(others)
    assert prepared_folder(config.model_copy(update={"sequence_length": 7, "order": "text"})) == prepared_folder(config)


SCRIPT = """
import sys
from pathlib import Path
from tests.data.corpora import text_config
from xscale.data.corpus import shards
from xscale.data.corpus.prepare import prepare
shards.MIN_SHARD_BYTES = 2000
if __name__ == "__main__":
    prepare(text_config(Path(sys.argv[1]), documents=200, count=2000), processes=int(sys.argv[2]), progress=False)
"""


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_killed_in_the_middle_it_goes_on_from_what_is_finished(tmp_path: Path, processes: int) -> None:
    import psutil

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    child = subprocess.Popen([sys.executable, str(script), str(tmp_path), str(processes)], env=environment)
    deadline = time.monotonic() + 600
    config = text_config(tmp_path, documents=200, count=2000)
    folder = prepared_folder(config)
    while len(finished(folder)) < 5:
        assert child.poll() is None, "it was over before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    family = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(signal.SIGKILL)
    child.wait()
    # Workers whose parent is gone finish their shard and leave.
    assert not psutil.wait_procs(family, timeout=600)[1]
    kept = finished(folder)
    assert 5 <= len(kept) < len(shards.plan_shards(config))
    assert not (folder / MANIFEST).exists()
    with pytest.raises(ConfigError, match=r"no prepared data here.*xscale data prepare"):
        open_prepared(config)
    with pytest.raises(ConfigError, match="not finished"):
        merge_shards(config)
    stamps = {file: file.stat().st_mtime_ns for file in kept}
    seen: dict[Path, int] = {}
    merge = merge_shards

    def watched(config: DataConfig) -> Any:
        seen.update({file: file.stat().st_mtime_ns for file in finished(folder)})
        return merge(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xscale.data.corpus.prepare.merge_shards", watched)
        resumed = quiet(config)
    assert {file: seen[file] for file in stamps} == stamps
    whole = quiet(config.model_copy(update={"folder": str(tmp_path / "whole")}))
    assert contents(resumed.path) == contents(whole.path)


def finished(folder: Path) -> list[Path]:
    return sorted((folder / "shards").glob("*.json"))


def test_shards_are_made_apart_and_merged(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    for number in reversed(range(len(shards.plan_shards(config)))):
        shards.prepare_shard(config, number)
    merge_shards(config)
    whole = quiet(config.model_copy(update={"folder": str(tmp_path / "whole")}))
    assert contents(prepared_folder(config)) == contents(whole.path)


def test_a_shard_of_other_text_or_another_tokenizer_is_made_anew(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    shards.prepare_shard(config, 0)
    (file,) = finished(prepared_folder(config))
    first = file.read_text()
    (tmp_path / "corpus/000.txt").write_text(words(99, 90))
    shards.prepare_shard(config, 0)
    assert file.read_text() != first
    file.write_text("{")
    shards.prepare_shard(config, 0)
    assert json.loads(file.read_text())["key"]


def test_two_at_the_same_time_wait_for_each_other(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("documents=200, count=2000", "documents=30, count=200"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    text_config(tmp_path, documents=30, count=200)
    children = [subprocess.Popen([sys.executable, str(script), str(tmp_path), "1"], env=environment) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]


def test_a_corpus_too_small_for_its_fraction_still_gives_one_document(tmp_path: Path) -> None:
    config = text_config(tmp_path, documents=3, validation=1e-6)
    ready = quiet(config)
    assert ready.validation is not None
    texts = sorted((file.read_text() for file in (tmp_path / "corpus").iterdir()), key=document_hash)
    assert [one.decode() for one in ready.validation.texts(ready.tokenizer)] == texts[:1]
    assert sorted(one.decode() for one in ready.train.texts(ready.tokenizer)) == sorted(texts[1:])
    assert ready.manifest is not None
    for split in (ready.train, ready.validation):
        assert split.bytes(ready.tokenizer) == ready.manifest.counts[split.name].bytes


def test_nothing_is_kept_when_nothing_is_asked(tmp_path: Path) -> None:
    ready = quiet(text_config(tmp_path, documents=1, validation=0.0))
    assert ready.validation is None
    assert ready.train.documents == 1
    assert not (ready.path / "validation.bin").exists()


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 document cannot be split .* data\.validation to 0"):
        quiet(text_config(tmp_path, documents=1, validation=0.01))


def test_a_corpus_that_is_not_there_leaves_nothing(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    shutil.rmtree(tmp_path / "corpus")
    with pytest.raises(ConfigError, match="matches no file"):
        quiet(config)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("content", "what"), [(b"a\0b", "binary"), (b"caf\xe9 x", "not UTF-8"), (None, "disappeared")])
def test_bad_text_stops_it_with_the_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, content: bytes | None, what: str
) -> None:
    config = text_config(tmp_path)
    bad = tmp_path / "corpus/021.txt"
    planned = shards.plan_shards(config)
    monkeypatch.setattr("xscale.data.corpus.prepare.plan_shards", lambda config, source: planned)
    if content is None:
        bad.unlink()
    else:
        bad.write_bytes(content.ljust(planned[0][0].size * 2))
    with pytest.raises(ConfigError, match=rf"021\.txt: .*{what}"):
        quiet(config, processes)
    assert not (prepared_folder(config) / MANIFEST).exists()
    assert not list(prepared_folder(config).glob("train.*"))


def test_a_blank_corpus_is_refused(tmp_path: Path) -> None:
    config = text_config(tmp_path, documents=2)
    for file in (tmp_path / "corpus").iterdir():
        file.write_text(" \n")
    with pytest.raises(ConfigError, match="every document is blank"):
        quiet(config)


def test_a_corpus_that_changed_is_noticed_and_one_that_is_gone_is_not_needed(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    ready = quiet(config)
    (tmp_path / "corpus/new.txt").write_text("more\n")
    with pytest.raises(ConfigError, match=f"the corpus changed .* data.prepared={ready.path}"):
        quiet(config)
    kept = quiet(config.model_copy(update={"prepared": str(ready.path)}))
    assert len(kept.train.tokens) == len(ready.train.tokens)
    shutil.rmtree(tmp_path / "corpus")
    assert quiet(config).manifest == ready.manifest


def test_a_tokenizer_that_does_not_fit_the_manifest_is_refused(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    ready = quiet(config)
    change = {"prepared": str(ready.path), "tokenizer": Byte.Config(sentinels=7)}
    with pytest.raises(ConfigError, match=r"another tokenizer \(byte byte-100\)\. The config's is byte byte-7"):
        open_prepared(config.model_copy(update=change))
    with pytest.raises(ConfigError, match="with the tokenizer 'byte', not 'sentencepiece'"):
        open_prepared(config.model_copy(update={**change, "tokenizer": SentencePiece.Config()}))


def test_a_tokenizer_trained_again_does_not_fit(tmp_path: Path) -> None:
    config = text_config(tmp_path, tokenizer=SentencePiece.Config(vocabulary=400, sentinels=0))
    ready = quiet(config)
    SentencePiece.train(SentencePiece.Config(vocabulary=390, sentinels=0), [words(5, 5000)], ready.path)
    with pytest.raises(ConfigError, match="written with another tokenizer"):
        quiet(config)


def test_damage_is_named(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    folder = quiet(config).path
    data = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(data[:100])
    with pytest.raises(ConfigError, match=rf"train\.bin: it is 100 bytes long.* {len(data)} bytes"):
        open_prepared(config)
    (folder / "train.bin").write_bytes((folder / "validation.bin").read_bytes())
    (folder / "train.idx").write_bytes((folder / "validation.idx").read_bytes())
    with pytest.raises(ConfigError, match=r"train\.idx: it has \d+ documents .* but the manifest says"):
        open_prepared(config)
    (folder / MANIFEST).write_text("{}")
    with pytest.raises(ConfigError, match="the manifest is damaged"):
        open_prepared(config)


def test_a_megatron_pair_is_split_at_its_last_documents(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    ready = quiet(config)
    pair = config.model_copy(update={"prepared": str(ready.path / "train")})
    opened = open_prepared(pair)
    assert opened.validation is not None
    assert opened.manifest is None
    total = ready.train.documents
    assert (opened.train.documents, opened.validation.documents) == (total - round(total * 0.2), round(total * 0.2))
    joined = [*opened.train.tokens, *opened.validation.tokens]
    assert joined == [*IndexedDataset(ready.path / "train").tokens]
    assert opened.validation.starts[0] == 0
    with pytest.raises(ConfigError, match="no prepared data here"):
        open_prepared(config.model_copy(update={"prepared": str(tmp_path / "nothing")}))


FULL = """
import resource, sys
from pathlib import Path
from tests.data.corpora import text_config
from xscale.core.errors import ConfigError
from xscale.data.corpus import shards
from xscale.data.corpus.prepare import prepare
from xscale.data.corpus.prepared import prepared_folder
shards.MIN_SHARD_BYTES = 2000
config = text_config(Path(sys.argv[1]), count=2000)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    prepare(config, processes=1, progress=False)
except ConfigError as error:
    print(error)
    print(sorted(file.name for file in prepared_folder(config).rglob("*") if file.is_file()))
"""


@pytest.mark.parametrize("limit", [10_000, 500_000])
def test_a_disk_that_is_full_is_named_and_nothing_is_half_written(tmp_path: Path, limit: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    command = [sys.executable, "-c", FULL, str(tmp_path), str(limit)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "cannot be written (File too large" in out
    assert "Raise the limit on file sizes (ulimit -f), or set another `data.folder`" in out
    # A shard that fails leaves nothing; finished shards stay for the next time.
    assert ".part" not in out.splitlines()[-1]
    assert ("00000.json" in out) == (limit > 100_000)
    assert MANIFEST not in out


def test_the_manifest_returns(tmp_path: Path) -> None:
    manifest = quiet(text_config(tmp_path)).manifest
    assert manifest is not None
    manifest.save(tmp_path / "again.json")
    assert DatasetManifest.load(tmp_path / "again.json") == manifest


MANIFEST_FIELDS = ["source", "corpus", "tokenizer", "fingerprint", "vocabulary", "validation", "counts", "files"]
MANIFEST_FIELDS += ["skipped"]
"""Fields whose values are checked; the last two may be absent."""


@pytest.mark.parametrize("field", MANIFEST_FIELDS)
def test_each_field_of_a_manifest_is_checked(tmp_path: Path, field: str) -> None:
    """Deleted, of another type, nested without end: named, never a traceback."""
    config = text_config(tmp_path)
    file = quiet(config).path / "manifest.json"
    whole = json.loads(file.read_text())
    for value in ("deleted", None, [1], -1, [[{}]], {"../../train": {}}, {"train": {"tokens": "x"}}, "DEEP"):
        data = {**whole, field: value}
        if value == "deleted" and field not in ("files", "skipped"):
            del data[field]
        file.write_text(json.dumps(data).replace('"DEEP"', "[" * 100_000 + "]" * 100_000))
        if field == "source" and isinstance(value, dict):
            # Facts that only describe the data, of the right type.
            quiet(config)
            continue
        with pytest.raises(ConfigError, match=r"manifest\.json"):
            quiet(config)


@pytest.mark.parametrize("change", [{"documents": "2"}, {"reasons": None}, {"first": [1]}, {"first": "a.jsonl:1"}])
def test_skipped_documents_of_a_manifest_are_checked(tmp_path: Path, change: dict[str, Any]) -> None:
    """They are printed when the data is opened."""
    config = text_config(tmp_path)
    file = quiet(config).path / "manifest.json"
    skipped = {"documents": 2, "reasons": {"binary": 2}, "first": ["a.txt:1: binary"]}
    for section in (skipped, skipped | change):
        file.write_text(json.dumps({**json.loads(file.read_text()), "skipped": section}))
        if section is skipped:
            assert "skipped     2 documents" in inspect(config)
        else:
            with pytest.raises(ConfigError, match=r"manifest\.json: .*the documents that were skipped are none"):
                inspect(config)


def test_a_manifest_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    file = quiet(config).path / "manifest.json"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        open_prepared(config)

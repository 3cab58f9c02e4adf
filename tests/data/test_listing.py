"""Which files are the corpus: a table of ways to name them and of what lies in a folder, and what is said of others."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_files import write
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.inspect import inspect
from xscale.data.corpus.prepare import prepare
from xscale.data.source.listing import LeftOut, find_files

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
WAYS = {"folder": "corpus", "glob": "corpus/*.txt", "deep glob": "corpus/**/*.txt", "all": "corpus/**"}


@dataclass
class Case:
    """Files beside corpus/a.txt and corpus/deep/b.txt, and which of them each way to name the corpus reads."""

    make: Callable[[], object]
    read: dict[str, set[str]]
    """Way -> further files that are read; a way that is not named reads none of them."""
    left_out: dict[str, dict[str, int]]
    """Way -> reason -> number."""


def make(path: str, text: str = "c") -> None:
    write(Path(), **{path.replace("/", "__"): text})


def link(target: str, name: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    os.symlink(target, name)


def everywhere(*names: str) -> dict[str, set[str]]:
    return {way: set(names) for way in WAYS}


def each(ways: str, **reasons: int) -> dict[str, dict[str, int]]:
    return {way: {reason.replace("_", " "): count for reason, count in reasons.items()} for way in ways.split(", ")}


RECURSIVE = "folder, deep glob, all"
CASES = {
    "a hidden file": Case(lambda: make("corpus/.c.txt"), {}, each("folder, glob, deep glob, all", hidden=1)),
    "a hidden folder": Case(lambda: make("corpus/.ipynb_checkpoints/a.txt"), {}, each(RECURSIVE, hidden=1)),
    "a linked folder": Case(
        lambda: (make("scratch/c.txt"), link("../scratch", "corpus/part")),
        {way: {"corpus/part/c.txt"} for way in RECURSIVE.split(", ")},
        {},
    ),
    "a linked folder within": Case(lambda: link("deep", "corpus/again"), {}, {}),
    "a linked file": Case(
        lambda: (make("scratch/c.txt"), link("../scratch/c.txt", "corpus/c.txt")), everywhere("corpus/c.txt"), {}
    ),
    "a file and a link to it": Case(
        lambda: link("a.txt", "corpus/0.txt"), {}, each("folder, glob, deep glob, all", other_names_of_a_file=1)
    ),
    "a loop of folders": Case(lambda: link("..", "corpus/deep/up"), {}, {}),
    "a link to itself": Case(
        lambda: link("c.txt", "corpus/c.txt"), {}, each("folder, glob, deep glob, all", broken_links=1)
    ),
    "a broken link": Case(
        lambda: link("nowhere", "corpus/c.txt"), {}, each("folder, glob, deep glob, all", broken_links=1)
    ),
    "a capital ending": Case(lambda: make("corpus/c.TXT"), {"folder": {"corpus/c.TXT"}, "all": {"corpus/c.TXT"}}, {}),
    "another ending": Case(
        lambda: make("corpus/c.json"), {"all": {"corpus/c.json"}}, each("folder", of_another_ending=1)
    ),
    "brackets": Case(lambda: make("corpus/c[1].txt"), everywhere("corpus/c[1].txt"), {}),
    "an empty file": Case(
        lambda: make("corpus/c.txt", ""), everywhere("corpus/c.txt"), each("folder, glob, deep glob, all", empty=1)
    ),
    "a pipe": Case(lambda: os.mkfifo("corpus/c.txt"), {}, each("folder, glob, deep glob, all", no_regular_files=1)),
    "a folder with an ending": Case(
        lambda: make("corpus/c.txt/d.txt"),
        {way: {"corpus/c.txt/d.txt"} for way in RECURSIVE.split(", ")},
        each("glob, deep glob", folders_that_a_glob_matches=1),
    ),
    "a name that is not UTF-8": Case(
        lambda: Path(os.fsdecode(b"corpus/c\xff.txt")).write_text("c"), everywhere(os.fsdecode(b"corpus/c\xff.txt")), {}
    ),
    "a name with spaces and a line end": Case(
        lambda: Path("corpus/c d\n.txt").write_text("c"), everywhere("corpus/c d\n.txt"), {}
    ),
}


@pytest.fixture(autouse=True)
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make("corpus/a.txt", "a")
    make("corpus/deep/b.txt", "b")


def listed(*patterns: str, endings: tuple[str, ...] = (".txt",)) -> tuple[list[str], dict[str, int]]:
    left_out = LeftOut()
    files = find_files(patterns, endings, "p", left_out)
    return [str(file) for file in files], {reason: count for reason, (count, _) in left_out.entry().items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_each_way_reads_the_same_files(case: str, way: str) -> None:
    CASES[case].make()
    files, left_out = listed(WAYS[way])
    expected = {"corpus/a.txt"} | ({"corpus/deep/b.txt"} if way != "glob" else set()) | CASES[case].read.get(way, set())
    assert set(files) == expected
    assert files == sorted(files, key=Path), "in order, each once"
    assert left_out == CASES[case].left_out.get(way, {})


@pytest.mark.parametrize("way", [*WAYS, "file"])
def test_a_pointer_of_git_lfs_is_refused(way: str) -> None:
    make("corpus/c.txt", POINTER)
    with pytest.raises(ConfigError, match=r"p: corpus/c\.txt: a pointer of Git LFS.*git lfs pull"):
        listed(WAYS.get(way, "corpus/c.txt"))


@pytest.mark.parametrize(
    ("patterns", "files"),
    [
        (["corpus/a.txt", "corpus/a.txt"], ["corpus/a.txt"]),
        (["corpus/a.txt", "./corpus//a.txt"], ["corpus/a.txt"]),
        (["corpus/a.txt", "{cwd}/corpus/a.txt"], ["corpus/a.txt"]),
        (["corpus/a.txt", "corpus/deep/../a.txt"], ["corpus/a.txt"]),
        (["{cwd}/corpus", "corpus/a.txt"], ["{cwd}/corpus/a.txt", "{cwd}/corpus/deep/b.txt"]),
        (["corpus/deep", "corpus"], ["corpus/deep/b.txt", "corpus/a.txt"]),
        (["way/a.txt", "corpus/a.txt"], ["way/a.txt"]),
        (["way"], ["way/a.txt", "way/deep/b.txt"]),
        (["corpus/[ab].txt"], ["corpus/a.txt"]),
        (["corpus/[!a].txt", "corpus/a.txt"], None),
        (["corpus/?.txt", "*/*/b.*"], ["corpus/a.txt", "corpus/deep/b.txt"]),
        (["**/b.txt"], ["corpus/deep/b.txt"]),
        (["corpus/.*/c.txt"], ["corpus/.hidden/c.txt"]),
        (["corpus/.hidden/*"], ["corpus/.hidden/c.txt"]),
        (["corpus/.hidden"], ["corpus/.hidden/c.txt"]),
        (["corpus/.hidden/c.txt"], ["corpus/.hidden/c.txt"]),
    ],
)
def test_spellings_of_the_same_file(patterns: list[str], files: list[str] | None) -> None:
    """Each real file once, by the first of its names; what is named is read, hidden or not."""
    make("corpus/.hidden/c.txt")
    link("corpus", "way")
    given = [pattern.format(cwd=Path.cwd()) for pattern in patterns]
    if files is None:
        with pytest.raises(ConfigError, match="matches no file"):
            listed(*given)
        return
    assert listed(*given)[0] == [file.format(cwd=Path.cwd()) for file in files]


def test_a_file_of_brackets_is_read_as_it_is_named() -> None:
    make("corpus/c[1].txt")
    make("corpus/c1.txt")
    assert listed("corpus/c[1].txt")[0] == ["corpus/c[1].txt"]


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path("corpus").absolute()))
    assert listed("~/*.txt")[0] == [str(Path("corpus/a.txt").absolute())]


def test_a_broken_link_that_is_named_and_a_folder_of_other_files() -> None:
    link("nowhere", "gone.txt")
    with pytest.raises(ConfigError, match=r"'gone\.txt' is a broken link"):
        listed("gone.txt")
    with pytest.raises(
        ConfigError, match=r"contains no file that ends in \.md; left out: 2 of another ending \(corpus/a"
    ):
        listed("corpus", endings=(".md",))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_refused() -> None:
    Path("corpus/deep").chmod(0)
    with pytest.raises(ConfigError, match=r"corpus/deep: the folder cannot be read: Permission denied"):
        listed("corpus")


def config(source: dict[str, Any], **fields: Any) -> DataConfig:
    data = {"source": source, "tokenizer": {"kind": "byte"}, "folder": "data", "validation": 0.0, **fields}
    return decode(DataConfig, data)


def test_what_is_left_out_is_printed_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON lines beside files of other endings; capital endings and compressed ones are read."""
    import bz2
    import gzip

    line = json.dumps({"text": "some text"}) + "\n"
    make("lines/a.jsonl", line)
    make("lines/b.JSONL", line)
    Path("lines/c.jsonl.GZ").write_bytes(gzip.compress(line.encode()))
    make("lines/d.json", line)
    Path("lines/e.jsonl.bz2").write_bytes(bz2.compress(line.encode()))
    make("lines/.f.jsonl", line)
    given = config({"kind": "jsonl", "paths": ["lines"]})
    data = prepare(given, processes=1)
    said = "left out: 1 hidden (lines/.f.jsonl); 2 of another ending (lines/d.json, lines/e.jsonl.bz2)"
    assert f"data.source: 3 files; {said}" in capsys.readouterr().err
    assert data.train.documents == 3
    assert data.manifest is not None
    assert data.manifest.read_files == 3
    assert data.manifest.left_out["hidden"] == [1, ["lines/.f.jsonl"]]
    assert f"files       3; {said}" in inspect(given)


def edit(text: str) -> None:
    """Change a file's content to another of the same size, with another time of modification."""
    file = Path("corpus/a.txt")
    before = file.stat()
    file.write_text(text)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def test_a_corpus_that_was_edited_in_place_is_refused() -> None:
    given = config({"kind": "text", "paths": ["corpus"]})
    prepare(given, processes=1, progress=False)
    edit("a")
    prepare(given, processes=1, progress=False)
    edit("z")
    with pytest.raises(
        ConfigError, match=r"the corpus changed \(files were edited\).*data\.prepared=.*remove that folder"
    ):
        prepare(given, processes=1, progress=False)


def test_a_touched_corpus_is_not_tokenised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = config({"kind": "text", "paths": ["corpus"]})
    prepare(given, processes=1, progress=False)
    edit("a")
    monkeypatch.setattr("xscale.data.corpus.prepare.prepare_shard", None)
    prepare(given, processes=1, progress=False)


def test_a_finished_shard_of_an_edited_file_is_made_again() -> None:
    """The preparation was killed before the end, and the file edited then."""
    from xscale.data.corpus.merge_shards import merge_shards
    from xscale.data.corpus.prepare import begin_folder
    from xscale.data.corpus.shards import prepare_shard

    given = config({"kind": "text", "paths": ["corpus"]})
    begin_folder(given, progress=False)
    prepare_shard(given, 0)
    edit("z")
    with pytest.raises(ConfigError, match="not finished, or the corpus changed meanwhile"):
        merge_shards(given)
    data = prepare(given, processes=1, progress=False)
    texts = {data.tokenizer.decode(data.train.indexed.document(number).tolist()) for number in range(2)}
    assert texts == {"z", "b"}


def test_samples_of_a_large_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first, middle and last bytes are samples; a small file is read in full."""
    from xscale.data.corpus import corpus_state

    monkeypatch.setattr(corpus_state, "SAMPLE", 4)
    monkeypatch.setattr(corpus_state, "SAMPLES", 5)
    for size in (20, 100):
        text = bytes(range(size))
        Path("large").write_bytes(text)
        before = corpus_state.content_of(["large"])
        for at in (0, size // 2, size - 1):
            Path("large").write_bytes(text[:at] + b"\xff" + text[at + 1 :])
            assert corpus_state.content_of(["large"]) != before, (size, at)
        Path("large").write_bytes(text)
        assert corpus_state.content_of(["large"]) == before


def test_a_name_that_is_not_utf8_can_be_printed_and_kept() -> None:
    Path(os.fsdecode(b"corpus/c\xff.md")).write_text("c")
    given = config({"kind": "text", "paths": ["corpus"], "endings": [".txt"]})
    prepare(given, processes=1, progress=False)
    assert "1 of another ending (corpus/c\\xff.md)" in inspect(given).encode().decode()


@pytest.mark.parametrize(
    "change", [{"state": {"stamp": "a"}}, {"state": {"stamp": 1, "content": "a"}}, {"left_out": {"hidden": 3}}]
)
def test_a_manifest_with_another_state_is_refused(change: dict[str, Any]) -> None:
    given = config({"kind": "text", "paths": ["corpus"]})
    file = prepare(given, processes=1, progress=False).path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=r"manifest\.json: the manifest is damaged"):
        prepare(given, processes=1, progress=False)


def test_data_of_before_has_no_state() -> None:
    """It is checked by names and sizes, as it was."""
    given = config({"kind": "text", "paths": ["corpus"]})
    file = prepare(given, processes=1, progress=False).path / "manifest.json"
    data = json.loads(file.read_text())
    for key in ("state", "read_files", "left_out"):
        del data[key]
    file.write_text(json.dumps(data))
    edit("z")
    prepare(given, processes=1, progress=False)
    make("corpus/c.txt")
    with pytest.raises(ConfigError, match="added, removed or resized"):
        prepare(given, processes=1, progress=False)

"""A run's tokenizer is in its folder: nothing else is needed to use the run, and no other tokenizer is taken for it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.data.corpora import words
from tests.faults.planted_entries import dangling_link, fifo, link_to_file, link_to_folder
from tests.train.test_load_run import MIXTURE, call
from tests.train.tiny import losses, recipe, run
from xscale.checkpoint.load import read_state
from xscale.cli.main import app
from xscale.commands.checkpoints.upcycle import upcycle_run
from xscale.convert.hf.tokenizer import tokenizer_of
from xscale.core.config import encode
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.data.corpus.stored_tokenizer import open_stored_tokenizer, store_tokenizer
from xscale.data.corpus.train_tokenizer import train_tokenizer
from xscale.data.tokenizer.byte import Byte
from xscale.evaluate.evaluate_run import evaluate_run
from xscale.generate.generate_text import generate_text

MODEL = {
    "kind": "decoder",
    "width": 32,
    "stack": {
        "depth": 1,
        "block": {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "gated", "hidden": 48}},
    },
}
STOPPED = {"steps": 4, "batch_size": 8, "micro_batch_size": 2, "stop_after": 2, "eval_every": 0}


def config(folder: Path, name: str = "run", seed: int = 0, **train: Any) -> Any:
    """A recipe whose tokenizer is trained on made-up words drawn with `seed`."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number in range(8):
        (corpus / f"{number}.txt").write_text(words(100 * seed + number, 400))
    data = {
        "source": {"kind": "text", "paths": [str(corpus)]},
        "tokenizer": {"kind": "sentencepiece", "vocabulary": 420, "sentinels": 10},
        "folder": str(folder / "data"),
    }
    return recipe(folder, name, model=MODEL, data=data, train=STOPPED | train)


def other_tokenizer(folder: Path) -> None:
    """The data folder has, for the same config, a tokenizer of other text."""
    shutil.rmtree(folder / "data")
    train_tokenizer(config(folder, seed=1).data, progress=False)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    assert run(config(tmp_path)) == EXIT_REQUEUE
    return tmp_path


def test_a_copy_is_used_from_anywhere(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` needs no corpus; `eval` makes its data from the source, or takes other text."""
    before = generate_text(stopped / "run", "abe", 8, 0.0, None, 0), evaluate_run(stopped / "run", None)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(stopped / "run", elsewhere / "copy")
    shutil.rmtree(stopped / "data")
    monkeypatch.chdir(elsewhere)
    assert generate_text(Path("copy"), "abe", 8, 0.0, None, 0) == before[0]
    assert not (stopped / "data").exists()
    assert evaluate_run(Path("copy"), None) == before[1]
    shutil.rmtree(stopped / "data")
    shutil.rmtree(stopped / "corpus")
    with pytest.raises(ConfigError, match="--data: the run's validation documents cannot be opened from here"):
        evaluate_run(Path("copy"), None)
    (elsewhere / "text").mkdir()
    (elsewhere / "text" / "a.txt").write_text(words(0, 400))
    (elsewhere / "lines.jsonl").write_text(json.dumps({"text": words(0, 400)}) + "\n")
    found = CliRunner().invoke(app, ["eval", "copy", "--data", "text"])
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout.splitlines()[-1])
    assert (result["step"], result["loss"] > 0) == (2, True)
    assert evaluate_run(Path("copy"), None, source="lines.jsonl") == result
    assert evaluate_run(Path("copy"), None, source="{kind: jsonl, paths: [lines.jsonl]}") == result
    assert sorted(path.name for path in elsewhere.iterdir()) == ["copy", "lines.jsonl", "text"]


def test_a_run_resumes_with_its_own(stopped: Path) -> None:
    """The data folder is gone and the corpus has changed: tokenised anew with the run's tokenizer, none is trained."""
    tokenizer = (stopped / "run" / "tokenizer" / "tokenizer.model").read_bytes()
    shutil.rmtree(stopped / "data")
    assert run(config(stopped, stop_after=None)) == EXIT_DONE
    assert next(stopped.glob("data/*/tokenizer.model")).read_bytes() == tokenizer
    assert run(config(stopped, "whole", stop_after=None)) == EXIT_DONE
    assert losses(stopped, "whole") == losses(stopped)


def test_another_tokenizer_is_refused(stopped: Path) -> None:
    fingerprint = read_state(next(stopped.glob("run/checkpoints/step-*")))["tokenizer_fingerprint"]
    other_tokenizer(stopped)
    with pytest.raises(
        ConfigError, match=rf"fingerprint \w+, and the run was trained with {fingerprint}.*data\.folder"
    ):
        run(config(stopped, stop_after=None))
    with pytest.raises(ConfigError, match=f"the run was trained with {fingerprint}"):
        evaluate_run(stopped / "run", None)
    assert generate_text(stopped / "run", "abe", 8, 0.0, None, 0) is not None


@pytest.mark.long
def test_another_tokenizer_in_the_run_folder_is_refused(stopped: Path) -> None:
    other_tokenizer(stopped)
    shutil.copy(next(stopped.glob("data/*/tokenizer.model")), stopped / "run" / "tokenizer")
    commands = [
        lambda: run(config(stopped, stop_after=None)),
        lambda: evaluate_run(stopped / "run", None),
        lambda: generate_text(stopped / "run", "abe", 8, 0.0, None, 0),
        lambda: tokenizer_of(next(stopped.glob("run/checkpoints/step-*")), encode(config(stopped).data)),
        lambda: upcycle_run(stopped / "run", stopped / "new", [MIXTURE]),
        lambda: call("checkpoint", "export", stopped / "run", stopped / "new", "--to", "hf"),
    ]
    for command in commands:
        with pytest.raises(ConfigError, match=r"fingerprint .* and the folder's description says .*Copy the folder"):
            command()
        assert not (stopped / "new").exists()
    # With a description of its own, the checkpoint disagrees.
    shutil.rmtree(stopped / "run" / "tokenizer")
    for command in commands:
        with pytest.raises(ConfigError, match=r"fingerprint .* was trained with"):
            command()


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"[1]",
        b"{",
        b"[" * 100_000,
        b'{"tokenizer": {"kind": "byte"}}',
        b'{"fingerprint": "byte-100"}',
        b'{"tokenizer": 7, "fingerprint": "byte-100"}',
        b'{"tokenizer": {"kind": "byte", "sentinels": -1}, "fingerprint": "byte-100"}',
        b'{"tokenizer": {"kind": "no such"}, "fingerprint": "byte-100"}',
        b'{"tokenizer": {"kind": "byte"}, "fingerprint": ["byte-100"]}',
    ],
)
def test_a_description_that_no_run_writes_is_refused(tmp_path: Path, content: bytes) -> None:
    store_tokenizer(Byte(Byte.Config(), tmp_path), tmp_path)
    assert open_stored_tokenizer(tmp_path) is not None
    (tmp_path / "tokenizer" / "fingerprint.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"/tokenizer(/fingerprint\.json)?: .*Copy the folder again"):
        open_stored_tokenizer(tmp_path)


@pytest.mark.long
def test_a_run_of_an_earlier_version_gets_its_copy(stopped: Path) -> None:
    folder = stopped / "run"
    generated = generate_text(folder, "abe", 8, 0.0, None, 0)
    copy = (folder / "tokenizer" / "tokenizer.model").read_bytes()
    shutil.rmtree(folder / "tokenizer")
    forget_fingerprint(next(folder.glob("checkpoints/step-*")))
    assert generate_text(folder, "abe", 8, 0.0, None, 0) == generated
    assert evaluate_run(folder, None)["step"] == 2
    assert not (folder / "tokenizer").exists(), "reading a run must not write"
    assert run(config(stopped, stop_after=None)) == EXIT_DONE
    assert (folder / "tokenizer" / "tokenizer.model").read_bytes() == copy
    assert read_state(folder / "checkpoints" / "step-00000004")["tokenizer_fingerprint"]


def forget_fingerprint(path: Path) -> None:
    """Make the checkpoint one of a version that recorded no fingerprint."""
    from xscale.checkpoint import manifest
    from xscale.checkpoint.disk import Disk, hash_file

    state = json.loads((path / "state.json").read_text())
    del state["tokenizer_fingerprint"]
    (path / "state.json").write_text(json.dumps(state))
    stored = manifest.read(path)
    stored.files["state.json"] = hash_file(path / "state.json")
    manifest.write(path, stored, Disk())


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer/tokenizer_config.json", "tokenizer/fingerprint.json"])
@pytest.mark.parametrize("kind", [link_to_file, link_to_folder, dangling_link, fifo], ids=lambda kind: kind.__name__)
def test_a_tokenizer_is_read_through_no_link(name: str, kind: Callable[[Path, Path], None], tmp_path: Path) -> None:
    """Its files come into exports; a tokenizer_config.json is read where it lies beside another file."""
    run_folder, outside = tmp_path / "run", tmp_path / "outside"
    run_folder.mkdir()
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("{}")
    store_tokenizer(Byte(Byte.Config(), tmp_path), run_folder)
    if name == "tokenizer":
        (run_folder / "tokenizer").rename(outside / "of_a_run")
        kind(run_folder / name, outside)
        if kind is link_to_folder:
            shutil.copytree(outside / "of_a_run", outside / "folder", dirs_exist_ok=True)
    else:
        (run_folder / name).unlink(missing_ok=True)
        kind(run_folder / name, outside)
    if name == "tokenizer" and kind is not link_to_folder:
        assert open_stored_tokenizer(run_folder) is None
    else:
        with pytest.raises(ConfigError, match=r"cannot be read: this is a (symbolic link|FIFO), not a f") as refused:
            open_stored_tokenizer(run_folder)
        assert "Errno" not in str(refused.value)

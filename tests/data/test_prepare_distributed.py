"""Preparation spread over ranks: the serial result to the byte, over real MPI too; no half when a rank fails."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.data.corpora import text_config, words
from tests.distributed import distributed
from tests.ports import free_ports
from xscale.core.errors import ConfigError, FaultError
from xscale.data.corpus import shards
from xscale.data.corpus.manifest import MANIFEST
from xscale.data.corpus.prepare import prepare, prepare_distributed
from xscale.data.corpus.prepared import prepared_folder
from xscale.data.corpus.shards import MIN_SHARD_BYTES
from xscale.data.tokenizer.sentencepiece import SentencePiece
from xscale.mesh.consensus import Consensus

ROOT = Path(__file__).parents[2]
XSCALE = [sys.executable, "-m", "xscale"]


def contents(folder: Path) -> dict[str, str]:
    """Contents of a prepared folder, but for its lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def spread(folder: Path, **fields: Any) -> Path:
    """This rank's part, on shards so small that there are many."""
    shards.MIN_SHARD_BYTES = 2000
    try:
        config = text_config(folder, **fields)
        ranks = Consensus(doing="prepared")
        prepare_distributed(config, ranks.rank, ranks.world, lambda work: ranks.on_all(folder, work), progress=False)
        return prepared_folder(config)
    finally:
        shards.MIN_SHARD_BYTES = MIN_SHARD_BYTES


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_serial_result(pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(shards, "MIN_SHARD_BYTES", 2000)
    settings = {"tokenizer": SentencePiece.Config(vocabulary=400)}
    alone = text_config(tmp_path, **settings).model_copy(update={"folder": str(tmp_path / "alone")})
    assert len(shards.plan_shards(alone)) > 5
    prepare(alone, processes=1, progress=False)
    pool.run(spread, ranks, tmp_path, **settings)
    made = contents(prepared_folder(text_config(tmp_path, **settings)))
    assert made == contents(prepared_folder(alone))
    assert {"train.bin", "train.idx", "validation.bin", "tokenizer.model", MANIFEST} <= set(made)


@distributed(ranks=2)
def test_what_one_rank_refuses_all_refuse_alike(tmp_path: Path) -> None:
    text_config(tmp_path)
    (tmp_path / "corpus/039.txt").write_bytes(b"text\0no text")
    with pytest.raises(ConfigError, match="binary") as caught:
        spread(tmp_path)
    assert caught.value.same_on_all_ranks
    assert len(caught.value.problems) == 1
    assert not (prepared_folder(text_config(tmp_path)) / MANIFEST).exists()


@distributed(ranks=2)
def test_a_rank_that_falls_over_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fall(*_: Any) -> int:
        raise OSError("the disk is gone")

    if dist.get_rank() == 1:
        monkeypatch.setattr("xscale.data.corpus.prepare.prepare_shard", fall)
    with pytest.raises(FaultError, match=r"cannot be prepared \(rank 1\): the disk is gone"):
        spread(tmp_path)
    assert not (prepared_folder(text_config(tmp_path)) / MANIFEST).exists()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config over enough text for six shards, and a tokenizer to be trained."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for index in range(12):
        (corpus / f"{index:02d}.txt").write_text("\n\n".join(words(100 * index + one, 100) for one in range(850)))
    data = {
        "source": {"kind": "text", "paths": [str(corpus)], "document": "paragraph"},
        "tokenizer": {"kind": "sentencepiece", "vocabulary": 400},
        "folder": str(tmp_path / "alone"),
        "workers": 1,
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"use": [str(ROOT / "configs/run/quickstart.yaml")], "data": data}))
    return file


def command(config: Path, folder: Path) -> list[str]:
    return [*XSCALE, "data", "prepare", str(config), f"data.folder={folder}", f"run.dir={folder}-run"]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def made(folder: Path) -> Path:
    (one,) = folder.iterdir()
    return one


@pytest.mark.long
def test_over_mpi_as_alone(config: Path, tmp_path: Path, mpirun: str) -> None:
    """mpirun itself on 4 ranks, `xscale launch mpi` on 2, and a rank killed on the way."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install mpi4py")
    alone = run(*command(config, tmp_path / "alone"))
    assert alone.returncode == 0, alone.stderr
    wanted = contents(made(tmp_path / "alone"))
    flags = ["--allow-run-as-root"] if os.getuid() == 0 else []
    four = run(mpirun, *flags, "--oversubscribe", "--bind-to", "none", "-n", "4", *command(config, tmp_path / "four"))
    assert four.returncode == 0, four.stderr
    assert four.stdout.replace("/four/", "/alone/") == alone.stdout
    assert "tokenising on 4 ranks" in four.stderr
    assert contents(made(tmp_path / "four")) == wanted
    launched = [*XSCALE, "launch", "mpi", "--mpirun", mpirun, "--processes", "2", "--work", "prepare", str(config)]
    two = run(*launched, f"data.folder={tmp_path / 'two'}", f"run.dir={tmp_path / 'two-run'}")
    assert two.returncode == 0, two.stderr
    assert "tokenising on 2 ranks" in two.stderr
    assert contents(made(tmp_path / "two")) == wanted


@pytest.mark.long
def test_a_killed_rank_leaves_no_half(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}.items():
        monkeypatch.setenv(name, value)
    ranks = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        ranks.append(subprocess.Popen(command(config, tmp_path / "two"), cwd=ROOT, stderr=subprocess.PIPE, text=True))
    second = [tmp_path / "two" / "*" / "shards" / f"{number:05d}.*" for number in (1, 3, 5)]
    while not any(list(tmp_path.glob(str(one.relative_to(tmp_path)))) for one in second):
        assert all(process.poll() is None for process in ranks), [process.communicate() for process in ranks]
        time.sleep(0.002)
    ranks[1].send_signal(signal.SIGKILL)
    said = ranks[0].communicate(timeout=600)[1]
    ranks[1].communicate()
    assert ranks[0].returncode == 1, said
    assert "lost contact with another rank" in said
    assert not (made(tmp_path / "two") / MANIFEST).exists()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    for folder in ("two", "alone"):
        assert run(*command(config, tmp_path / folder)).returncode == 0
    assert contents(made(tmp_path / "two")) == contents(made(tmp_path / "alone"))

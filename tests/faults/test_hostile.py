"""Pickles, pipes, devices and paths that leave their folder, given to everything that reads a file: nothing happens."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from tests.distributed import Pool
from tests.faults.dying import save_step, tensors
from tests.faults.planted_entries import KINDS
from xscale.checkpoint.errors import consensus
from xscale.checkpoint.in_memory import InMemoryCheckpoint
from xscale.checkpoint.index import decode_index
from xscale.checkpoint.load import CheckpointReader, load
from xscale.checkpoint.tools import tools
from xscale.convert.deepspeed import read_universal
from xscale.convert.hf.import_model import open_hf_folder, resolve_snapshot
from xscale.convert.hf.tokenizer import IDS, ORIGIN, kept_special_ids, restore_tokenizer
from xscale.core.errors import ConfigError, FaultError
from xscale.core.files.file_safety import (
    check_name,
    check_relative,
    remove_file,
    remove_folder,
)
from xscale.data.corpus.prepared import DatasetManifest
from xscale.data.indexed import IndexedDataset
from xscale.data.tokenizer.huggingface import HuggingFace
from xscale.data.tokenizer.sentencepiece import SentencePiece
from xscale.observe import record
from xscale.run.run_folder import read_config, run_name
from xscale_launch import files

TOUCHED = "touched"


class Evil:
    """Touches a file in the working directory when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {TOUCHED}",)


def archive() -> bytes:
    """Pickle that `torch.save` would write of an evil object."""
    stream = io.BytesIO()
    torch.save({"param": Evil()}, stream)
    return stream.getvalue()


def attribute(of: bytes, name: bytes) -> bytes:
    """Opcodes that leave an attribute of what other opcodes left."""
    return b"cbuiltins\ngetattr\n(" + of + b"V" + name + b"\ntR"


def by_attributes() -> bytes:
    """A path from a class that an index may name to modules that it imported."""
    known = attribute(b"ctorch.distributed.checkpoint.metadata\nMetadata\n", b"__init__")
    imported = attribute(attribute(known, b"__globals__"), b"__getitem__") + b"(Vos\ntR"
    return attribute(imported, b"system") + b"(Vtouch " + TOUCHED.encode() + b"\ntR."


PAYLOADS: dict[str, Callable[[], bytes]] = {
    "pickle, protocol 0": lambda: pickle.dumps(Evil(), protocol=0),
    "pickle, protocol 4": lambda: pickle.dumps(Evil(), protocol=4),
    "torch.save": archive,
    "by attributes of what is allowed": by_attributes,
    "by a dotted name": lambda: b"\x80\x04\x8c\x05torch\x8c\x0bSize.numel\x93.",
    "by an extension": lambda: b"\x80\x02\x82\x01.",
    "memo of 32 GB": lambda: b"\x80\x02]r\xff\xff\xff\x7f.",
    "bytes of 1 TB": lambda: b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",
    "nested without end": lambda: b"(" * 200_000 + b"t" * 200_000 + b".",
    "nothing": lambda: b"",
}


def universal(folder: Path, content: bytes) -> Any:
    (folder / "zero" / "a").mkdir(parents=True)
    (folder / "zero" / "a" / "fp32.pt").write_bytes(content)
    return read_universal(folder)


def with_file(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def megatron(folder: Path, content: bytes, name: str) -> Any:
    from xscale.commands.checkpoints import megatron as command

    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    with_file(folder, name, content)
    command.require_torch_format(folder)
    held = command.contents(folder) if name == ".metadata" else None
    from megatron.core import dist_checkpointing

    return held, command._guarded(folder, lambda: dist_checkpointing.load_common_state_dict(str(folder)))


def checkpoint(folder: Path, name: str, content: bytes) -> Path:
    """A checkpoint, one of whose files has this content, and hashes that fit."""
    path = save_step(folder, 1)
    (path / name).write_bytes(content)
    seal(path, name)
    return path


def seal(path: Path, name: str) -> None:
    """Write the hash of a file of a checkpoint into its manifest, and the manifest's."""
    manifest = path / "manifest.json"
    data = json.loads(manifest.read_bytes())
    content = (path / name).read_bytes()
    data["files"][name] = {"size": len(content), "value": hashlib.sha256(content).hexdigest(), "hash": "sha256"}
    manifest.write_text(json.dumps(data))
    (path / "manifest.sha256").write_text(f"{hashlib.sha256(manifest.read_bytes()).hexdigest()}  manifest.json\n")


def loaded(path: Path) -> Any:
    held = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
    return load(path, held)


def in_memory(folder: Path, content: bytes) -> Any:
    memory, held = InMemoryCheckpoint(folder / "run", consensus(), 1), {"a": torch.ones(3)}
    memory.copy(held)
    memory.commit(5, held, {})
    for file in (folder / "run").iterdir():
        file.write_bytes(content)
    return memory.restore(held, -1)


def pair(folder: Path, content: bytes) -> Any:
    with_file(folder, "a.bin", content)
    return IndexedDataset(with_file(folder, "a.idx", content) / "a")


READERS: dict[str, Callable[[Path, bytes], Any]] = {
    "index": lambda folder, content: loaded(checkpoint(folder, "tensors/.metadata", content)),
    "tensors": lambda folder, content: loaded(checkpoint(folder, "tensors/__0_0.distcp", content)),
    "state": lambda folder, content: loaded(checkpoint(folder, "state.json", content)),
    "config": lambda folder, content: loaded(checkpoint(folder, "config.json", content)),
    "shown": lambda folder, content: tools.show(checkpoint(folder, "tensors/.metadata", content)),
    "one tensor": lambda folder, content: CheckpointReader(checkpoint(folder, "tensors/.metadata", content)),
    "in memory": in_memory,
    "Megatron's index": lambda folder, content: megatron(folder, content, ".metadata"),
    "Megatron's arguments": lambda folder, content: megatron(folder, content, "common.pt"),
    "DeepSpeed": universal,
    "prepared data": lambda folder, content: DatasetManifest.load(with_file(folder, "m.json", content) / "m.json"),
    "a pair": pair,
    "SentencePiece": lambda folder, content: SentencePiece(
        SentencePiece.Config(), with_file(folder, "tokenizer.model", content)
    ),
    "tokenizer.json": lambda folder, content: HuggingFace(
        HuggingFace.Config(file=str(with_file(folder, "tokenizer.json", content) / "tokenizer.json")), folder
    ),
    "report.json": lambda folder, content: record.read_record(with_file(folder, "report.json", content)),
    "config.yaml": lambda folder, content: read_config(with_file(folder, "config.yaml", content)),
    "name": lambda folder, content: run_name(with_file(folder, "name", content)),
    "safetensors": lambda folder, content: open_hf_folder(with_file(folder, "model.safetensors", content)).__enter__(),
    "pytorch_model.bin": lambda folder, content: open_hf_folder(
        with_file(folder, "pytorch_model.bin", content)
    ).__enter__(),
    "safetensors' index": lambda folder, content: open_hf_folder(
        with_file(folder, "model.safetensors.index.json", content)
    ).__enter__(),
}


@pytest.fixture
def watched(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The unrestricted unpicklers that are called, in an empty working directory."""
    if request.node.callspec.params["reader"].startswith("Megatron"):
        # Its modules derive classes from those of pickle when they are imported.
        pytest.importorskip("megatron.core.dist_checkpointing")
    called: list[str] = []

    def refuse(name: str) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            called.append(name)
            raise AssertionError(f"{name} is called")

        return call

    original = torch.load

    def torch_load(*args: Any, **options: Any) -> Any:
        if options.get("weights_only") is not True:
            return refuse("torch.load")()
        return original(*args, **options)

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse(f"pickle.{name}"))
    monkeypatch.setattr(torch, "load", torch_load)
    return called


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_runs_what_a_file_names(tmp_path: Path, watched: list[str], reader: str, payload: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with contextlib.suppress(ConfigError, FaultError):
        READERS[reader](folder, PAYLOADS[payload]())
    assert not watched
    assert not (tmp_path / "here" / TOUCHED).exists()


def test_the_payloads_are_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the unrestricted unpicklers do what they name."""
    monkeypatch.chdir(tmp_path)
    for payload in ("pickle, protocol 0", "pickle, protocol 4", "by attributes of what is allowed"):
        pickle.loads(PAYLOADS[payload]())
        (tmp_path / TOUCHED).unlink()
    torch.load(io.BytesIO(archive()), weights_only=False)
    assert (tmp_path / TOUCHED).exists()
    assert zipfile.is_zipfile(io.BytesIO(archive()))


def test_the_state_of_a_class_cannot_be_set(tmp_path: Path) -> None:
    """A pickle may set attributes of anything it names, such as of a class of the index, for the whole process."""
    before = Metadata.__init__
    named = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n"
    content = named + b"N}\x8c\x08__init__ctorch\nSize\ns\x86b."
    with pytest.raises(FaultError, match="the state of type is not allowed"):
        loaded(checkpoint(tmp_path, "tensors/.metadata", content))
    assert Metadata.__init__ is before


def test_every_opcode_that_no_index_needs_is_refused() -> None:
    """Also those that today lead to nothing: they do not ask which classes are allowed."""
    named = b"torch\nSize\n"
    opcodes = [b"P1\n.", b"\x80\x02K\x01Q.", b"\x82\x01.", b"\x83\x01\x01.", b"\x84\x01\x01\x01\x01."]
    for content in [*opcodes, b"(i" + named + b".", b"(c" + named + b"o.", b"\x80\x05\x97."]:
        with pytest.raises(ValueError, match="an opcode that no index needs is not allowed"):
            decode_index(content)


NAMES = ["/etc/passwd", "../other", "tensors/../../other", "..", "", "a/", "a\nb", "a\0b", "/dev/zero", "x" * 300]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        check_relative(name)
    path = save_step(tmp_path, 1)
    manifest = path / "manifest.json"
    data = json.loads(manifest.read_bytes())
    data["files"][name] = data["files"]["state.json"]
    manifest.write_text(json.dumps(data))
    seal(path, "state.json")
    with pytest.raises(FaultError, match=r"manifest\.json is not a manifest"):
        loaded(path)
    for remove in (remove_file, remove_folder):
        if name in ("a\nb", "x" * 300):
            continue
        with pytest.raises(ValueError, match="not the name of a file"):
            remove(tmp_path, name)
    assert path.exists()
    assert check_name("step-00000001") == "step-00000001"


@pytest.mark.parametrize(
    "content", [*(json.dumps({"kind": "byte", "file": name}) for name in NAMES if name), "[1]", "{"]
)
def test_an_exported_tokenizer_names_only_files_of_its_folder(tmp_path: Path, content: str) -> None:
    """Its file is copied into the new run under its name, which must not leave the run."""
    source, run = with_file(tmp_path / "a" / "b", "xscale_tokenizer.json", content.encode()), tmp_path / "a" / "run"
    (tmp_path / "a" / "other").write_text("hostile")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"xscale_tokenizer\.json: this is not the description of a tokenizer"):
        restore_tokenizer(source, run)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", NAMES)
def test_an_index_of_safetensors_names_only_files_of_its_folder(tmp_path: Path, name: str) -> None:
    index = json.dumps({"weight_map": {"a": name}}).encode()
    for file in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        with (
            pytest.raises(ConfigError, match=r"index\.json: the file is not an index of tensors"),
            open_hf_folder(with_file(tmp_path / file, file, index)),
        ):
            pass


@pytest.mark.parametrize("content", [b'{"ids": [1]}', b'{"ids": "a"}', b"[1]", b"{", b"[" * 100_000])
def test_special_ids_that_no_import_writes_are_refused(tmp_path: Path, content: bytes) -> None:
    path = save_step(tmp_path / "checkpoints", 1)
    with_file(tmp_path, f"{ORIGIN}/{IDS}", content)
    with pytest.raises(ConfigError, match=IDS):
        kept_special_ids(path)


@pytest.mark.parametrize("name", ["../../other", "..", "/dev/zero"])
def test_a_cache_of_models_names_a_snapshot_of_its_own(tmp_path: Path, name: str) -> None:
    """Without a name that can be used, its only snapshot is taken, and of several none."""
    (tmp_path / "other").mkdir()
    folder = with_file(tmp_path / "models--a--b", "refs/main", name.encode())
    (folder / "snapshots" / "abc").mkdir(parents=True)
    assert resolve_snapshot(folder) == folder / "snapshots" / "abc"
    (folder / "snapshots" / "abd").mkdir()
    with pytest.raises(ConfigError, match="refs/main names none of them"):
        resolve_snapshot(folder)


def test_a_pipe_among_the_files_of_a_checkpoint_is_damage(tmp_path: Path) -> None:
    """A pipe has no bytes, as many as a forged manifest may say."""
    path = save_step(tmp_path, 1)
    (path / "state.json").write_bytes(b"")
    seal(path, "state.json")
    (path / "state.json").unlink()
    os.mkfifo(path / "state.json")
    with pytest.raises(FaultError, match=r"state\.json is a FIFO, not a file"):
        loaded(path)
    assert [row.status for row in tools.ls(tmp_path)] == ["bad"]


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "config.json"])
def test_a_key_that_occurs_twice_is_refused(tmp_path: Path, name: str) -> None:
    """Two values for one key are refused: one reader takes the first and another the last."""
    path = save_step(tmp_path, 1)
    file, manifest = path / name, path / "manifest.json"
    fields = file.read_text().strip().removeprefix("{")
    file.write_text('{"step": 1, "step": 1' + ("" if fields == "}" else ",") + fields)
    if name != "manifest.json":
        seal(path, name)
    (path / "manifest.sha256").write_text(f"{hashlib.sha256(manifest.read_bytes()).hexdigest()}  manifest.json\n")
    with pytest.raises(FaultError, match=r"a key occurs twice|manifest\.json is not a manifest"):
        loaded(path)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def read_special(reader: str, folder: Path, special: str) -> None:
    """Call a reader where the file that it reads is no regular one."""
    write_bytes = Path.write_bytes

    def write(path: Path, content: bytes) -> int:
        if content != b"special":
            return write_bytes(path, content)
        path.unlink(missing_ok=True)
        SPECIAL[special](path)
        return 0

    with (
        mock.patch.object(Path, "write_bytes", write),
        mock.patch(f"{__name__}.seal"),
        contextlib.suppress(ConfigError, FaultError),
    ):
        READERS[reader](folder, b"special")


@pytest.mark.long
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_waits_for_a_pipe_or_reads_a_device(tmp_path: Path, reader: str, special: str, pool: Pool) -> None:
    if reader.startswith("Megatron"):
        pytest.importorskip("megatron.core")
    pool.run(read_special, 1, reader, tmp_path, special, timeout_seconds=120)


@pytest.mark.parametrize("remove", [remove_folder, files.remove_folder], ids=["xscale", "launcher"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_removal_waits_for_nothing(
    kind: Callable[[Path, Path], None], remove: Callable[[Path, str], None], tmp_path: Path, limit_seconds: None
) -> None:
    """Whatever stands where a folder is removed, it is gone, and what it names is there."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    kind(tmp_path / "entry", tmp_path)
    remove(tmp_path, "entry")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    remove(tmp_path, "entry")


def test_a_removal_of_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    remove_folder(tmp_path, "link")
    assert (tmp_path / "other" / "file").exists()
    assert not (tmp_path / "link").exists()

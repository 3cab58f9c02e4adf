"""The newest good checkpoint is found by itself; bad ones are set aside with their reason."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch

from xscale.checkpoint import manifest
from xscale.checkpoint.errors import DamageError
from xscale.checkpoint.files import hidden_folder
from xscale.checkpoint.load import load, restore
from xscale.checkpoint.retention import excess
from xscale.checkpoint.save import save
from xscale.checkpoint.search import OlderCheckpointWarning, find_newest, find_to_read
from xscale.checkpoint.tools.tools import ls
from xscale.core.errors import ConfigError


def run(folder: Path) -> dict[str, torch.Tensor]:
    """Three checkpoints, of whose tensors each element is the step."""
    for step in (1, 2, 3):
        save(folder, step, {"a": torch.full((64,), float(step))}, {}, {})
    return {"a": torch.zeros(64)}


def test_a_missing_file_and_a_short_one(tmp_path: Path) -> None:
    tensors = run(tmp_path)
    (tmp_path / "step-00000003" / "state.json").unlink()
    data = tmp_path / "step-00000002" / "tensors" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    looked = find_newest(tmp_path)
    assert looked.path == tmp_path / "step-00000001"
    assert looked.reasons[0].endswith("the file state.json is missing; passed over")
    found = find_newest(tmp_path, repair=True)
    assert found.path == tmp_path / "step-00000001"
    assert [reason.split(": ", 1)[1] for reason in found.reasons] == [
        "the file state.json is missing; set aside as bad-step-00000003-missing",
        f"the file tensors/__0_0.distcp has {data_size(tmp_path)} bytes and was written with "
        f"{data_size(tmp_path) + 1}; set aside as bad-step-00000002-size",
    ]
    assert "state.json is missing" in (tmp_path / "bad-step-00000003-missing" / "reason.txt").read_text()
    assert restore(tmp_path, tensors).loaded is not None
    assert (tensors["a"] == 1).all()


def data_size(folder: Path) -> int:
    return (folder / "bad-step-00000002-size" / "tensors" / "__0_0.distcp").stat().st_size


def test_a_step_that_was_set_aside_is_said_until_a_newer_one_is_there(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "step-00000003" / "state.json").unlink()
    find_newest(tmp_path, repair=True)
    with pytest.warns(OlderCheckpointWarning, match=r"step 3 was set aside \(missing\); step 2 is read instead"):
        assert find_to_read(tmp_path).step == 2
    with pytest.raises(ConfigError, match="step 3 was set aside"):
        find_to_read(tmp_path, strict=True)
    save(tmp_path, 4, {"a": torch.zeros(64)}, {}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_to_read(tmp_path, strict=True).step == 4


def test_a_changed_byte_is_seen_on_load(tmp_path: Path) -> None:
    tensors = run(tmp_path)
    data = tmp_path / "step-00000003" / "tensors" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert find_newest(tmp_path).path == tmp_path / "step-00000003"
    with pytest.raises(DamageError, match="its hash differs"):
        load(tmp_path / "step-00000003", tensors)
    assert not tensors["a"].any()
    restored = restore(tmp_path, tensors)
    assert restored.loaded is not None
    assert restored.loaded.step == 2
    assert restored.reasons[0].endswith("set aside as bad-step-00000003-hash")


def test_without_verifying_a_changed_byte_passes(tmp_path: Path) -> None:
    """The negative control: it is the hash, and nothing else, that sees a changed number."""
    tensors = run(tmp_path)
    data = tmp_path / "step-00000003" / "tensors" / "__0_0.distcp"
    three = torch.full((64,), 3.0).numpy().tobytes()
    content = data.read_bytes()
    assert content.count(three) == 1
    data.write_bytes(content.replace(three, torch.full((64,), 4.0).numpy().tobytes()))
    load(tmp_path / "step-00000003", tensors, verify=False)
    assert (tensors["a"] == 4).all()


def test_what_a_kill_left_is_cleared_or_brought_back(tmp_path: Path) -> None:
    tensors = run(tmp_path)
    hidden_folder(tmp_path, 4, "writing").mkdir()
    hidden_folder(tmp_path, 1, "deleting").mkdir()
    (tmp_path / "step-00000003").rename(hidden_folder(tmp_path, 3, "replaced"))
    before = sorted(tmp_path.rglob("*"))
    assert find_newest(tmp_path).path == tmp_path / "step-00000002"
    assert sorted(tmp_path.rglob("*")) == before, "looking must not change what a run that goes on is writing"
    restored = restore(tmp_path, tensors)
    assert restored.loaded is not None
    assert restored.loaded.step == 3
    assert len(restored.reasons) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_nothing_there_and_nothing_good(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(64)}
    assert restore(tmp_path / "none", tensors).loaded is None
    hidden_folder(tmp_path, 4, "writing").mkdir()
    assert restore(tmp_path, tensors).loaded is None
    run(tmp_path)
    for step in (1, 2, 3):
        (tmp_path / f"step-{step:08d}" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint in it is good .* Give another run\.dir"):
        restore(tmp_path, tensors)
    with pytest.raises(ConfigError, match="no checkpoint in it is good"):
        restore(tmp_path, tensors)


def test_one_that_makes_way_for_a_newer_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, {"a": torch.ones(1)}, {}, {})
    real = manifest.read

    def read(path: Path) -> manifest.CheckpointManifest:
        monkeypatch.undo()
        save(tmp_path, 2, {"a": torch.ones(1)}, {}, {}, keep_last=1)
        return real(path)

    monkeypatch.setattr(manifest, "read", read)
    assert find_newest(tmp_path).path == tmp_path / "step-00000002"


def test_a_folder_that_bears_another_step_than_its_manifest(tmp_path: Path) -> None:
    """A copy of step 1 named step 99 is neither resumed from nor counted among those that are kept."""
    tensors = run(tmp_path)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000099")
    assert find_newest(tmp_path).path == tmp_path / "step-00000003"
    assert [path.name for _, path in excess(tmp_path, 1, None)] == ["step-00000001", "step-00000002"]
    save(tmp_path, 4, tensors, {}, {}, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000099"]
    assert next(row for row in ls(tmp_path) if row.path.name == "step-00000099").status == "bad"
    found = find_newest(tmp_path, repair=True)
    assert found.path == tmp_path / "step-00000004"
    assert found.reasons == (
        f"{tmp_path / 'step-00000099'}: the folder's name says step 99 and its manifest says step 1; "
        "set aside as bad-step-00000099-step",
    )

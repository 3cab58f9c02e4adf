"""A checkpoint on one process: what is written, what stays, and what a failure leaves."""

import errno
import gc
import io
import json
import os
import pickle
import subprocess
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.planner import SavePlan

from xscale.checkpoint import index, planner
from xscale.checkpoint.disk import Disk
from xscale.checkpoint.errors import CheckpointError, DamageError
from xscale.checkpoint.files import visible_steps
from xscale.checkpoint.index import read_index, tensor_entries
from xscale.checkpoint.load import load, load_tensors, read_config, read_state
from xscale.checkpoint.save import save
from xscale.checkpoint.search import find_newest
from xscale.core.errors import ConfigError


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "model.a": torch.randn(5, 3, generator=draw),
        "model.b": torch.randn(7, generator=draw).to(torch.bfloat16),
        "model.one": torch.tensor(3.5, dtype=torch.float64),
        "optimizer.count": torch.tensor([4], dtype=torch.int64),
        "empty": torch.empty(0, 4),
    }


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in model().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    path = save(tmp_path / "run", 10, model(), {"consumed": 160}, {"width": 3})
    assert path == tmp_path / "run" / "step-00000010"
    tensors = empty()
    loaded = load(path, tensors)
    assert equal(tensors, model())
    assert (loaded.step, loaded.state, loaded.config) == (10, {"consumed": 160}, {"width": 3})
    assert read_config(path) == {"width": 3}
    assert read_state(path) == {"consumed": 160}
    assert equal(load_tensors(path), model())
    assert list(load_tensors(path, ["model.b"])) == ["model.b"]


def test_equal_states_give_equal_bytes(tmp_path: Path) -> None:
    paths = [save(tmp_path / name, 1, model(), {}, {}) for name in ("a", "b")]
    files = [path.relative_to(paths[0]) for path in paths[0].rglob("*") if path.is_file()]
    assert len(files) == 6
    assert all((paths[0] / file).read_bytes() == (paths[1] / file).read_bytes() for file in files)


def test_the_seal_is_what_sha256sum_reads(tmp_path: Path) -> None:
    path = save(tmp_path, 1, model(), {}, {})
    done = subprocess.run(["sha256sum", "--check", "manifest.sha256"], cwd=path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((path / "manifest.json").read_text())["step"] == 1


def test_only_and_types(tmp_path: Path) -> None:
    path = save(tmp_path, 1, model(), {}, {})
    part = {name: tensor for name, tensor in empty().items() if name.startswith("model.")}
    load(path, part, only="model.")
    assert torch.equal(part["model.a"], model()["model.a"])
    with pytest.raises(ConfigError, match="which this run does not have"):
        load(path, part)
    part["model.b"] = part["model.b"].float()
    with pytest.raises(ConfigError, match=r"model\.b is bfloat16 there and float32 here"):
        load(path, part, only="model.")
    load(path, part, only="model.", cast_types=True)
    assert torch.equal(part["model.b"], model()["model.b"].float())


def test_another_model_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    path = save(tmp_path, 1, model(), {}, {})
    tensors = empty()
    tensors["model.a"] = torch.zeros(3, 5)
    tensors["extra"] = torch.zeros(1)
    del tensors["empty"]
    with pytest.raises(ConfigError) as refusal:
        load(path, tensors)
    text = str(refusal.value)
    assert text.startswith(f"{path}: this checkpoint is of another model: it lacks extra; it has empty, which")
    assert "model.a is [5, 3] there and [3, 5] here" in text
    assert text.endswith(f"Train with the config it was saved with ({path}/config.json) or give another run.dir.")
    assert not any(tensor.any() for tensor in tensors.values())
    with pytest.raises(ConfigError, match=r"it has no tensor nothing\. `xscale checkpoint show`"):
        load_tensors(path, ["nothing"])


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        load(tmp_path / "none", empty())
    with pytest.raises(ConfigError, match="this is not a checkpoint"):
        load(tmp_path, empty())
    assert find_newest(tmp_path / "none").path is None
    path = save(tmp_path, 1, model(), {}, {})
    text = (path / "manifest.json").read_text().replace('"format": 2', '"format": 0')
    (path / "manifest.json").write_text(text)
    with (path / "manifest.sha256").open("w") as seal:
        subprocess.run(["sha256sum", "manifest.json"], cwd=path, stdout=seal, check=True)
    with pytest.raises(
        ConfigError, match=r"it has format 0, and this xscale reads formats 1, 2\. Read it with the version"
    ):
        load(path, empty())


def test_retention(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step, model(step), {}, {}, keep_last=2, keep_every=3)
    assert [step for step, _ in visible_steps(tmp_path)] == [7, 6, 3]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_retention_counts_only_what_is_whole(tmp_path: Path) -> None:
    save(tmp_path, 1, model(), {}, {})
    for step in (2, 3):
        (save(tmp_path, step, model(), {}, {}) / "state.json").unlink()
    save(tmp_path, 4, model(), {}, {}, keep_last=2)
    assert [step for step, _ in visible_steps(tmp_path)] == [4, 3, 2, 1]


def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 1, model(0), {}, {})
    path = save(tmp_path, 1, model(1), {}, {})
    assert equal(load_tensors(path), model(1))
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]


class Refusing(Disk):
    """Fails like a system that is out of something, at the first change of a kind."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__()
        self.what, self.number = what, number

    def touch(self, what: str, path: Path) -> None:
        if what == self.what:
            raise OSError(self.number, os.strerror(self.number), str(path))


@pytest.mark.parametrize(
    ("what", "number", "fix"),
    [
        ("mkdir", errno.EROFS, "Mount it for writing"),
        ("open", errno.EACCES, "Let this user write there, or give another run.dir"),
        ("write", errno.ENOSPC, "Free space, keep fewer checkpoints"),
        ("sync", errno.EIO, "Check the disk"),
        ("rename", errno.ENOENT, "Put the folder back"),
    ],
)
def test_a_failed_save_is_a_sentence_and_leaves_the_last_one(tmp_path: Path, what: str, number: int, fix: str) -> None:
    save(tmp_path, 1, model(), {}, {})
    with pytest.raises(CheckpointError) as failure:
        save(tmp_path, 2, model(), {}, {}, disk=Refusing(what, number))
    assert str(failure.value).startswith(f"{tmp_path}/step-00000002: the checkpoint cannot be written: ")
    assert fix in str(failure.value)
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]
    assert find_newest(tmp_path, hashes=True).path == tmp_path / "step-00000001"


def test_too_little_space_is_seen_before_the_first_byte(tmp_path: Path) -> None:
    class Small(Disk):
        touched: list[str] = []

        def touch(self, what: str, path: Path) -> None:
            self.touched.append(what)

        def require(self, folder: Path, size: int) -> None:
            assert size > sum(tensor.nbytes for tensor in model().values())
            super().require(folder, 1 << 60)

    with pytest.raises(CheckpointError, match=r"MiB|GiB|TiB needed, .* free\. Free space"):
        save(tmp_path, 2, model(), {}, {}, disk=Small())
    assert "write" not in Small.touched
    assert not list(tmp_path.iterdir())


def test_the_tools_of_torch_read_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = save(tmp_path, 1, model(), {}, {})
    dcp_to_torch_save(path / "tensors", tmp_path / "all.pt")
    assert equal(torch.load(tmp_path / "all.pt", weights_only=True), model())


def test_large_tensors_are_written_in_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xscale.checkpoint.planner.MAX_BOX_BYTES", 24)
    path = save(tmp_path, 1, model(), {}, {})
    held = tensor_entries(read_index(path))
    assert {name: one.boxes for name, one in held.items()} == {
        "model.a": 3,
        "model.b": 1,
        "model.one": 1,
        "optimizer.count": 1,
        "empty": 1,
    }
    assert equal(load_tensors(path), model())


def test_a_view_brings_only_its_own_numbers(tmp_path: Path) -> None:
    big = torch.randn(1000, 100)
    path = save(tmp_path, 1, {"a": big[:3].t()}, {}, {})
    assert torch.equal(load_tensors(path)["a"], big[:3].t())
    assert (path / "tensors" / "__0_0.distcp").stat().st_size < 4000


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch evil",)


def test_an_index_from_a_stranger_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 1, model(), {}, {})
    (path / "tensors" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DamageError, match=r"is not an index of tensors \(posix.system is not allowed\)"):
        read_index(path)
    pickle.loads(pickle.dumps(Evil()))
    assert (tmp_path / "evil").exists(), "the negative control"


class Member:
    """Written as Python before 3.11.4 writes what `name` of `kind` is."""

    def __init__(self, kind: object, name: str) -> None:
        self.what = kind, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, self.what


def test_an_index_of_an_older_python_is_read() -> None:
    """It names members of enumerations by getattr, which is allowed for these alone."""
    kind = _MEM_FORMAT_ENCODING
    assert index._IndexUnpickler(io.BytesIO(pickle.dumps(Member(kind, "TORCH_CONTIGUOUS_FORMAT")))).load() is (
        kind.TORCH_CONTIGUOUS_FORMAT
    )
    for other, name in ((kind, "mro"), (torch.Size, "numel")):
        with pytest.raises(pickle.UnpicklingError, match=f"attribute '{name}'"):
            index._IndexUnpickler(io.BytesIO(pickle.dumps(Member(other, name)))).load()


@pytest.mark.parametrize("collects", [True, False])
def test_a_plan_pauses_garbage_collection_only_while_it_is_made(
    collects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collection is as it was before, also where the plan fails."""
    during: list[bool] = []

    def divide(local_plans: list[SavePlan]) -> list[planner.CheckpointPlan]:
        during.append(gc.isenabled())
        if len(during) == 2:
            raise OSError(errno.ENOMEM, "no memory")
        return planned(local_plans)

    planned = planner.divide_plans
    monkeypatch.setattr(planner, "divide_plans", divide)
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        save(tmp_path / "run", 1, model(), {}, {})
        assert gc.isenabled() == collects
        with pytest.raises(CheckpointError, match="no memory"):
            save(tmp_path / "run", 2, model(), {}, {})
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert during == [False, False]

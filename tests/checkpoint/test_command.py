"""The tools: list, show, verify, diff, prune, consolidate."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from xscale.checkpoint.files import hidden_folder, visible_steps
from xscale.checkpoint.save import save
from xscale.cli.checkpoint import checkpoint_app
from xscale.commands.checkpoints import checkpoint as command
from xscale.core.errors import ConfigError


def run(folder: Path, last: int = 4) -> Path:
    for step in range(1, last + 1):
        tensors = {
            "model.a": torch.arange(6.0).reshape(2, 3) + step,
            "model.b": torch.ones(3, dtype=torch.bfloat16),
            "optimizer.average.a": torch.zeros(2, 3),
        }
        save(folder / "checkpoints", step, tensors, {"consumed": 8 * step}, {"model": {"width": 3}, "seed": 0})
    return folder


def said(function: object, *arguments: object, **options: object) -> tuple[int, list[str]]:
    lines: list[str] = []
    status = function(*arguments, say=lines.append, **options)  # type: ignore[operator]
    return status, "\n".join(lines).splitlines()


def test_it_loads_no_torch() -> None:
    text = (
        "import sys, xscale.commands.checkpoints.checkpoint, xscale.checkpoint.config; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", text], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_ls(tmp_path: Path) -> None:
    folder = run(tmp_path) / "checkpoints"
    (folder / "step-00000002" / "state.json").unlink()
    hidden_folder(folder, 5, "writing").mkdir()
    (folder / "step-00000001").rename(folder / "bad-step-00000001-hash")
    before = sorted(tmp_path.rglob("*"))
    status, lines = said(command.ls, tmp_path)
    assert status == 0
    assert [line.split()[:2] for line in lines] == [
        ["1", "set"],
        ["2", "bad"],
        ["3", "good"],
        ["4", "good"],
        ["5", "unfinished"],
    ]
    assert "the file state.json is missing" in lines[1]
    assert "1 rank " in lines[2]
    assert sorted(tmp_path.rglob("*")) == before
    assert json.loads("\n".join(said(command.ls, folder, as_json=True)[1]))[3]["step"] == 4
    (tmp_path / "none").mkdir()
    assert said(command.ls, tmp_path / "none")[1] == [f"{tmp_path}/none: no checkpoints"]
    with pytest.raises(ConfigError, match=r"there is no such folder\. Give a run\.dir"):
        command.ls(tmp_path / "nowhere")


def test_show(tmp_path: Path) -> None:
    status, lines = said(command.show, run(tmp_path), only="model.")
    assert status == 0
    assert lines[0].startswith(f"{tmp_path}/checkpoints/step-00000004: step 4, good, ")
    assert lines[1] == 'state: {"consumed": 32}'
    assert lines[2].split() == ["model.a", "float32", "2x3", "24", "B"]
    assert lines[-1] == "2 tensors, 30 B"
    data = json.loads("\n".join(said(command.show, tmp_path / "checkpoints" / "step-00000001", as_json=True)[1]))
    assert data["config"] == {"model": {"width": 3}, "seed": 0}


def test_verify(tmp_path: Path) -> None:
    run(tmp_path)
    assert said(command.verify, tmp_path)[0] == 0
    data = tmp_path / "checkpoints" / "step-00000003" / "tensors" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    status, lines = said(command.verify, tmp_path)
    assert status == 1
    assert [("bad" in line) for line in lines] == [False, False, True, False]
    assert lines[2].endswith("the content of tensors/__0_0.distcp is not what was written (its hash differs)")
    assert said(command.verify, tmp_path / "checkpoints" / "step-00000004")[0] == 0
    with pytest.raises(ConfigError, match="there is no checkpoint in it"):
        command.verify(tmp_path / "checkpoints" / "step-00000004" / "tensors")


def test_diff(tmp_path: Path) -> None:
    one, other = run(tmp_path / "a", 2), tmp_path / "b"
    assert said(command.diff, one, one) == (0, ["3 tensors are equal bit for bit, 0 are not"])
    tensors = {
        "model.a": torch.arange(6.0).reshape(2, 3) + 2,
        "model.b": torch.ones(4, dtype=torch.bfloat16),
        "model.c": torch.ones(1),
    }
    tensors["model.a"][1, 2] += 0.5
    save(other, 2, tensors, {"consumed": 17}, {"model": {"width": 4}, "seed": 0})
    status, lines = said(command.diff, one, other)
    assert status == 1
    assert lines == [
        "config model.width: 3 -> 4",
        "state consumed: 16 -> 17",
        "- optimizer.average.a",
        "+ model.c",
        "~ model.a: numbers norm 11.7898 -> norm 12.0934, 1 differ by up to 0.5",
        "~ model.b: shape [3] -> [4]",
        "0 tensors are equal bit for bit, 2 are not",
    ]
    assert json.loads("\n".join(said(command.diff, one, other, as_json=True)[1]))["tensors"][0]["elements"] == 1
    tensors["model.a"][0, 0] = float("nan")
    save(tmp_path / "c", 2, tensors, {}, {})
    assert "2 differ by up to nan" in " ".join(said(command.diff, one, tmp_path / "c")[1])


def test_the_last_good_one_is_good_by_its_content(tmp_path: Path) -> None:
    """A changed byte in the newest, of which no size tells, must not cost the one before it."""
    folder = run(tmp_path) / "checkpoints"
    file = folder / "step-00000004" / "tensors" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert said(command.prune, tmp_path, keep_last=1)[1] == [f"{folder}/step-0000000{step}: deleted" for step in (1, 2)]
    assert [step for step, _ in visible_steps(folder)] == [4, 3]


def test_prune(tmp_path: Path) -> None:
    folder = run(tmp_path, 6) / "checkpoints"
    (folder / "step-00000001").rename(folder / "bad-step-00000001-hash")
    (folder / "step-00000006" / "state.json").unlink()
    status, lines = said(command.prune, tmp_path, keep_last=1, keep_every=3, dry=True)
    assert lines == [f"{folder}/step-0000000{step}: would be deleted" for step in (2, 4)]
    assert len(visible_steps(folder)) == 5
    status, lines = said(command.prune, tmp_path, keep_last=1, keep_every=3, bad=True)
    assert status == 0
    assert len(lines) == 3
    # The bad sixth does not count as the newest: the fifth is what a run would go on from.
    assert [path.name for path in sorted(folder.iterdir())] == [f"step-0000000{step}" for step in (3, 5, 6)]
    assert said(command.prune, tmp_path, keep_last=2)[1] == [f"{tmp_path}: nothing to delete"]
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        command.prune(tmp_path, keep_last=0)
    with pytest.raises(ConfigError, match="nothing to prune"):
        command.prune(tmp_path, keep_last=None)


def test_consolidate(tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    status, lines = said(command.consolidate, run(tmp_path), out)
    assert status == 0
    assert lines[0].startswith(f"{out}: ")
    digest = subprocess.run(["sha256sum", str(out)], capture_output=True, text=True, check=True).stdout.split()[0]
    assert lines[0].endswith(digest)
    with safe_open(out, "pt") as file:
        assert sorted(file.keys()) == ["a", "b"]
        assert torch.equal(file.get_tensor("a"), torch.arange(6.0).reshape(2, 3) + 4)
        assert file.get_tensor("b").dtype == torch.bfloat16
        assert json.loads(file.metadata()["config"])["model"] == {"width": 3}
        assert file.metadata()["step"] == "4"
    with pytest.raises(ConfigError, match="this file already exists"):
        command.consolidate(tmp_path, out)
    with pytest.raises(ConfigError, match=r"begins with 'weights\.'\. They begin with: model\., optimizer\."):
        command.consolidate(tmp_path, tmp_path / "x", only="weights.")
    typed = ["consolidate", str(tmp_path), str(tmp_path / "all"), "--only", ""]
    assert CliRunner().invoke(checkpoint_app, typed).exit_code == 0
    with safe_open(tmp_path / "all", "pt") as file:
        assert "model.a" in set(file.keys())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "checkpoints", "model.safetensors"]

"""Compiled code that is kept with a run: found again, and used only where this user's runs made it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.tiny import metrics
from xscale.mesh import torch_private
from xscale.train.compile_artifacts import FOLDER, CompileArtifacts

GIVEN: list[bytes] = []
"""Artifacts that torch was given to load."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A torch that has compiled one graph; what it makes says how many it has."""
    GIVEN.clear()
    stats = {"unique_graphs": 1}
    info = SimpleNamespace(artifacts={"inductor": ["a", "b"], "autotune": ["c"]})

    def load(content: bytes) -> Any:
        GIVEN.append(content)
        return info

    monkeypatch.setattr(torch_private, "dynamo_counters", {"stats": stats}, raising=False)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"made %d" % stats["unique_graphs"], info))
    return stats


def artifacts(folder: Path, home: str = "home", enabled: bool = True, **axes: int) -> CompileArtifacts:
    dense = SimpleNamespace(mesh_dim_names=[*axes], get_coordinate=lambda: [*axes.values()]) if axes else None
    mesh: Any = SimpleNamespace(dense=dense)
    (folder / "run").mkdir(exist_ok=True)
    return CompileArtifacts(folder / "run", mesh, enabled=enabled, settings=folder / home / "xscale")


def test_they_are_found_by_the_next_start(graphs: dict[str, int], tmp_path: Path) -> None:
    first = artifacts(tmp_path)
    assert first.load() == []
    first.save()
    assert artifacts(tmp_path).load() == ["loaded 3 compiled artifacts of earlier starts of the run"]
    assert GIVEN == [b"made 1"]
    assert os.stat(tmp_path / "home" / "xscale" / "compile.key").st_mode & 0o777 == 0o600


def test_they_are_written_again_where_there_is_more(graphs: dict[str, int], tmp_path: Path) -> None:
    kept = artifacts(tmp_path)
    kept.save()
    file = tmp_path / "run" / FOLDER / "pp0-tp0"
    file.unlink()
    kept.save()
    assert not file.exists()
    graphs["unique_graphs"] = 2
    kept.save()
    artifacts(tmp_path).load()
    assert GIVEN == [b"made 2"]


def of_another_user(folder: Path) -> CompileArtifacts:
    artifacts(folder, "other").save()
    return artifacts(folder)


def changed(folder: Path) -> CompileArtifacts:
    artifacts(folder).save()
    file = folder / "run" / FOLDER / "pp0-tp0"
    file.write_bytes(file.read_bytes()[:-1] + b"X")
    return artifacts(folder)


def cut(folder: Path) -> CompileArtifacts:
    artifacts(folder).save()
    os.truncate(folder / "run" / FOLDER / "pp0-tp0", 7)
    return artifacts(folder)


def without_a_key(folder: Path) -> CompileArtifacts:
    artifacts(folder).save()
    return artifacts(folder, "no home")


def behind_a_link(folder: Path) -> CompileArtifacts:
    artifacts(folder).save()
    file = folder / "run" / FOLDER / "pp0-tp0"
    file.rename(folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")
    return artifacts(folder)


@pytest.mark.parametrize("made", [of_another_user, changed, cut, without_a_key, behind_a_link])
def test_code_that_this_user_has_not_made_is_not_given_to_torch(
    made: Callable[[Path], CompileArtifacts], graphs: dict[str, int], tmp_path: Path
) -> None:
    (message,) = made(tmp_path).load()
    assert "is not used: " in message
    assert not GIVEN


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        ({"pp": 1, "dp_shard": 0, "tp": 3}, "pp1-tp3"),
        ({"pp": 0, "dp_replicate": 0, "dp_shard": 2, "tp": 0}, None),
        ({"pp": 0, "dp_shard": 0, "cp": 1, "tp": 0}, None),
    ],
)
def test_one_rank_of_those_that_compile_the_same_writes(
    axes: dict[str, int], name: str | None, graphs: dict[str, int], tmp_path: Path
) -> None:
    artifacts(tmp_path, **axes).save()
    folder = tmp_path / "run" / FOLDER
    assert ([path.name for path in folder.iterdir()] if folder.is_dir() else []) == ([name] if name else [])


def test_a_run_that_compiles_nothing_has_none(graphs: dict[str, int], tmp_path: Path) -> None:
    artifacts(tmp_path, enabled=False).save()
    assert not (tmp_path / "run" / FOLDER).exists()


RUN = """
import sys
from pathlib import Path
from torch._dynamo.utils import counters
from tests.train.test_recompilations import DENSE
from tests.train.tiny import recipe, run
model = {**DENSE, "stack": {**DENSE["stack"], "depth": 1}}
train = {"steps": 2, "stop_after": 1, "eval_every": 0}
run(recipe(Path(sys.argv[1]), model=model, parallel={"compile": True}, train=train))
print("graphs", counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"] > 0)
"""


@pytest.mark.nightly
def test_a_resumed_run_with_an_empty_cache_compiles_nothing(tmp_path: Path) -> None:
    said = []
    for start in range(2):
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache{start}"), "XDG_CONFIG_HOME": str(tmp_path)}
        ran = subprocess.run(
            [sys.executable, "-c", RUN, str(tmp_path)],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stdout)
    assert "graphs 2 False" in said[0]
    assert "graphs 0 True" in said[1]
    assert "loaded 3 compiled artifacts" in said[1]
    assert len(metrics(tmp_path)) == 2

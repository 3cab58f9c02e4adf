"""Ranks that do not share a folder are refused before the first step, in the same sentence on every rank."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import Pool
from tests.train.tiny import recipe, run
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.mesh import shared_folder
from xscale.mesh.environment import read_rank_info

KEYS = {
    "run.dir": ("run", "dir"),
    "data.folder": ("data", "folder"),
    "data.prepared": ("data", "prepared"),
}
CASES = ("none", *KEYS)
"""The folder that is on a disk of each node."""


def trained(folder: Path, own: str, name: str = "run") -> tuple[int | bool, str]:
    """Train in a folder of this node with one path that is relative to it.

    Return the status, or whether a refusal is the same on all ranks, with its sentence.
    """
    node, before = folder / f"node-{read_rank_info().rank}", Path.cwd()
    node.mkdir(exist_ok=True)
    sections: dict[str, Any] = {"train": {"steps": 1, "eval_every": 0}, "model": {"kind": "decoder", "width": 16}}
    if own in KEYS:
        section, key = KEYS[own]
        sections[section] = {**sections.get(section, {}), key: "own"}
    os.chdir(node)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_folder, "VISIBLE_SECONDS", 0.2)
            return run(recipe(folder, name, **sections)), ""
    except ConfigError as error:
        return error.same_on_all_ranks, str(error)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("own", CASES)
def test_a_folder_that_is_not_shared(own: str, tmp_path: Path, pool: Pool) -> None:
    if own == "data.prepared":
        # The data that a run prepared, on rank 0's node alone.
        assert pool.run(trained, 1, tmp_path, "data.folder", "first") == [(EXIT_DONE, "")]
        own_folder = tmp_path / "node-0" / "own"
        own_folder.rename(own_folder.with_name("data"))
        (prepared,) = own_folder.with_name("data").glob("text-*")
        prepared.rename(own_folder)
    outcomes = pool.run(trained, 2, tmp_path, own)
    if own == "none":
        assert outcomes == [(EXIT_DONE, "")] * 2
        assert not list((tmp_path / "run").glob(".shared-*"))
        return
    assert len(set(outcomes)) == 1
    is_same, said = outcomes[0]
    assert is_same is True
    assert said.startswith(f"{own}: rank 0 reads and writes the folder own"), said
    assert "and rank 1 of 2 cannot see what is in it. Give a folder on a file system that all nodes share" in said
    assert not list(tmp_path.glob("node-*/own/checkpoints"))

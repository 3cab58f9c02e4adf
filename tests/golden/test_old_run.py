"""A run folder of the version before the keys were renamed: it resumes bit for bit, and every tool reads it.

`old_run` was written by that version (its config.yaml has the old keys and kinds): four of eight steps in float64.
LOSSES and NORMS are what the same version computed for the other four without a stop.
"""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from xscale.core.config import encode
from xscale.core.key_words.renamed import RenamedWarning
from xscale.recipe import read

OLD = Path(__file__).parent / "old_run"
LOSSES = [5.694881616121942, 5.673361830118579, 5.650126111298586, 5.645021824958181]
NORMS = [0.7707377034512015, 0.7586528126883888, 0.8728777667020438, 0.8836865867248836]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the old run, as the working directory: its config names the corpus by a relative path."""
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def xscale(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xscale", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [pytest.param("config.yaml", marks=pytest.mark.long), "run/config.yaml"],
    ids=["the recipe", "the run's own config"],
)
def test_it_resumes_bit_for_bit(folder: Path, config: str) -> None:
    before = (folder / "run/metrics.jsonl").read_text(encoding="utf-8")
    done = xscale("train", config, "run.dir=run", "train.stop_after=null")
    assert done.returncode == 0, done.stdout + done.stderr
    # Resumed from step 4, not computed again from the start.
    assert (folder / "run/metrics.jsonl").read_text(encoding="utf-8").startswith(before)
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = {row["step"]: row for row in rows if "loss" in row}
    # The last bit of a sum depends on the processor; a wrong weight, state, sample or dropout mask is far from it.
    assert [steps[step]["loss"] for step in (5, 6, 7, 8)] == pytest.approx(LOSSES, rel=1e-12)
    assert [steps[step]["grad_norm"] for step in (5, 6, 7, 8)] == pytest.approx(NORMS, rel=1e-10)
    # The old names are read with a warning that says the new ones, and nothing is taken for a change.
    assert "train.clip is now called train.clip_grad_norm" in done.stderr
    assert "run.allow_changed: " not in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("eval", "run"),
        ("generate", "run", "--prompt", "the", "--tokens", "4"),
        ("checkpoint", "verify", "run"),
        ("checkpoint", "show", "run"),
    ],
    ids=" ".join,
)
def test_the_tools_read_it(folder: Path, words: tuple[str, ...]) -> None:
    done = xscale(*words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_old_keys_mean_the_new_ones(folder: Path) -> None:
    with pytest.warns(RenamedWarning):
        old, _ = read(folder / "config.yaml", [])
    block = encode(old)["model"]["stack"]["rules"]
    assert block[0]["mixer"]["core"]["kind"] == "entmax"
    assert block[0]["ffn"]["router"]["aux_loss_weight"] == 0.02
    assert encode(old)["train"]["clip_grad_norm"] == 0.5
    new = folder / "new.yaml"
    from xscale.core.compose import dump

    new.write_text(dump(encode(old)), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RenamedWarning)
        again, _ = read(new, [])
    assert again == old

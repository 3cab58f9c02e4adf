"""The wheel alone, in an empty folder: recipes, `init`, `explain`, completion, and a run."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.wheel import ROOT, build_wheel

SMALL = [
    "train.steps=3",
    "train.batch_size=2",
    "train.micro_batch_size=1",
    "train.eval_every=0",
    "train.sample.prompts=[]",
    "train.baseline=false",
    "schedule.warmup_steps=0",
    "data.sequence_length=64",
    "data.tokenizer.vocabulary=512",
    "data.source={kind: stdlib, tests: false}",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel and nothing else; built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    zipfile.ZipFile(build_wheel(folder)).extractall(folder / "site")
    return folder / "site"


def xscale(site: Path, folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """The installed program in `folder`; modules of xscale that come from elsewhere fail it."""
    code = (
        "import sys, atexit\n"
        "from xscale.cli.main import main\n"
        "def check():\n"
        "    files = [str(module.__file__) for name, module in sys.modules.items() if name.startswith('xscale')]\n"
        f"    strange = [file for file in files if not file.startswith({str(site)!r})]\n"
        "    print('strange modules:', strange, file=sys.stderr) if strange else None\n"
        "atexit.register(check)\n"
        "sys.argv[0] = 'xscale'\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert "strange modules" not in done.stderr, done.stderr
    return done


@pytest.mark.long
def test_the_wheel_has_every_config_and_the_schema(site: Path) -> None:
    configs = {file.relative_to(ROOT / "configs") for file in (ROOT / "configs").rglob("*.*") if file.is_file()}
    installed = site / "xscale/configs"
    assert {file.relative_to(installed) for file in installed.rglob("*.*") if file.is_file()} == configs
    assert not (site / "tests").exists()


@pytest.mark.long
def test_a_new_user_starts_in_an_empty_folder(site: Path, tmp_path: Path) -> None:
    written = xscale(site, tmp_path, "init")
    assert written.returncode == 0, written.stderr
    assert os.listdir(tmp_path) == ["quickstart.yaml"]
    text = (tmp_path / "quickstart.yaml").read_text(encoding="utf-8")
    assert f"$schema={(site / 'xscale/configs/recipe.schema.json').as_uri()}\n" in text
    (tmp_path / "quickstart.yaml").write_text(
        re.sub(r"depth: 4", "depth: 2", re.sub(r"(?m)^  width: 256", "  width: 32", text)), encoding="utf-8"
    )
    run = xscale(site, tmp_path, "train", "quickstart.yaml", *SMALL, "run.dir=mine")
    assert run.returncode == 0, run.stderr
    assert "done at step 3" in run.stdout
    assert (tmp_path / "mine/report.html").is_file()
    offered = xscale(site, tmp_path, COMP_WORDS="xscale report m", COMP_CWORD="2", _XSCALE_COMPLETE="complete_bash")
    assert offered.stdout == "mine\n"


@pytest.mark.nightly
def test_the_quickstart_runs_by_its_name_alone(site: Path, tmp_path: Path) -> None:
    run = xscale(site, tmp_path, "train", "quickstart", "model.width=32", "model.stack.depth=2", *SMALL)
    assert run.returncode == 0, run.stderr
    assert "done at step 3" in run.stdout
    assert (tmp_path / "runs/quickstart/checkpoints").is_dir()


@pytest.mark.long
def test_recipes_and_keys_are_known_to_the_wheel(site: Path, tmp_path: Path) -> None:
    assert "  quickstart: A Switch-style mixture" in xscale(site, tmp_path, "list", "recipes").stdout
    assert xscale(site, tmp_path, "explain", "optimizer.lr").stdout.startswith("optimizer.lr: float >= 0\n")
    refused = xscale(site, tmp_path, "explain", "optimizer.lrr")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("xscale: optimizer.lrr: there is no such config key. Did you mean optimizer.lr")
    dry = xscale(site, tmp_path, "launch", "local", "--processes", "1", "nothing")
    assert dry.returncode == 2
    assert os.listdir(tmp_path) == []

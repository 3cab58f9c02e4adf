"""`xscale ladder`: the runs that a file lists, what is trained again, the fit of their losses, and what is refused."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from tests.train.tiny import ROOT, recipe
from xscale.bench.ladder import LadderRun, fit_ladder, read_ladder, table
from xscale.bench.ladder_page import page
from xscale.cli.main import app
from xscale.commands.study import train_runs
from xscale.commands.study.ladder import plan_runs
from xscale.commands.study.train_runs import check_unchanged
from xscale.core.config import encode
from xscale.core.errors import ConfigError, FaultError
from xscale.run.run_folder import write_config

SIZES = {f"w{width}": [f"model.width={width}"] for width in (16, 24, 32)}
PER_STEP = 8 * 32
DENSE = "model.stack.rules=[]"


def call(*words: object) -> str:
    result = CliRunner().invoke(app, ["ladder", *map(str, words)])
    if isinstance(result.exception, ConfigError | FaultError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def written(folder: Path, **changes: Any) -> Path:
    """A ladder of three sizes and two lengths on a tiny recipe."""
    base = encode(recipe(folder, train={"steps": 4, "eval_every": 0}))
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    data = {
        "run": "base.yaml",
        "dir": str(folder / "ladder"),
        "sizes": SIZES,
        "tokens": [2 * PER_STEP, 4 * PER_STEP],
        "resamples": 20,
    }
    file = folder / "ladder.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in {**data, **changes}.items() if value is not None}))
    return file


def test_the_runs_are_sizes_x_experts_x_tokens_x_seeds(tmp_path: Path) -> None:
    experts = {"dense": [DENSE], "mixture": []}
    ladder = read_ladder(written(tmp_path, experts=experts, seeds=[0, 1], overrides=["optimizer.lr=0.5"]))
    runs = [run for run, _ in plan_runs(ladder, ["train.micro_batch_size=4"])]
    assert len(runs) == 3 * 2 * 2 * 2
    assert len({run.name for run in runs}) == len(runs)
    assert [run.flops for run in runs] == sorted(run.flops for run in runs)
    by_name = {run.name: (run, named) for run, named in plan_runs(ladder, [])}
    run, named = by_name["w24-mixture-1024-seed-1"]
    assert named.recipe.train.steps == 4
    assert named.recipe.optimizer.lr == 0.5
    assert plan_runs(ladder, ["optimizer.lr=0.25"])[0][1].recipe.optimizer.lr == 0.25, "the command line wins"
    assert named.recipe.train.eval_every == 4, "one evaluation at the end, where the recipe has none"
    assert run.overrides == ("model.width=24", "train.steps=4", "train.eval_every=4", "run.seed=1")
    assert run.tokens == 4 * PER_STEP
    dense = by_name["w24-dense-1024-seed-1"][0]
    assert run.flops / dense.flops == pytest.approx(1.0, rel=0.2), "a Switch layer has the cost of one expert"
    # 6 N D without embeddings and attention, which a model this small does not neglect.
    assert 0.5 < dense.flops / (6 * dense.parameters * dense.tokens) < 1.5


def test_tokens_follow_the_active_parameters(tmp_path: Path) -> None:
    ladder = read_ladder(written(tmp_path, tokens=None, tokens_per_parameter=[0.5]))
    for run, _ in plan_runs(ladder, []):
        assert abs(run.tokens - 0.5 * run.parameters) <= PER_STEP / 2


def train_here(command: Sequence[str], *, stdout: IO[bytes], **_: Any) -> subprocess.CompletedProcess[bytes]:
    """Stand in for `subprocess.run`: the command's training without a process of its own, which imports for seconds.

    tests/commands/test_compare.py starts the processes.
    """
    python, minus_m, package, *words = command
    assert (python, minus_m, package, words[0]) == (sys.executable, "-m", "xscale", "train")
    result = CliRunner().invoke(app, words)
    stdout.write(result.output.encode())
    return subprocess.CompletedProcess(list(command), result.exit_code)


@pytest.mark.long
def test_it_trains_what_is_missing_and_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_runs, "subprocess", SimpleNamespace(run=train_here, STDOUT=subprocess.STDOUT))
    file = written(tmp_path, tokens=[2 * PER_STEP, 8 * PER_STEP, 24 * PER_STEP], experts={"dense": [DENSE]})
    data = yaml.safe_load(file.read_text())
    data["sizes"]["w48"] = ["model.width=48"]
    file.write_text(yaml.safe_dump({**data, "held_out": ["w48"]}))
    output = call(file)
    assert output.count("training in") == 12
    assert "within the interval" in output or "outside of the interval" in output
    result = json.loads((tmp_path / "ladder/ladder.json").read_text())["results"][0]
    assert len(result["runs"]) == 9
    assert len(result["predictions"]) == 3
    assert all(len(prediction["losses"]) == 1 for prediction in result["predictions"])
    assert (tmp_path / "ladder/ladder.html").read_text().count("<svg") == 1
    # Finished runs stay; one that is missing is trained, and without it the report says so.
    (tmp_path / "ladder/w48-dense-512-seed-0/metrics.jsonl").unlink()
    assert "w48, 512 tokens: predicted" in (text := call(file, "--no-train"))
    assert text.count("not run") == 1
    with pytest.raises(ConfigError, match=r"this run has another config.*Give the ladder another dir"):
        call(file, "optimizer.lr=3e-3")


def fake(size: str, parameters: float, tokens: float, experts: str = "dense", seed: int = 0) -> LadderRun:
    name = f"{size}-{experts}-{tokens:g}-{seed}"
    return LadderRun(name, size, experts, seed, (), int(parameters), int(tokens), 6 * parameters * tokens)


@pytest.mark.long
def test_a_prediction_is_held_against_the_run(tmp_path: Path) -> None:
    """With losses of a known law the larger size is within the interval; with another loss it is not."""
    sizes = {f"s{index}": 10.0 ** (6 + index / 2) for index in range(5)}
    file = written(
        tmp_path,
        sizes={name: [] for name in sizes},
        held_out=["s4"],
        tokens=[1],
        experts={"a": [], "b": []},
        resamples=60,
    )
    ladder = read_ladder(file)
    runs = [fake(size, n, r * n, experts) for size, n in sizes.items() for r in (5, 20, 80) for experts in ("a", "b")]

    generator = np.random.default_rng(0)

    def loss(run: LadderRun) -> float:
        noise = 1 + 0.001 * generator.standard_normal()
        return float((1.7 + 400 / run.parameters**0.34 + 410 / run.tokens**0.28) * noise)

    losses = {run.name: loss(run) * (1.2 if (run.size, run.experts) == ("s4", "b") else 1) for run in runs}
    good, bad = fit_ladder(ladder, runs, losses)
    # The interval is of 90 %.
    assert [prediction.holds for prediction in good.predictions].count(True) >= 2
    assert [prediction.holds for prediction in bad.predictions] == [False] * 3
    assert good.fit.named_constants()["alpha"].value == pytest.approx(0.34, abs=0.08)
    text = table([good, bad])
    assert "outside of the interval" in text
    assert "E + A / N^alpha + B / D^beta, 12 of 12 runs fitted" in text
    assert page([good, bad], "Ladder").count("<svg") == 2
    without = {name: value for name, value in losses.items() if not name.startswith("s4")}
    assert [prediction.holds for prediction in fit_ladder(ladder, runs, without)[0].predictions] == [None] * 3


def test_losses_that_determine_no_law_are_refused(tmp_path: Path) -> None:
    ladder = read_ladder(written(tmp_path, sizes={"s": [], "t": []}, tokens=[1]))
    runs = [fake("s", 1e6, tokens) for tokens in (1e6, 2e6)]
    with pytest.raises(ConfigError, match=r"sizes: no fit of dense: 5 constants need at least 6 runs.*Add sizes or"):
        fit_ladder(ladder, runs, {run.name: 2.0 for run in runs})
    with pytest.raises(ConfigError, match=r"sizes: the loss of s-dense-1e\+06-0 is not finite.*learning rate"):
        fit_ladder(ladder, runs, {run.name: math.nan for run in runs})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": None}, r"tokens: the length of the runs is missing"),
        ({"tokens_per_parameter": [20]}, r"tokens: give either tokens or tokens_per_parameter"),
        ({"held_out": ["w25"]}, r"held_out: there is no size 'w25'"),
        ({"held_out": list(SIZES)}, r"held_out: no size is left to fit"),
        ({"tokens": [512, 512]}, r"tokens: a value is repeated"),
        ({"sizes": {"a b": [], "a,b": []}}, r"sizes: two of these names give the same folder"),
        ({"laws": "compute"}, r"laws: unknown key"),
        ({"tokens": [100]}, r"tokens: 100 tokens are less than one step of w16, which reads 256"),
        ({"sizes": {"w16": ["model.wdith=16"]}}, r"w16, dense: model\.wdith .*unknown key"),
        ({"sizes": {"w18": ["model.width=18"]}}, r"w18, dense: model\.stack\.block\.mixer\.heads"),
    ],
)
def test_a_ladder_that_is_wrong_is_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        call(written(tmp_path, **changes), "--no-train")


def test_a_slurm_array_gets_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The members are those that would be trained here, in the same folders."""
    calls: list[list[str]] = []
    monkeypatch.setattr("xscale_launch.main.main", lambda argv: calls.append(list(argv)) or 0)
    call(written(tmp_path), "train.micro_batch_size=4", "--slurm", "--cluster big --at-once 2")
    (argv,) = calls
    assert argv[:3] == ["slurm", str(tmp_path / "base.yaml"), "train.micro_batch_size=4"]
    assert argv[3] == f"run.dir={json.dumps(str(tmp_path / 'ladder'))}"
    assert argv[4:] == ["--members", str(tmp_path / "ladder/members.json"), "--cluster", "big", "--at-once", "2"]
    members = json.loads((tmp_path / "ladder/members.json").read_text())
    assert len(members) == 6
    assert members["w16-dense-512-seed-0"] == ["model.width=16", "train.steps=2", "train.eval_every=2", "run.seed=0"]


@pytest.mark.parametrize("file", sorted((ROOT / "configs/ladder").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_ladders_that_come_with_it_can_be_run(file: Path) -> None:
    ladder = read_ladder(file)
    assert len(plan_runs(ladder, [])) == len(ladder.sizes) * len(ladder.experts) * 3


def test_a_run_with_another_learning_rate_is_refused(tmp_path: Path) -> None:
    """A run may resume with it, and its loss is then none of this ladder."""
    file = written(tmp_path)
    run, named = plan_runs(read_ladder(file), [])[0]
    section = named.recipe.run.model_copy(update={"dir": str(named.folder), "seed": run.seed})
    named.folder.mkdir(parents=True)
    write_config(named.recipe.model_copy(update={"run": section}), named.folder)
    check_unchanged(named, "")
    with pytest.raises(
        ConfigError, match=r"another config: optimizer\.lr was 0\.001 and is now 0\.003\. Give the ladder"
    ):
        call(file, "--no-train", "optimizer.lr=3e-3")

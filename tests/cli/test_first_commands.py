"""The commands that hands type first, and what each says: the word that is asked for, in a sentence or a result."""

import re
import sys
from pathlib import Path

import pytest

from xscale.cli.main import main

SAID: dict[str, tuple[int, str]] = {
    "": (2, r"Usage: .*COMMAND.*train.*plan.*launch"),
    "--help": (0, r"Usage: .*COMMAND.*train.*plan.*launch"),
    "--version": (0, r"^\d+\.\d+\.\d+$"),
    "help": (2, r"help: `.*xscale` has no such command\. Here it is `xscale --help`"),
    "list": (0, r"^model: .*\n  decoder "),
    "list recipes": (0, r"`xscale train NAME` trains one.*\n  bytes: "),
    "train": (2, r"Missing argument 'config'"),
    "train llama": (2, r"The recipe 'dense_7b' has LLaMA 2's 7B shape"),
    "train quickstrat": (2, r"Did you mean 'quickstart'\?"),
    "train missing.yaml": (2, r"there is no such file\. .*`xscale list recipes`"),
    "train quickstart 20": (2, r"an override is written key=value\. For example train\.steps=20"),
    "train quickstart --steps 10": (2, r"Settings are given as key=value: train\.steps=VALUE"),
    "train quickstart batch_size=8": (2, r"Did you mean 'train\.batch_size'\?"),
    "train quickstart learning_rate=1": (2, r"Did you mean 'optimizer\.lr'\?"),
    "train quickstart capacity_factor=2": (
        2,
        r"Did you mean 'moe\.capacity_factor' or 'expert_choice\.",
    ),
    "train quickstart num_experts=2": (2, r"Did you mean 'moe\.experts'\?"),
    "train quickstart model.depth=2": (2, r"Did you mean 'model\.stack\.depth'"),
    "train quickstart train.steps=ten": (2, r"train\.steps"),
    "plan quickstart": (0, r"8,919,296 parameters"),
    "plan quickstart --check train.steps=20": (0, r"is shortened: schedule\.warmup_steps=2"),
    "plan quickstart --memory 1": (3, r"DOES NOT FIT"),
    "explain learning_rate": (2, r"Did you mean optimizer\.lr\?"),
    "explain optimizer.lr quickstart": (0, r"optimizer\.lr: float"),
    "explain moe.capacity_factor quickstart": (0, r"capacity_factor: float.*moe\.capacity_factor="),
    "explain moe.experts=4": (0, r"^model\.stack\.block\.ffn\.experts: int"),
    "explain model.stack.rules[0].ffn.router quickstart": (
        0,
        r"in quickstart:\n  'model\.stack\.rules\[0\]\.ffn\.router",
    ),
    "explain optimizer.": (0, r"^optimizer: part of the family optimizer"),
    "explain quickstart": (2, r"It is a recipe: `xscale explain KEY quickstart`"),
    "explain unfinished": (2, r"`xscale explain` lists the sections"),
    "list quickstart": (2, r"It is a recipe: `xscale explain KEY quickstart`"),
    "train quickstart data.path=x.txt": (2, r"Write 'data\.source=\{kind: text, paths: \[FILES\]\}'"),
    "train mine.yaml": (2, r"The folder \. has no YAML file"),
    "explain nothing_such": (2, r"`xscale explain` lists the sections"),
    "init": (0, r"wrote quickstart\.yaml.*xscale plan quickstart\.yaml"),
    "plot pattern quickstart": (0, r"% of the causal blocks"),
    "generate": (2, r"Missing argument 'run'"),
    "generate runs/none hello": (2, r"runs/none: the folder contains no run"),
    "eval quickstart": (2, r"quickstart: the folder contains no run"),
    "report runs/none": (2, r"runs/none: there is no such folder"),
    "checkpoint ls runs/none": (2, r"runs/none: there is no such folder\. Give a run\.dir"),
    "launch": (2, r"usage: xscale launch VERB.*local.*slurm.*status"),
    "launch fly": (2, r"unknown verb 'fly'; choose from local, slurm"),
    "launch local": (2, r"the following arguments are required: CONFIG"),
    "launch local quickstart --dry-run": (0, r"-m xscale train .*quickstart\.yaml"),
    "launch status runs/none": (2, r"run folder .*runs/none does not exist"),
}
"""Words that are typed after `xscale` -> the exit status, and a pattern of what both streams say."""
LONG = {"plan quickstart", "plan quickstart --memory 1"}
CASES = [
    pytest.param(typed, expected, id=typed or "nothing", marks=[pytest.mark.long] if typed in LONG else [])
    for typed, expected in SAID.items()
]


@pytest.mark.parametrize(("typed", "expected"), CASES)
def test_a_first_command_says_what_helps(
    typed: str,
    expected: tuple[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["xscale", *typed.split()])
    with pytest.raises(SystemExit) as done:
        main()
    status, pattern = expected
    streams = capsys.readouterr()
    both = streams.out + streams.err
    assert (done.value.code or 0) == status, both
    assert re.search(pattern, both, re.DOTALL | re.MULTILINE), both
    assert "warning" not in streams.err

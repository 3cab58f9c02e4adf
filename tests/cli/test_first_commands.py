"""The commands that hands type first, and what each says: the word that is asked for, in a sentence or a result."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from xscale.cli.main import app, main
from xscale.cli.terminal.usage import EXAMPLES

SAID: dict[str, tuple[int, str]] = {
    "": (2, r"Usage: .*COMMAND.*train.*plan.*launch"),
    "--help": (0, r"Usage: .*COMMAND.*train.*plan.*launch"),
    "--version": (0, r"^\d+\.\d+\.\d+$"),
    "help": (2, r"help: `.*xscale` has no such command\. Here it is `xscale --help`"),
    "list": (0, r"^model: .*\n  decoder "),
    "list recipes": (0, r"`xscale train NAME` trains one.*\n  bytes: "),
    "train": (2, r"^xscale: Missing argument 'config' of `xscale train`\. For example `xscale train quickstart`\.$"),
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
    "generate": (2, r"Missing argument 'run' .* For example `xscale generate runs/quickstart \"def main\(\"`"),
    "generate runs/none hello": (2, r"runs/none: the folder contains no run"),
    "eval quickstart": (2, r"quickstart: the folder contains no run"),
    "report runs/none": (2, r"runs/none: there is no such folder"),
    "checkpoint ls runs/none": (2, r"runs/none: there is no such folder\. Give a run\.dir"),
    "launch": (2, r"usage: xscale launch VERB.*local.*slurm.*status"),
    "launch fly": (2, r"unknown verb 'fly'; choose from local, slurm"),
    "launch local": (2, r"missing argument CONFIG .* for example `xscale launch local quickstart --processes 2`"),
    "launch local quickstart --dry-run": (0, r"-m xscale train .*quickstart\.yaml"),
    "launch status runs/none": (2, r"run folder .*runs/none does not exist"),
    "-v": (2, r"^xscale: -v: `xscale` has no such option\. `xscale --version` prints the version\.$"),
    "version": (2, r"Here it is `xscale --version`"),
    "show quickstart": (2, r"Here it is `xscale train CONFIG --print-config`"),
    "params quickstart": (2, r"Here it is `xscale plan CONFIG`"),
    "watch runs/bytes": (2, r"Here it is `xscale report RUN`"),
    "stop runs/bytes": (2, r"Here it is `xscale launch cancel RUN, or Ctrl-C`"),
    "train help": (2, r"`xscale COMMAND --help` its options"),
    "train QUICKSTART": (2, r"Did you mean 'quickstart'\?"),
    "train quick": (2, r"Did you mean 'quickstart'\?"),
    "train notes.txt": (2, r"'data\.source=\{kind: text, paths: \[notes\.txt\]\}' is text"),
    "train --list": (2, r"`xscale list recipes` shows the recipes"),
    "train quickstart --dry-run": (2, r"`xscale plan CONFIG --check` finds mistakes"),
    "train quickstart --data x.txt": (2, r"Write 'data\.source=\{kind: text, paths: \[FILES\]\}'"),
    "train quickstart data=x.txt": (2, r"Write 'data\.source=\{kind: text, paths: \[FILES\]\}'"),
    "train quickstart precision=fp16": (2, r"Write precision\.compute=float16\."),
    "train quickstart run.device=gpu": (2, r"Did you mean 'cuda'\?"),
    "train quickstart train.steps 20": (2, r"^xscale: train\.steps 20: .* Write it as one word: train\.steps=20\.$"),
    "train quickstart train.steps = 20": (2, r"^xscale: train\.steps = 20: .* as one word: train\.steps=20\.$"),
    "train quickstart train.steps: 20": (2, r"^xscale: train\.steps: 20: .* as one word: train\.steps=20\.$"),
    "train quickstart train.steps==20": (2, r"Write one `=`"),
    "train quickstart train.steps=1e3": (2, r"Write it in digits: 1000\."),
    "train quickstart train.steps=2k": (2, r"Write it in digits: 2000\."),
    "train quickstart train.steps=": (2, r"Give a value, or leave the key out"),
    "train quickstart train/steps=20": (2, r"a key is written with dots\. Write train\.steps=20\."),
    "train quickstart +train.steps=20": (2, r"a key is written with dots\. Write train\.steps=20\."),
    "list llama": (2, r"The recipe 'dense_7b' has LLaMA 2's 7B shape"),
    "list datasets": (2, r"Sources of text are `xscale list source`"),
    "list train.steps": (2, r"It is a config key: `xscale explain train\.steps`"),
    "explain mixtral": (2, r"The recipe 'mixtral_8x7b' has the shape"),
    "init bytes my.yaml": (2, r"takes no further argument, got my\.yaml\. Did you mean --out my\.yaml\?"),
    "eval bytes": (2, r"bytes: the folder contains no run .*\. Did you mean runs/bytes\?"),
    "eval runs": (2, r"runs: the folder contains no run .*\. Its runs are runs/bytes\."),
    "eval runs/bytes/checkpoints": (2, r"contains no run .*\. Did you mean runs/bytes\?"),
    "eval runs/bytes x.txt": (2, r"Did you mean --data x\.txt\?"),
    "report bytes": (2, r"bytes: there is no such folder\. Did you mean runs/bytes\?"),
    "generate runs/bytes -n 5": (2, r"^xscale: -n: .* Did you mean --tokens\?$"),
    "generate runs/bytes --temp 0": (2, r"^xscale: --temp: .* Did you mean --temperature\?$"),
    "generate runs/bytes --tokens -1": (2, r"^xscale: Invalid value for '--tokens'.* greater than or equal to 0"),
    "checkpoint ls bytes": (2, r"bytes: there is no such folder\. Did you mean runs/bytes\?"),
    "checkpoint runs/bytes": (2, r"Did you mean `xscale checkpoint ls runs/bytes`\?"),
    "checkpoint delete runs/bytes": (2, r"Here it is `xscale checkpoint prune RUN --keep-last N`"),
    "bench quickstart": (2, r"Did you mean `xscale bench train quickstart`\?"),
    "bench kernels": (2, r"Here it is `xscale bench ops`"),
    "plot quickstart": (2, r"Did you mean `xscale plot pattern quickstart`\?"),
    "launch quickstart": (2, r"it is a config: `xscale launch local quickstart`"),
    "launch stop runs/bytes": (2, r"unknown verb 'stop'; did you mean cancel\?"),
    "launch status bytes": (2, r"run folder .*/bytes does not exist; did you mean .*/runs/bytes\?"),
    "launch local bytes --gpus 2": (2, r"has no option --gpus; did you mean --processes 2\?"),
    "launch slurm": (2, r"missing argument CONFIG .* `xscale launch slurm quickstart --nodes 2`"),
    "doctor --disc 3": (2, r"has no option --disc; did you mean --disk 3\?"),
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
    (tmp_path / "runs/bytes/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/bytes/config.yaml").write_text("{}\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["xscale", *typed.split()])
    with pytest.raises(SystemExit) as done:
        main()
    status, pattern = expected
    streams = capsys.readouterr()
    both = streams.out + streams.err
    assert (done.value.code or 0) == status, both
    assert re.search(pattern, both, re.DOTALL | re.MULTILINE), both
    assert "warning" not in streams.err


def arguments(command: Any, name: str = "xscale") -> Iterator[str]:
    """The commands below that need an argument, by their words."""
    for word, inner in command.commands.items():
        if hasattr(inner, "commands"):
            yield from arguments(inner, f"{name} {word}")
        elif any(parameter.required for parameter in inner.params):
            yield f"{name} {word}"


def test_each_command_that_needs_an_argument_has_an_example_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    root = typer.main.get_command(app)
    assert set(EXAMPLES) == set(arguments(root))
    for command, words in EXAMPLES.items():
        inner: Any = root
        for word in command.split()[1:]:
            inner = inner.commands[word]
        inner.make_context(command, shlex.split(words))

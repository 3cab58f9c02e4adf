"""Shell completion: recipes, overrides, config keys and runs; in bash as a user has it, and without torch."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xscale.cli.main import app, main
from xscale.cli.terminal.complete import (
    complete_key,
    complete_override,
    complete_part_or_recipe,
    complete_recipe,
    complete_run,
)
from xscale.optim.optimizer.optimizer import OPTIMIZERS
from xscale_launch.main import verbs

ROOT = Path(__file__).parents[2]


def words(candidates: list[tuple[str, str]]) -> list[str]:
    return [word for word, _ in candidates]


def overrides(incomplete: str, *earlier: str, config: str = "quickstart") -> list[str]:
    """Candidates for the last word of `xscale train CONFIG EARLIER INCOMPLETE`."""
    context: Any = SimpleNamespace(params={"config": config, "overrides": list(earlier)})
    return words(complete_override(context, incomplete))


def test_recipes_variants_and_files_here_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quick.yaml").touch()
    assert words(complete_recipe("qui")) == ["quick.yaml", "quickstart"]
    assert "bigbird" in words(complete_recipe("big"))
    assert words(complete_recipe("configs/")) == [], "the shell completes paths"
    assert words(complete_part_or_recipe("rec")) == ["recipes"]
    assert {"moba", "moe", "model"} <= set(words(complete_part_or_recipe("mo")))


def test_an_override_is_completed_level_by_level() -> None:
    assert overrides("trai") == overrides("train."), "the only section is entered at once"
    assert {"train.steps=", "train.spike."} <= set(overrides("train."))
    assert overrides("model.sta")[:3] == ["model.stack.depth=", "model.stack.block.", "model.stack.rules="]
    assert overrides("optim") == ["optimizer=", "optimizer."]
    assert overrides("optimizer.l") == ["optimizer.lr=", "optimizer.lr=0.001"], "two, so that no space is added"
    assert overrides("run.device=") == ["run.device=auto", "run.device=cpu", "run.device=cuda"]
    assert overrides("optimizer.kind=l") == ["optimizer.kind=lion"]
    assert overrides("train.baseline=") == ["train.baseline=true", "train.baseline=false"]
    assert overrides("train.xyz") == overrides("xyz.") == overrides("train.steps.") == []


def test_the_keys_are_those_of_the_kinds_that_are_chosen() -> None:
    core = "model.stack.block.mixer.core"
    softmax = [f"{core}.sinks=", f"{core}.soft_cap=", f"{core}.implementation=", f"{core}.kind="]
    assert overrides(f"{core}.") == softmax, "the default"
    assert f"{core}.pattern=" in overrides(f"{core}.", f"{core}=block_sparse")
    assert f"{core}.pattern=" in overrides(f"{core}.", f"{core}={{kind: block_sparse}}")
    assert "model.encoder.depth=" in overrides("model.encoder", config="t5_span")
    assert overrides("model.encoder", config="quickstart") == [], "a decoder has none"
    assert overrides("optimizer.", config="nowhere.yaml"), "an unreadable config has the defaults"
    assert overrides("optimizer.", "data.source=[", config="quickstart"), "so has one with an override that is none"


def test_entries_of_lists_and_parts_by_what_they_are_are_offered() -> None:
    assert overrides("model.stack.ru") == ["model.stack.rules=", "model.stack.rules[0]."]
    assert "model.stack.rules[0].every=" in overrides("model.stack.rules["), "the only entry is entered at once"
    assert overrides("model.stack.rules[0].ffn.cap")[0] == "model.stack.rules[0].ffn.capacity_factor="
    assert overrides("model.stack.rules[0].ffn.router.kind=sw") == ["model.stack.rules[0].ffn.router.kind=switch"]
    assert {"model.", "moe."} <= set(overrides("mo"))
    assert overrides("moe.router") == ["moe.router=", "moe.router."]
    assert overrides("moe.router.kind=s") == ["moe.router.kind=sinkhorn", "moe.router.kind=switch"]
    assert overrides("moe.drop_policy=") == [
        f"moe.drop_policy={name}" for name in ("position", "choice", "probability", "priority")
    ]
    two = "model.stack.rules=[{every: 2}, {every: 3}]"
    assert "model.stack.rules[*]." in overrides("model.stack.ru", two)


def test_bash_splits_words_at_the_equals_sign() -> None:
    assert overrides("", "optimizer.kind") == OPTIMIZERS.names()
    assert overrides("l", "optimizer.kind", "=") == ["lion"]
    assert "run." in overrides("", "train.steps=3"), "the next word"


def test_config_keys_are_offered_to_explain() -> None:
    assert {"model", "model."} <= set(words(complete_key("mod")))
    assert words(complete_key("optimizer.w")) == ["optimizer.weight_decay"]


def test_runs_are_found_below_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("runs/first", "runs/xformer/bigbird", "else/second"):
        Path(run, "checkpoints").mkdir(parents=True)
        Path(run, "config.yaml").touch()
    Path("runs/none/checkpoints").mkdir(parents=True)
    Path(".hidden/runs").mkdir(parents=True)
    assert words(complete_run("")) == ["else/second", "runs/first", "runs/xformer/bigbird"]
    assert words(complete_run("runs/f")) == ["runs/first"]
    assert words(complete_run(f"{tmp_path}/runs/f")) == [f"{tmp_path}/runs/first"]
    assert words(complete_run("runs/first/checkpoints/")) == words(complete_run("nowhere/")) == []


def environment(**variables: str) -> dict[str, str]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": paths, "PATH": tools, **variables}


IN_LAUNCH: dict[str, tuple[str, list[str]]] = {
    "a verb": ("launch l", ["local", "logs"]),
    "a recipe": ("launch local quick", ["quickstart"]),
    "a recipe after an option with a value": ("launch local --processes 2 quick", ["quickstart"]),
    "a recipe after a flag": ("launch slurm --dry-run quick", ["quickstart"]),
    "an override": ("launch local quickstart optimizer.l", ["optimizer.lr=", "optimizer.lr=0.001"]),
    "an override after a setting of the list": (
        "launch slurm quickstart --sweep moe.experts = 4,8 optimizer.l",
        ["optimizer.lr=", "optimizer.lr=0.001"],
    ),
    "a value that bash splits": ("launch mpi --processes = 2 quickstart optimizer.kind = l", ["lion"]),
    "an option": ("launch local --pro", ["--processes"]),
    "an option after the recipe": ("launch slurm quickstart --dry", ["--dry-run"]),
    "an option's path is the shell's": ("launch slurm --clusters qui", []),
    "a run": ("launch status runs/f", ["runs/first"]),
    "one run only": ("launch status runs/first runs/f", []),
    "a value of an option that bash splits": ("launch mpi --work = pre", ["prepare"]),
    "no such verb": ("launch fly qui", []),
    "the options of doctor": ("doctor --fol", ["--folder"]),
}
OPTIONS: dict[str, tuple[str, list[str]]] = {
    "a value": ("plan quickstart --device h", ["h100", "h200"]),
    "a value behind =": ("plan quickstart --device=h", ["h100", "h200"]),
    "a value that bash splits": ("plan quickstart --device = h", ["h100", "h200"]),
    "no letter of it yet": ("generate runs/first --penalty-form =", ["wu", "power"]),
    "a choice that bash splits": ("generate runs/first --penalty-form = w", ["wu"]),
    "a format": ("checkpoint export runs/first exported --to = d", ["deepspeed-universal"]),
    "two options that bash splits": ("plan quickstart --world = 2 --device = a", ["a100"]),
    "an override behind one": ("plan quickstart --device = cpu optimizer.l", ["optimizer.lr=", "optimizer.lr=0.001"]),
    "an override's value behind one": ("plan quickstart --device = cpu optimizer.kind = l", ["lion"]),
}


def offered(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what bash is offered for the last word of `xscale LINE`."""
    monkeypatch.setenv("COMP_WORDS", f"xscale {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" "))))
    monkeypatch.setenv("_XSCALE_COMPLETE", "complete_bash")
    monkeypatch.setattr(sys, "argv", ["xscale"])
    with pytest.raises(SystemExit) as done:
        main(partial(app, prog_name="xscale"))
    both = capsys.readouterr()
    assert (done.value.code, both.err) == (0, "")
    return both.out.split()


JOINED: dict[str, tuple[str, list[str]]] = {
    "a value": ("plan quickstart --device=h1", ["--device=h100"]),
    "no letter of it yet": ("generate runs/first --penalty-form=", ["--penalty-form=wu", "--penalty-form=power"]),
    "of the launcher": ("launch mpi --work=p", ["--work=prepare"]),
    "a path": ("init quickstart --out=x", []),
    "an override": ("plan quickstart optimizer.kind=l", ["optimizer.kind=lion"]),
    "an entry of a list": (
        "train quickstart 'model.stack.rules[0].ev",
        ["model.stack.rules[0].every=", "model.stack.rules[0].every=1"],
    ),
    "a verb of a group": ("checkpoint ver", ["verify"]),
    "a verb of the launcher": ("launch lo", ["local", "logs"]),
}
"""Words that zsh and fish do not split at `=` -> what stands for the whole word."""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.parametrize(("line", "expected"), JOINED.values(), ids=JOINED)
def test_other_shells_are_offered_whole_words(
    line: str, expected: list[str], shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"xscale {line}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_XSCALE_COMPLETE", f"complete_{shell}")
    monkeypatch.setattr(sys, "argv", ["xscale"])
    with pytest.raises(SystemExit) as done:
        main(partial(app, prog_name="xscale"))
    both = capsys.readouterr()
    assert (done.value.code, both.err) == (0, "")
    if shell == "fish":
        words = [line.partition("\t")[0] for line in both.out.splitlines() if line]
    else:
        # In zsh `compset` takes the option off the word that candidates are compared with.
        taken_off, _, offers = both.out.rpartition("; ")
        option = f"{line.rpartition(' ')[2].partition('=')[0]}=" if taken_off == "compset -P '*='" else ""
        assert offers.startswith("_arguments '*: :((" if expected else "_files")
        words = [f"{option}{word}" for word in re.findall(r'[("\n]"?"([^":]+)"', offers)]
    assert words == expected


@pytest.mark.parametrize(("line", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_values_of_options_are_completed(
    line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offered(line, monkeypatch, capsys) == expected


@pytest.mark.parametrize(("line", "expected"), IN_LAUNCH.values(), ids=IN_LAUNCH)
def test_words_of_the_launcher_are_completed(
    line: str,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "runs/first/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/first/config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert offered(line, monkeypatch, capsys) == expected


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_offers_its_options_and_its_argument(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quick/checkpoints").mkdir(parents=True)
    (tmp_path / "quick/config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert verb in offered(f"launch {verb[:2]}", monkeypatch, capsys)
    assert "--help" in offered(f"launch {verb} -", monkeypatch, capsys)
    assert offered(f"launch {verb} quick", monkeypatch, capsys) in (["quickstart"], ["quick"])


def test_completion_imports_no_torch() -> None:
    program = """
import sys
sys.argv = ["xscale"]
from xscale.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""
    variables = {
        "COMP_WORDS": "xscale train quickstart optimizer.l",
        "COMP_CWORD": "3",
        "_XSCALE_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(**variables), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["optimizer.lr=", "optimizer.lr=0.001"], "")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_installs_the_completion_and_uses_it(tmp_path: Path) -> None:
    start = 'import sys; sys.argv[0] = "xscale"; from xscale.cli.main import main; main()'
    (tmp_path / "xscale").write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{start}' \"$@\"\n", encoding="utf-8")
    (tmp_path / "xscale").chmod(0o755)
    script = """
xscale --install-completion
source ~/.bashrc
COMP_WORDS=(xscale train quickstart optimizer.kind = l) COMP_CWORD=5
_xscale_completion xscale
echo "offered: ${COMPREPLY[*]}"
"""
    variables = environment(HOME=str(tmp_path))
    variables["PATH"] = f"{tmp_path}{os.pathsep}{variables['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
    )
    assert "bash completion installed in" in done.stdout, done.stderr
    assert "offered: lion" in done.stdout, done.stderr


@pytest.mark.parametrize("option", ["--install-completion", "--show-completion"])
def test_a_shell_without_completion_is_refused(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["xscale", option])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("ash", "/bin/ash"))
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert f"{option}: this shell (ash) has no completion. Start it in one of bash, zsh" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []

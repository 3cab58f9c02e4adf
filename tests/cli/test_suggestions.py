"""Advice of a command for a word that it does not know: the key, the recipe or the part that was meant, or none."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from xscale.cli.main import app, main
from xscale.commands.show.recipes import FAMOUS, config_file, run_recipes
from xscale.core.errors import ConfigError

TYPED = {
    "an option of other trainers": (
        "train quickstart --steps 10",
        "Settings are given as key=value: train.steps=VALUE.",
    ),
    "one with its value": ("train quickstart --lr=0.1", "key=value: optimizer.lr=0.1."),
    "one by its name elsewhere": ("plan quickstart --learning-rate 3", "key=value: optimizer.lr=VALUE."),
    "a misspelt option": ("train quickstart --print-confg", "Did you mean --print-config?"),
    "a number of a benchmark": ("bench train quickstart --max-steps 3", "Did you mean --steps?"),
    "an unknown option": ("plan quickstart --zzz", "Settings are given as key=value: train.steps=VALUE."),
    "a famous model": ("train llama", "The recipe 'dense_7b' has LLaMA 2's 7B shape."),
    "one of its sizes": ("train Llama-3-8B", "The recipe 'dense_7b' has"),
    "a famous mixture": ("train mixtral", "The recipe 'mixtral_8x7b' has"),
    "a misspelt recipe": ("train quickstrat", "Did you mean 'quickstart'?"),
    "no recipe": ("train qqq", "`xscale list recipes` and `xscale list xformers` show them."),
    "a key of another source": (
        "train quickstart data.source.paths=x.txt",
        "unknown key for source 'stdlib'. It is a key of jsonl, labelled, pairs, parquet, text: choose one, as by "
        "data.source.kind=jsonl.",
    ),
    "a file of texts": (
        "train quickstart data.path=x.txt",
        "data.path (command line): unknown key. Write 'data.source={kind: text, paths: [FILES]}'",
    ),
    "a file of the source": ("train quickstart data.source.path=x.txt", "unknown key. Write 'data.source={kind: text"),
    "files": ("train quickstart data.files=[x.txt]", "unknown key. Write 'data.source={kind: text, paths: [FILES]}'"),
    "paths of the data": ("train quickstart data.paths=[x.txt]", "Write 'data.source={kind: text, paths: [FILES]}'"),
    "a file alone": ("train quickstart path=x.txt", "Write 'data.source={kind: text, paths: [FILES]}'"),
    "a path elsewhere": ("train quickstart data.tokenizer.path=x.model", "Did you mean 'data.tokenizer.file'?"),
    "a file that is none": ("train mine.yaml", "The folder . has no YAML file."),
    "a key of another ffn": ("train quickstart model.stack.block.ffn.experts=4", "It is a key of moe: choose one"),
    "the config as an option": (
        "train --config quickstart",
        "The config is no option: `xscale train CONFIG",
    ),
    "a way of resuming": ("train quickstart --resume", "The same command resumes its run"),
    "a number of GPUs": ("train quickstart --gpus 2", "`xscale launch local --processes N CONFIG` starts N processes."),
    "experts of others": ("train quickstart --num-experts 8", "key=value: moe.experts=VALUE."),
    "a misspelt command": ("trian quickstart", "`xscale` has no such command. Did you mean train?"),
    "a command of others": ("evaluate runs/x", "Did you mean eval?"),
    "one that is a verb of launch": ("torchrun quickstart", "Here it is `xscale launch local|slurm|mpi CONFIG`."),
    "a command of checkpoints": ("export runs/x", "Here it is `xscale checkpoint export RUN FOLDER --to hf`."),
    "resume as a command": ("resume runs/x", "Here it is the command that started the run, which resumes it"),
    "sampling": ("sample runs/x", 'Here it is `xscale generate RUN "text"`.'),
    "no command": ("zzz", "Commands: "),
    "a misspelt command of a group": ("data prep quickstart", "Did you mean prepare?"),
    "an unknown command of a group": ("checkpoint zzz runs/x", "Commands: "),
    "a misspelt operator": ("bench zzz", "xscale bench` has no such command. Commands: "),
    "BERT": ("train bert-base", "The recipe 'bert_masked' is"),
    "T5": ("train t5-large", "The recipe 't5_span' is"),
    "Qwen": ("train qwen", "The recipe 'dense_7b' has LLaMA 2's 7B shape"),
    "nanoGPT": ("train nanoGPT", "The recipe 'small' is"),
    "a path without its folder": ("train configs/quickstart.yaml", "Did you mean 'quickstart' (without .yaml)?"),
    "list a recipe": ("list bytes", "It is a recipe: `xscale explain KEY bytes` says"),
    "list what is none": ("list finished", "no family, part or variant. Families: model"),
    "explain a recipe": ("explain bytes", "It is a recipe: `xscale explain KEY bytes` says where it has a key"),
    "explain an option's word": ("explain data.path", "Write 'data.source={kind: text, paths: [FILES]}'"),
    "explain what is no key": ("explain unfinished", "`xscale explain` lists the sections of a config."),
    "explain the beginning of a key": ("explain warmup", "Did you mean schedule.warmup_steps?"),
    "explain a word of others": ("explain fsdp", "Write parallel.zero.stage=3."),
    "a misspelt key of a part": ("train small model.stack.block.ffn.hiden=4", "Did you mean 'hidden'?"),
}


@pytest.mark.parametrize("name", TYPED)
def test_what_is_advised(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    typed, advice = TYPED[name]
    found = CliRunner().invoke(app, typed.split())
    assert isinstance(found.exception, ConfigError), found.output
    assert advice in str(found.exception)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_folder_is_no_config(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "runs/a", "quickstart"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/a/config.yaml").touch()
    for typed, advice in {
        "mine": "has no YAML file",
        "./mine": "has no",
        "runs/a": "runs/a/config.yaml: with it",
    }.items():
        found = CliRunner().invoke(app, [command, typed])
        assert "this is a folder, and no config" in str(found.exception)
        assert advice in str(found.exception)
    assert config_file("quickstart") == run_recipes()["quickstart"], "the recipe, whatever folders there are"


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("compare", "It has a run. Give a file as those of configs/compare: "),
        ("ladder", "It has a run. Give a file as those of configs/ladder: bytes."),
        ("check-part", "this is a folder, and no module. Give one of its files: mine.py."),
        ("launch local", "is the folder of a run, and no config; "),
        ("launch slurm", "its config, which resumes it"),
    ],
)
def test_the_folder_of_a_run_is_none_of_other_files(
    command: str,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    for name in ("config.yaml", "mine.py"):
        (tmp_path / "a" / name).touch()
    monkeypatch.setattr("sys.argv", ["xscale", *command.split(), "a"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert advice in capsys.readouterr().err


def test_the_value_of_an_option_is_no_option() -> None:
    found = CliRunner().invoke(app, ["plan", "quickstart", "--device", "--zzz", "--check"])
    assert "no such option" not in str(found.exception)


def test_recipes_that_stand_for_famous_models_are_there() -> None:
    assert {recipe for recipe, _ in FAMOUS.values()} <= set(run_recipes())

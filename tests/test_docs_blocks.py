"""Blocks of the documentation for a cluster, a download or files of the reader are accepted as they stand.

These blocks are marked `text`, since no test can run them, each for a reason of `NOT_RUN`. Their commands are parsed by
the program, and their configs
with the overrides are checked on as many ranks as they start.
"""

import json
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tests.test_docs import PAGES, ROOT, commands, titled_blocks
from xscale.cli.main import app
from xscale.commands.show.recipes import config_file
from xscale.core.compose import compose
from xscale.core.errors import ConfigError
from xscale.recipe import read_and_check
from xscale_launch.main import verbs

VERBS = "|".join(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
LAUNCHERS = "torchrun|mpirun|srun|docker run"
STARTS = re.compile(rf"^(?:\w+=\S+ )*(?:xscale (?:{VERBS})|python -m xscale_tinybert|(?:{LAUNCHERS}) -)")
OTHERS = ("pip install ", "hf download ", "docker build ", "python3 -m venv ", "source ", "make ", "ln -s ")
"""Programs of others; what they are given is checked where it is ours."""
CONFIG = re.compile(r"^[\w/.-]+\.yaml$")


def text_commands(page: Path) -> list[str]:
    """The commands in the page's `text` blocks; a block of output has none."""
    fences = re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    blocks = [fence[2] for fence in fences if fence[1] in ("", "text")]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if STARTS.match(line) or line.startswith(OTHERS)]


COMMANDS = [(page.name, line) for page in PAGES for line in text_commands(page)]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


NOT_RUN = {
    "a cluster with Slurm": r"^srun |launch slurm |--slurm |^xscale launch status runs/ladder",
    "several machines or MPI": r"--nnodes|^mpirun |launch mpi ",
    "packages that are installed first": r"^pip |^source |^python3 -m venv|zero\.engine=deepspeed|deepspeed-universal|"
    r"exported_megatron|observe\.(?:wandb|mlflow)=",
    "a download": r"^hf download |fineweb|bert-base-uncased|runs/packages|runs/general|runs/filled|"
    r"eval runs/\S+ --tasks|xscale_tinybert|task\.yaml",
    "an image": r"^docker ",
    "a config of another trainer": r"init --from (?:pretrain_gpt|llama3_8b|training_args)",
    "a model of the reader": r"my_student|finetune_classify|run\.dir=runs/bert",
    "an hour": r"^make train TORCH_INDEX|bench attention --positions|bench layers|--folder DISK|--search --world 64",
}
"""Need of a command that no test meets -> the commands that have it."""


def reasons(line: str) -> list[str]:
    """Why no test runs the command of a `text` block; empty for one that a test could run."""
    return [reason for reason, pattern in NOT_RUN.items() if re.search(pattern, line)]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}-{line[:60]}" for page, line in COMMANDS])
def test_a_command_that_no_test_runs_has_a_reason(page: str, line: str) -> None:
    assert reasons(line), f"{page}: make the block of this command ```sh, so that tests type it: {line}"


def test_each_reason_is_that_of_a_command_and_a_command_without_one_is_seen() -> None:
    """Negative control."""
    assert {reason for _, line in COMMANDS for reason in reasons(line)} == set(NOT_RUN)
    assert reasons("xscale train configs/run/quickstart.yaml run.dir=runs/mine") == []
    assert reasons("xscale launch local --processes 2 quickstart") == []


def world_of(words: list[str]) -> int:
    """Processes that a launcher's options start."""
    count = 1
    for word, value in pairwise(words):
        if word in ("--nproc-per-node", "--processes-per-node", "--processes", "--nodes", "--nnodes", "-n", "--world"):
            count *= int(value.split(":")[-1])
    return count


def accept(line: str) -> None:
    """Parse a command, and check its config; an exception says what is refused."""
    words = shlex.split(line)
    before = words[: words.index("xscale")] if "xscale" in words else []
    # "..." stands for the command of the line before.
    own = [("quickstart" if word == "..." else word) for word in words[len(before) + 1 :]]
    if before[-1:] == ["-m"]:
        own = own if own[0] != "-m" else own[1:]
    if own[0] == "launch":
        parser = __import__("argparse").ArgumentParser(exit_on_error=False, allow_abbrev=False)
        verbs()[own[1]].add_arguments(parser)
        parser.parse_intermixed_args(own[2:])
    else:
        command, names = typer.main.get_command(app), []
        context = command.make_context("xscale", [], resilient_parsing=True)
        while hasattr(command, "commands"):
            names.append(own[len(names)])
            command = command.get_command(context, names[-1])
            assert command is not None, f"there is no command {' '.join(names)}"
        command.make_context(names[-1], own[len(names) :])
    config = next((word for word in own if CONFIG.match(word) or word in ("quickstart", "bytes")), None)
    if config is not None and not ({"compare", "ladder"} & set(own)):
        swept = [value for option, value in pairwise(own) if option == "--sweep"]
        overrides = [word for word in own if re.match(r"[a-z_.]+=", word) and word not in swept]
        check(config, overrides, None if own[0] == "data" or "..." in words else world_of(words))


def check(config: str, overrides: list[str], world: int | None) -> None:
    """Check the config on that many ranks; what is to be installed first is said on the page."""
    try:
        read_and_check(compose(config_file(Path(config)), overrides), world)
    except ConfigError as error:
        if not all("is not installed" in problem.what for problem in error.problems):
            raise


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the configs that a reader has written, as far as pages name them."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    names = {word for _, line in COMMANDS for word in shlex.split(line) if CONFIG.match(word)}
    for name in names:
        if not name.startswith("configs/"):
            base = "example/reviews" if name == "task.yaml" else "run/bert_masked"
            (tmp_path / name).write_text(f"use: [{ROOT / 'configs' / base}.yaml]\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}-{line[:60]}" for page, line in COMMANDS])
def test_a_printed_command_is_accepted(page: str, line: str, reader: Path) -> None:
    for extra in re.findall(r"-e '?\.\[(\w+)\]", line):
        assert extra in EXTRAS, f"pip finds no extra {extra}"
    if line.startswith(OTHERS) or "xscale_tinybert" in line:
        return
    accept(line)


def test_there_are_commands_and_a_refused_one_is_seen(reader: Path) -> None:
    """Negative controls."""
    assert len(COMMANDS) >= 30
    with pytest.raises(ConfigError, match="does not divide"):
        accept("xscale launch slurm configs/run/quickstart.yaml --nodes 2 --processes-per-node 8")
    with pytest.raises(Exception, match="No such option"):
        accept("xscale generate runs/mine --promt text")


def unquoted_globs(command: str) -> list[str]:
    """Words of a command that zsh takes for a pattern of file names, and refuses where no file has such a name."""
    return [word for word in re.sub(r"'[^']*'|\"[^\"]*\"", "", command).split() if re.search(r"=.*[\[*?]|\[", word)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_printed_command_has_its_brackets_in_quotes(page: Path) -> None:
    for command in [*commands(page), *text_commands(page)]:
        assert unquoted_globs(command) == [], command


def test_brackets_without_quotes_are_seen() -> None:
    """Negative control."""
    assert unquoted_globs("xscale train quickstart run.allow_links=[checkpoints]") == ["run.allow_links=[checkpoints]"]
    assert unquoted_globs("xscale train quickstart model.stack.rules[0].every=2") != []
    assert unquoted_globs("xscale train quickstart 'a=[b]' model.stack.rules.0.every=2") == []


PLACES = {"ffn": "model.stack.block.ffn"}
"""First key of a part of a config -> its place in a recipe; sections have theirs."""


def parts_of_configs(page: Path) -> list[dict[str, Any]]:
    """The page's YAML blocks that are no files."""
    return [
        yaml.safe_load(block)
        for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    ]


PARTS = [(page.name, part) for page in PAGES for part in parts_of_configs(page)]


@pytest.mark.parametrize(("page", "part"), PARTS, ids=[f"{page}-{'-'.join(part)}" for page, part in PARTS])
def test_a_part_of_a_config_is_accepted(page: str, part: dict[str, Any], reader: Path) -> None:
    """Laid over the quickstart, as `key=value` would."""
    check("quickstart", [f"{PLACES.get(key, key)}={json.dumps(value)}" for key, value in part.items()], 1)


def test_parts_of_configs_are_found_and_a_refused_one_is_seen(reader: Path) -> None:
    """Negative controls."""
    assert {page for page, _ in PARTS} >= {"mixture-of-experts.md", "evaluate.md", "distillation.md"}
    with pytest.raises(ConfigError, match="unknown key"):
        check("quickstart", ["model.stack.block.ffn={kind: moe, exprets: 8}"], 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_whole_config_of_a_page_is_accepted(page: Path, reader: Path) -> None:
    """Those that the page calls a file; parts of a config are not."""
    for name, text in titled_blocks(page).items():
        (reader / Path(name).name).write_text(text, encoding="utf-8")
    for name in titled_blocks(page):
        # A ladder is no run: its command is typed, and its page shows the file.
        if name.endswith(".yaml") and "/ladder/" not in name and "plugins" not in titled_blocks(page)[name]:
            file = ROOT / name if name.startswith("configs/") else reader / name
            read_and_check(compose(file, []))

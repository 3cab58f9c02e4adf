"""Parts shared by the verbs of `xscale launch`: parser, config, overrides, the trainer's command, what is printed."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from xscale_launch.files import shown
from xscale_launch.paths import expand
from xscale_launch.status import LaunchError

PYTHON = sys.executable
CONFIGS = (Path(__file__).parents[2] / "configs", Path(__file__).parents[1] / "xscale" / "configs")
"""Folders with the configs that come with xscale: in a checkout, and in an installed package."""

OTHERS_OPTIONS = {
    "processes": "n np nproc gpus num-gpus num-processes nproc-per-node processes-per-node ntasks ranks workers",
    "processes-per-node": "gpus ntasks-per-node nproc-per-node tasks-per-node processes",
    "nodes": "n num-nodes nnodes",
    "gpus-per-node": "gres",
    "time": "t walltime time-limit",
    "partition": "p queue",
    "name": "job-name j",
    "dry-run": "dryrun print check",
    "follow": "f tail",
}
"""An option here -> its names in torchrun, srun, mpirun and other launchers."""
EXAMPLES = {
    "local": "quickstart --processes 2",
    "slurm": "quickstart --nodes 2",
    "mpi": "quickstart --processes 2",
}
"""A verb that takes a config -> words that it takes; the others take the folder of a run."""
OTHERS_VERBS = {
    **dict.fromkeys(("stop", "kill", "delete"), "cancel"),
    **dict.fromkeys(("list", "ls", "ps", "queue", "show"), "status"),
    **dict.fromkeys(("log", "tail", "output"), "logs"),
    **dict.fromkeys(("restart", "continue"), "resume"),
    **dict.fromkeys(("torchrun", "run", "start", "train"), "local"),
    **dict.fromkeys(("mpirun", "mpiexec"), "mpi"),
    **dict.fromkeys(("sbatch", "srun", "submit"), "slurm"),
    "help": "--help",
}
"""A verb of other launchers -> the verb here."""


class VerbParser(argparse.ArgumentParser):
    """A parser that raises `LaunchError` in a sentence where argparse prints the usage and ends the process."""

    def error(self, message: str) -> NoReturn:
        missing = message.partition("arguments are required: ")[2]
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if missing:
            verb = self.prog.rpartition(" ")[2]
            words = EXAMPLES.get(verb, "runs/quickstart")
            fix = f"for example `{self.prog} {words}`"
            raise LaunchError(f"missing argument {missing.split(',')[0]} of `{self.prog}`; {fix}")
        if unknown and unknown[0].startswith("-"):
            raise LaunchError(
                f"`{self.prog}` has no option {unknown[0]}; {self._meant(unknown[0], unknown[1:])}"
            )
        raise LaunchError(f"{message}; `{self.prog} --help` shows what it takes")

    def _meant(self, option: str, after: Sequence[str]) -> str:
        """A clause on the option that is meant, with the value that was typed behind it."""
        name, _, value = option.lstrip("-").partition("=")
        value = value or (after[0] if after[:1] and not after[0].startswith("-") else "")
        known = [
            text.removeprefix("--") for text in self._option_string_actions if text[:2] == "--"
        ]
        near = [text for text in known if name in OTHERS_OPTIONS.get(text, "").split()]
        near = near or difflib.get_close_matches(name, known, n=1)
        if not near:
            return f"`{self.prog} --help` shows the options"
        takes_value = self._option_string_actions[f"--{near[0]}"].nargs != 0
        return f"did you mean --{near[0]}{f' {value}' if value and takes_value else ''}?"


def verb_meant(word: str, verbs: Sequence[str], recipe: bool) -> str:
    """A clause on the verb that is meant by a word that is none; `recipe`: it is a config in the verb's place."""
    if recipe:
        return f"it is a config: `xscale launch local {word}`"
    meant = OTHERS_VERBS.get(word) or next(iter(difflib.get_close_matches(word, verbs, n=1)), "")
    return f"did you mean {meant}?" if meant else f"choose from {', '.join(verbs)}"


def write(text: str, end: str = "\n") -> None:
    """Print a result on standard output; what of it a terminal would carry out is escaped."""
    print(shown(text), end=end, flush=True)


def say(message: str) -> None:
    """Print a message of the launcher on standard error, as `write` does."""
    print(shown(f"xscale launch: {message}"), file=sys.stderr, flush=True)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and its overrides. `--xscale` replaces the trainer's command in the launcher's tests."""
    parser.add_argument(
        "config", metavar="CONFIG", help="a run's config, or a recipe's name, such as quickstart"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides of config values"
    )
    parser.add_argument("--xscale", help=argparse.SUPPRESS)


def check_config(config: str, overrides: Sequence[str]) -> Path:
    """Return the config's path; raise `LaunchError` when the file does not exist or an override is not `key=value`.

    The name of a recipe, such as quickstart, or of a variant, such as bigbird, stands for its file. Where there is no
    folder `configs`, a path in it is that of a file that comes with xscale.
    """
    path = _recipe(config) or _shipped_file(config) or expand(config)
    if (path / "config.yaml").is_file():
        raise LaunchError(
            f"{config} is the folder of a run, and no config; {path / 'config.yaml'} is its config, which resumes it"
        )
    if not path.is_file():
        files = [file.name for file in path.parent.glob("*.yaml")]
        near = [
            str(path.parent / name) for name in difflib.get_close_matches(path.name, files, n=3)
        ]
        recipes = [file.stem for folder in CONFIGS for file in (folder / "run").glob("*.yaml")]
        near += difflib.get_close_matches(path.stem, recipes, n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise LaunchError(
            f"config {config} does not exist; {hint}`xscale list recipes` shows the recipes"
        )
    for override in overrides:
        if "=" not in override:
            raise LaunchError(
                f"{override!r} is not an override: write key=value, such as train.steps=100"
            )
    return path


def is_config(word: str) -> bool:
    """Whether the word is a config: a file, or the name of a recipe."""
    try:
        return (_recipe(word) or expand(word)).is_file()
    except LaunchError:
        # Several recipes begin so.
        return True


def _recipe(word: str) -> Path | None:
    """Return the recipe called `word`, else the variant's whose id it is or begins; None: `word` is a path."""
    if Path(word).suffix in (".yaml", ".yml") or Path(word).is_file() or Path(word).name != word:
        return None
    for folder in CONFIGS:
        if (file := folder / "run" / f"{word}.yaml").is_file():
            return file
    id = word.lower().replace("_", "-")
    variants = [file for folder in CONFIGS for file in sorted((folder / "xformer").glob("*.yaml"))]
    recipes = {file.stem: file for file in variants if file.stem.startswith(id)}
    if id in recipes:
        return recipes[id]
    like = [file for stem, file in recipes.items() if stem.startswith(f"{id}-")]
    if len(like) > 1:
        raise LaunchError(
            f"several recipes have names that begin with {word}: {', '.join(file.stem for file in like)}"
        )
    return like[0] if like else None


def _shipped_file(config: str) -> Path | None:
    """The file that comes with xscale under a path such as configs/run/quickstart.yaml; None in a checkout."""
    parts = Path(config).parts
    if parts[:1] != ("configs",) or ".." in parts or os.path.lexists("configs"):
        return None
    return next(
        (file for folder in CONFIGS if (file := folder.joinpath(*parts[1:])).is_file()), None
    )


def override(overrides: Sequence[str], key: str) -> str | None:
    """Return the value of `key` on the command line (the last one), or None."""
    values = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == key]
    return values[-1] if values else None


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of text as a table: pad each cell to the width of its column."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)

"""Mistakes in the words of a command as sentences: an argument that is missing, one too many, an unknown option."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from xscale.core.errors import ConfigError, near_name

EXAMPLES = {
    "xscale train": "quickstart",
    "xscale plan": "quickstart",
    "xscale check-part": "mine.py",
    "xscale compare": "experts",
    "xscale ladder": "bytes",
    "xscale report": "runs/quickstart",
    "xscale generate": 'runs/quickstart "def main("',
    "xscale eval": "runs/quickstart",
    "xscale data tokenizer": "quickstart",
    "xscale data prepare": "quickstart",
    "xscale data inspect": "quickstart",
    "xscale data verify": "work/data/FOLDER",
    "xscale data stats": "quickstart",
    "xscale plot pattern": "bigbird",
    "xscale bench memory": "quickstart",
    "xscale bench train": "quickstart",
    "xscale checkpoint ls": "runs/quickstart",
    "xscale checkpoint show": "runs/quickstart",
    "xscale checkpoint verify": "runs/quickstart",
    "xscale checkpoint diff": "runs/a runs/b",
    "xscale checkpoint prune": "runs/quickstart --keep-last 2 --dry-run",
    "xscale checkpoint consolidate": "runs/quickstart weights.safetensors",
    "xscale checkpoint export": "runs/quickstart exported --to hf",
    "xscale checkpoint import": "exported runs/imported quickstart --from hf",
    "xscale checkpoint upcycle": "runs/dense runs/mixture 'moe.experts=8'",
    "xscale checkpoint merge-lora": "runs/adapted runs/merged",
}
"""A command that needs arguments -> arguments that it takes."""
MORE_WORDS = {"xscale init": "--out {}", "xscale eval": "--data {}"}
"""A command -> the option that a word too many is often meant for."""
NAMES_ELSEWHERE = {
    "--tokens": "-n --max-tokens --max-new-tokens --num-tokens --length",
    "--temperature": "-t --temp",
    "--top-p": "-p --nucleus",
    "--seed": "-s --random-seed",
    "--prompt": "--text --input",
    "--out": "-o --output --output-dir --output-file",
    "--data": "-d --dataset --file",
    "--step": "--checkpoint --ckpt",
    "--json": "-j --format",
}
"""An option of some commands here -> its names in others."""
OTHERS_OPTIONS = {
    **dict.fromkeys(("-v", "-V", "--verbose"), "`xscale --version` prints the version."),
    **dict.fromkeys(("-l", "--list", "--list-recipes"), "`xscale list recipes` shows the recipes."),
    **dict.fromkeys(
        ("--dry-run", "--check", "--validate"),
        "`xscale plan CONFIG --check` finds mistakes without starting.",
    ),
    "--open": "The page that it writes opens in a browser.",
}
"""An option of other commands -> a sentence on what is done here, where no option here is so called."""
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""click's `UsageError`; by its version, typer takes it from click or has its own."""


@contextmanager
def usage_as_sentence() -> Iterator[None]:
    """Raise ConfigError in place of the errors of click, which print the usage and a box."""
    try:
        yield
    except USAGE_ERROR as error:
        kind = type(error).__name__
        if kind == "NoArgsIsHelpError":
            # A group with nothing behind it prints its help.
            raise
        raise _sentence(kind, error) from None


def _sentence(kind: str, error: Any) -> ConfigError:
    """The error of click of that class as one of ours."""
    command = "xscale" if error.ctx is None else command_name(error.ctx)
    if kind == "NoSuchOption":
        fix = meant_option(error.option_name, list(_options(error.ctx)), command)
        return ConfigError(error.option_name, f"`{command}` has no such option", fix)
    if kind == "MissingParameter":
        what = f"Missing argument '{error.param.name}' of `{command}`"
        return ConfigError("", what, _example(command))
    return ConfigError("", *_other(error.format_message(), command))


def command_name(context: Any) -> str:
    """Return the words of a command, from the name of the program, however it was started: `xscale data prepare`."""
    names: list[str] = []
    while context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return " ".join([context.command.name or context.info_name, *names])


def meant_option(option: str, known: list[str], command: str) -> str:
    """A sentence on the option that is meant by one that `command`, which has those in `known`, does not have."""
    names = [name.removeprefix("--") for name in known if name.startswith("--")]
    word = option.lstrip("-")
    starts = [name for name in names if len(word) > 2 and name.startswith(word)]
    if len(starts) == 1:
        return f"Did you mean --{starts[0]}?"
    for known_option, names_elsewhere in NAMES_ELSEWHERE.items():
        if known_option in known and option in names_elsewhere.split():
            return f"Did you mean {known_option}?"
    if option in OTHERS_OPTIONS:
        return OTHERS_OPTIONS[option]
    near = near_name(word, names) if len(word) > 2 else ""
    return f"Did you mean --{near}?" if near else f"`{command} --help` shows its options."


def _options(context: Any) -> Iterator[str]:
    if context is not None:
        for parameter in context.command.get_params(context):
            if parameter.param_type_name == "option":
                yield from (*parameter.opts, *parameter.secondary_opts)


def _example(command: str) -> str:
    arguments = EXAMPLES.get(command)
    return (
        f"For example `{command} {arguments}`."
        if arguments
        else f"`{command} --help` shows its arguments."
    )


def _other(message: str, command: str) -> tuple[str, str]:
    """The clause and the advice for an error of click that has no kind of its own."""
    extra = re.search(r"unexpected extra argument(?:\(s\)|s)? \((.*)\)$", message.rstrip("."))
    if extra is None:
        return message.rstrip("."), f"`{command} --help` shows what it takes."
    option = MORE_WORDS.get(command)
    fix = f"Did you mean {option.format(extra[1])}?" if option else _example(command)
    return f"`{command}` takes no further argument, got {extra[1]}", fix

"""Groups of commands: a word that is no command leads to the command that other trainers call so."""

from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from xscale.cli.terminal.usage import command_name, usage_as_sentence
from xscale.commands.show.recipes import recipe_names
from xscale.core.errors import ConfigError, near_name

OTHERS_COMMANDS = {
    **dict.fromkeys(
        ("run", "fit", "pretrain", "start", "finetune"), "xscale train CONFIG key=value"
    ),
    "resume": "the command that started the run, which resumes it (`xscale launch resume RUN` for a job of Slurm)",
    **dict.fromkeys(("evaluation", "test", "validate"), "xscale eval RUN"),
    **dict.fromkeys(
        ("sample", "infer", "inference", "chat", "complete"), 'xscale generate RUN "text"'
    ),
    **dict.fromkeys(("export", "convert", "save"), "xscale checkpoint export RUN FOLDER --to hf"),
    **dict.fromkeys(("import", "load"), "xscale checkpoint import FOLDER RUN CONFIG --from hf"),
    **dict.fromkeys(("tokenize", "preprocess", "prepare"), "xscale data prepare CONFIG"),
    **dict.fromkeys(("config", "configs", "recipes", "models"), "xscale list recipes"),
    **dict.fromkeys(("status", "logs"), "xscale launch status RUN"),
    **dict.fromkeys(("cancel", "stop", "kill"), "xscale launch cancel RUN, or Ctrl-C"),
    **dict.fromkeys(("benchmark", "profile", "speed"), "xscale bench"),
    **dict.fromkeys(("show", "print", "describe"), "xscale train CONFIG --print-config"),
    **dict.fromkeys(
        ("info", "params", "parameters", "summary", "size", "flops", "memory", "estimate"),
        "xscale plan CONFIG",
    ),
    **dict.fromkeys(("check", "lint", "validate-config", "dry-run"), "xscale plan CONFIG --check"),
    **dict.fromkeys(("new", "create", "template", "copy"), "xscale init RECIPE --out FILE"),
    **dict.fromkeys(
        ("view", "watch", "monitor", "dashboard", "tensorboard", "loss", "curves"),
        "xscale report RUN",
    ),
    **dict.fromkeys(("sweep", "grid", "ablate"), "xscale compare FILE"),
    **dict.fromkeys(("delete", "rm", "clean"), "xscale checkpoint prune RUN --keep-last N"),
    **dict.fromkeys(
        ("download", "fetch", "get"),
        "`hf download` of Hugging Face, and data.source.paths=FOLDER for what it fetched",
    ),
    "version": "xscale --version",
    **dict.fromkeys(
        ("torchrun", "slurm", "sbatch", "mpirun", "local"), "xscale launch local|slurm|mpi CONFIG"
    ),
    "help": "xscale --help",
}
"""A command of other trainers -> the command here."""
GROUPS_OF = {
    "bench": {
        **dict.fromkeys(("all", "kernels", "operators"), "xscale bench ops"),
        **dict.fromkeys(("flash", "sdpa", "core"), "xscale bench attention"),
        **dict.fromkeys(("speed", "throughput", "tokens"), "xscale bench train CONFIG"),
    },
    "checkpoint": {"info": "xscale checkpoint show RUN"},
    "data": {"info": "xscale data stats CONFIG"},
}
"""A group -> words that mean another command in it."""
WITH_FILE = {"bench": "train", "plot": "pattern", "data": "stats", "checkpoint": "ls"}
"""A group -> its command that takes a recipe or a run first, which is what was given in its place."""


class Group(TyperGroup):
    """A group of commands that refuses an unknown one in a sentence, with the one that is meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with usage_as_sentence():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        # The words of a command are parsed here too.
        with usage_as_sentence():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if word.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, word) is not None:
            return super().resolve_command(ctx, args)
        raise ConfigError(word, f"`{command_name(ctx)}` has no such command", self._meant(word))

    def _meant(self, word: str) -> str:
        name = self.name or ""
        command = GROUPS_OF.get(name, {}).get(word.lower()) or OTHERS_COMMANDS.get(word.lower())
        if command is not None:
            return f"Here it is {command if '`' in command else f'`{command}`'}."
        # `quickstart` is no misspelling of `start`.
        if name in WITH_FILE and (word in recipe_names() or Path(word).exists()):
            return f"Did you mean `xscale {name} {WITH_FILE[name]} {word}`?"
        if near := near_name(word, self.commands):
            return f"Did you mean {near}?"
        return f"Commands: {', '.join(self.commands)}."

"""Groups of commands: a word that is no command leads to the command that other trainers call so."""

from typing import Any

from typer.core import TyperGroup

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
    **dict.fromkeys(("status", "logs", "cancel"), "xscale launch status RUN"),
    **dict.fromkeys(("benchmark", "profile"), "xscale bench"),
    **dict.fromkeys(
        ("torchrun", "slurm", "sbatch", "mpirun", "local"), "xscale launch local|slurm|mpi CONFIG"
    ),
    "help": "xscale --help",
}
"""A command of other trainers -> the command here."""


class Group(TyperGroup):
    """A group of commands that refuses an unknown one in a sentence, with the one that is meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if word.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, word) is not None:
            return super().resolve_command(ctx, args)
        raise ConfigError(word, f"`{ctx.command_path}` has no such command", self._meant(word))

    def _meant(self, word: str) -> str:
        if (command := OTHERS_COMMANDS.get(word.lower())) is not None:
            return f"Here it is {command if '`' in command else f'`{command}`'}."
        if near := near_name(word, self.commands):
            return f"Did you mean {near}?"
        return f"Commands: {', '.join(self.commands)}."

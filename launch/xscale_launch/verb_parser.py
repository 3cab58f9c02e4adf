"""The parser of one verb's words, whose mistakes are sentences: what is missing, or the option that is meant."""

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from xscale_launch.status import LaunchError

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
        near = [mine for mine in known if name in OTHERS_OPTIONS.get(mine, "").split()]
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

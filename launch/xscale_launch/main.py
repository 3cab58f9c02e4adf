"""The command line of the launcher: `xscale launch VERB ...` or `python -m xscale_launch VERB ...`."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xscale_launch import local, status
from xscale_launch.command import VerbParser, is_config, say, verb_meant, write
from xscale_launch.mpi import mpi
from xscale_launch.slurm import submit, watch
from xscale_launch.status import LaunchError

INTERRUPTED = 128 + signal.SIGINT
"""The exit status after Ctrl-C when nothing was started."""


class Verb(NamedTuple):
    """A subcommand: its help text, its options, and its function."""

    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def verbs() -> dict[str, Verb]:
    """Return every subcommand by name."""
    return {
        "local": Verb(
            "start the processes of a run on this machine", local.add_arguments, local.run
        ),
        "slurm": Verb(
            "submit a Slurm job, a chain of jobs or a sweep", submit.add_arguments, submit.run
        ),
        "mpi": Verb(
            "start the processes of a run with mpirun, or with srun in an allocation",
            mpi.add_arguments,
            mpi.run,
        ),
        "status": Verb(
            "show the jobs of a run and its last step", watch.add_status, watch.show_status
        ),
        "logs": Verb("show the output of a run", watch.add_logs, watch.show_logs),
        "cancel": Verb("cancel the jobs of a run", watch.add_run, watch.cancel),
        "requeue": Verb(
            "save a checkpoint and requeue the running job", watch.add_run, watch.requeue
        ),
        "resume": Verb(
            "submit a run again with its stored code and config; it resumes from its last checkpoint",
            watch.add_resume,
            watch.resume,
        ),
    }


def main(argv: Sequence[str]) -> int:
    """Run one subcommand and return its exit status; 2 is a mistake of the user, explained on stderr."""
    known = verbs()
    if not argv or argv[0] in ("-h", "--help"):
        write(usage(known))
        return status.DONE if argv else status.USER_MISTAKE
    if argv[0] not in known:
        meant = verb_meant(argv[0], list(known), is_config(argv[0]))
        say(f"unknown verb {argv[0]!r}; {meant}")
        return status.USER_MISTAKE
    verb = known[argv[0]]
    parser = VerbParser(prog=f"xscale launch {argv[0]}", description=verb.about, allow_abbrev=False)
    verb.add_arguments(parser)
    try:
        return verb.run(parser.parse_intermixed_args(list(argv[1:])))
    except LaunchError as error:
        say(str(error))
        return status.USER_MISTAKE
    except KeyboardInterrupt:  # ends `logs --follow`
        return INTERRUPTED
    except SystemExit as stop:  # raised by argparse, for --help as well
        return stop.code if isinstance(stop.code, int) else status.USER_MISTAKE


def usage(known: dict[str, Verb]) -> str:
    """Return the help text of `xscale launch`."""
    lines = ["usage: xscale launch VERB ... (xscale launch VERB --help shows the options)", ""]
    return "\n".join(lines + [f"  {name:8} {verb.about}" for name, verb in known.items()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

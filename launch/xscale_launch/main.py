"""The command line of the launcher: `xscale launch VERB ...`, and the same as `python -m xscale_launch VERB ...`."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xscale_launch import local, mpi, status
from xscale_launch.errors import LaunchError
from xscale_launch.slurm import submit, watch

INTERRUPTED = 128 + signal.SIGINT
"""The exit status after Ctrl-C where nothing was started."""


class Verb(NamedTuple):
    """One subcommand: its sentence in the help, its options, and what it does."""

    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def verbs() -> dict[str, Verb]:
    """Every subcommand by name."""
    return {
        "local": Verb("start processes on this machine", local.add_arguments, local.run),
        "slurm": Verb("submit a job, a chain of jobs or a sweep", submit.add_arguments, submit.run),
        "mpi": Verb("start processes through mpirun, or srun in an allocation", mpi.add_arguments, mpi.run),
        "status": Verb("the jobs of a run, and how far it has come", watch.add_status, watch.show_status),
        "logs": Verb("the output of a run", watch.add_logs, watch.show_logs),
        "cancel": Verb("take a run's jobs out of the queue", watch.add_run, watch.cancel),
        "requeue": Verb("let a running job save and go back into the queue", watch.add_run, watch.requeue),
        "resume": Verb("submit a run again, as it was", watch.add_resume, watch.resume),
    }


def main(argv: Sequence[str]) -> int:
    """Runs one subcommand. Returns the exit status; 2 is the user's mistake, said in a sentence on stderr."""
    known = verbs()
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(known))
        return status.DONE if argv else status.USER_MISTAKE
    if argv[0] not in known:
        local.say(f"there is no {argv[0]!r}; there are {', '.join(known)}")
        return status.USER_MISTAKE
    verb = known[argv[0]]
    parser = argparse.ArgumentParser(prog=f"xscale launch {argv[0]}", description=verb.about, allow_abbrev=False)
    verb.add_arguments(parser)
    try:
        return verb.run(parser.parse_intermixed_args(list(argv[1:])))
    except LaunchError as error:
        local.say(str(error))
        return status.USER_MISTAKE
    except KeyboardInterrupt:  # the way to leave `logs --follow`
        return INTERRUPTED
    except SystemExit as stop:  # argparse leaves by this door, for --help as well
        return stop.code if isinstance(stop.code, int) else status.USER_MISTAKE


def usage(known: dict[str, Verb]) -> str:
    """The help of `xscale launch` itself."""
    lines = ["usage: xscale launch VERB ... (xscale launch VERB --help tells its options)", ""]
    return "\n".join(lines + [f"  {name:8} {verb.about}" for name, verb in known.items()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

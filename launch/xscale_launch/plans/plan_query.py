"""Query `xscale plan` in a subprocess: the launcher itself never imports xscale.

`xscale plan CONFIG key=value ... --world N --json` prints the resolved config and what does not fit into the given GPU,
or exits with 2 and sentences on stderr when the config is invalid on N processes. Without a GPU the query is
`--check` only; several runs are one query. An unchanged config and code are not queried again (see `plan_cache`).
No check depends on run.dir and run.seed, so they are left out of the query: a config that was checked before is
submitted with another run folder or seed without another check.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xscale_launch import status
from xscale_launch.plans import plan_cache
from xscale_launch.status import LaunchError
from xscale_launch.typed_json import convert, decode_json

IGNORABLE = {
    # Values that YAML reads as strings (dir) or integers (seed) and that need no quotes.
    "dir": re.compile(r"(?=.*/)[\w./][\w./+@=,-]*"),
    "seed": re.compile(r"0|[1-9]\d{0,8}"),
}
RUN_KEY = r"""^run:[ ]*(?:\#.*)?\n  # the section, which may have a comment with its origin
    (?:[ ]+.*\n)*?             # its other keys
    [ ]+{key}:[ ]+(?P<value>'[^']*'|"[^"]*"|.+?)(?=[ ]+\#|[ ]*$)(?P<comment>.*)$"""
RUN_KEYS = {
    key: re.compile(RUN_KEY.format(key=key), re.MULTILINE | re.VERBOSE) for key in IGNORABLE
}
RUN_DIR = RUN_KEYS["dir"]
"""Finds run.dir in a config."""
COMMENT_COLUMN = 54
"""The column of the comments in the section."""


@dataclass(frozen=True)
class PlanProblem:
    """A problem as `xscale plan` prints it."""

    path: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}. {self.fix}".strip()


@dataclass(frozen=True)
class PlanAnswer:
    """The part of `xscale plan`'s answer that the launcher reads."""

    config: str
    run_dir: str
    problems: list[PlanProblem] | None = None
    files: list[str] | None = None
    plugins: list[str] | None = None


@dataclass(frozen=True)
class RunPlan:
    """The answer of `xscale plan`."""

    config: str
    """The resolved config as YAML; a comment on each value gives its origin."""
    run_dir: Path
    """The run folder, absolute."""
    answer: dict[str, Any]
    """The output of `xscale plan --json`."""

    @property
    def problems(self) -> list[str]:
        """Return the problems that plan reports, such as what does not fit into the GPU."""
        answer: PlanAnswer = convert(self.answer, PlanAnswer)
        return [str(problem) for problem in answer.problems or ()]

    def below(self, name: str) -> "RunPlan":
        """Return the plan of a member of a sweep, whose run folder is a subfolder."""
        folder = self.run_dir / name
        return replace(
            self,
            config=with_settings(self.config, {"dir": str(folder)}, "the sweep"),
            run_dir=folder,
        )


def xscale_command(command: str | None, python: str | None = None) -> tuple[str, ...]:
    """Return the command that runs xscale. `command` replaces it in the launcher's tests."""
    return tuple(shlex.split(command)) if command else (python or sys.executable, "-m", "xscale")


def query_plan(
    command: Sequence[str],
    config: Path,
    overrides: Sequence[str],
    processes: int,
    variables: Mapping[str, str],
    log: Callable[[str], None] = lambda sentence: None,
    gpu: Sequence[str] = (),
) -> RunPlan:
    """Query the plan of a config on `processes` processes; raise `LaunchError` with plan's message when it is invalid.

    `log` gets a sentence when the answer comes from the cache. `gpu`: plan's options for the GPU that the run has to
    fit into.
    """
    return query_plans(command, config, [overrides], processes, variables, log, gpu)[0]


def query_plans(
    command: Sequence[str],
    config: Path,
    runs: Sequence[Sequence[str]],
    processes: int,
    variables: Mapping[str, str],
    log: Callable[[str], None] = lambda sentence: None,
    gpu: Sequence[str] = (),
) -> list[RunPlan]:
    """Query the plans of several runs of one config with different overrides, in one subprocess."""
    split = [split_overrides(overrides) for overrides in runs]
    options = ("--world", str(processes), "--json", *(gpu or ("--check",)))
    cache = plan_cache.PlanCache(variables) if tuple(command) == xscale_command(None) else None
    answers: dict[tuple[str, ...], dict[str, Any]] = {}
    for checked, _ in split:
        answer = cache.load([*command, "plan", str(config), *checked, *options]) if cache else None
        if answer is not None and is_answer(answer):
            answers[checked] = answer
    if cache and len(answers) == len({checked for checked, _ in split}):
        log(f"this config and code were checked {_age(cache.seconds_ago)} ago ({cache.latest})")
    missing = list(dict.fromkeys(checked for checked, _ in split if checked not in answers))
    for checked, answer in zip(
        missing, _answers(command, config, missing, options, variables), strict=True
    ):
        answers[checked] = answer
        if cache:
            cache.store([*command, "plan", str(config), *checked, *options], answer)
    return [
        RunPlan(
            with_settings(str(answers[checked]["config"]), settings),
            Path(settings.get("dir", answers[checked]["run_dir"])).absolute(),
            answers[checked],
        )
        for checked, settings in split
    ]


def is_answer(answer: object) -> bool:
    """Return whether this is an answer of `xscale plan`, with a config that has the ignorable keys."""
    try:
        config: str = convert(answer, PlanAnswer).config
    except ValueError:
        return False
    return all(pattern.search(config) for pattern in RUN_KEYS.values())


def split_overrides(overrides: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Split overrides into those that need a check and the ignorable ones, by their key in the section `run`.

    When another override sets a key of that section, or a value is not certainly valid, all overrides need a check.
    """
    checked, settings = [], {}
    for override in overrides:
        key, _, value = override.partition("=")
        name = key.removeprefix("run.")
        if key.partition(".")[0] != "run":
            checked.append(override)
        elif key != name and name in IGNORABLE and IGNORABLE[name].fullmatch(value):
            settings[name] = value
        else:
            return tuple(overrides), {}
    return tuple(checked), settings


def with_settings(config: str, settings: Mapping[str, str], origin: str = "command line") -> str:
    """Return the resolved config with other values of the ignorable keys."""
    for key, value in settings.items():
        line_match = RUN_KEYS[key].search(config)
        assert line_match is not None, f"the config has no run.{key}:\n{config[:500]}"
        plain = IGNORABLE[key].fullmatch(value)
        line = (
            f"{key}: {value if plain else json.dumps(value, ensure_ascii=False)}".ljust(
                COMMENT_COLUMN
            )
            + f"  # {origin}"
        )
        begin = config.rindex(f"{key}:", line_match.start(), line_match.start("value"))
        config = config[:begin] + line + config[line_match.end() :]
    return config


def _answers(
    command: Sequence[str],
    config: Path,
    runs: Sequence[Sequence[str]],
    options: Sequence[str],
    variables: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Run `xscale plan` for one run or several."""
    if not runs:
        return []
    several = len(runs) > 1
    overrides = ("--members", "-") if several else runs[0]
    query = [*command, "plan", str(config), *overrides, *options]
    output = _run(
        query, config, variables, json.dumps([list(run) for run in runs]) if several else None
    )
    try:
        parsed = decode_json(output, Any)
        answers = parsed if several else [parsed]
        if isinstance(answers, list) and len(answers) == len(runs) and all(map(is_answer, answers)):
            return answers
    except ValueError:
        pass
    raise LaunchError(f"`{shlex.join(query)}` printed no plan but:\n{output[-500:]}")


def query_run_dir(
    command: Sequence[str], config: Path, overrides: Sequence[str], variables: Mapping[str, str]
) -> Path:
    """Query the run folder of a config without a check of its layout."""
    query = [*command, "train", str(config), *overrides, "--print-config"]
    output = _run(query, config, variables)
    match = RUN_DIR.search(output)
    if match is None:
        raise LaunchError(f"`{shlex.join(query)}` printed no run.dir but:\n{output[-500:]}")
    return Path(match["value"].strip("'\"")).absolute()


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _run(
    argv: Sequence[str], config: Path, variables: Mapping[str, str], stdin: str | None = None
) -> str:
    """Run one query and return its standard output."""
    try:
        done = subprocess.run(
            argv,
            env=dict(variables),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}") from None
    if done.returncode == status.USER_MISTAKE:
        raise LaunchError(f"{config} is invalid:\n{done.stderr.strip()}")
    # A run that does not fit has an answer too, which says why.
    if done.returncode not in (status.DONE, status.TOO_LARGE):
        raise LaunchError(
            f"`{shlex.join(argv)}` failed with status {done.returncode}:\n{done.stderr.strip()}"
        )
    return done.stdout

"""`xscale launch slurm`: check the run and the request, write the run folder, and submit."""

import argparse
import dataclasses
import getpass
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from xscale_launch import command, profile, snapshot, status
from xscale_launch.command import say, write
from xscale_launch.env import environment, for_submission
from xscale_launch.files import make_run_folder, remove_file, write_private, write_run_file
from xscale_launch.paths import path_argument
from xscale_launch.plans import plan_query
from xscale_launch.slurm import check_request, queue, script, sweep
from xscale_launch.slurm.job import Job, check_job, record_job, submitted_jobs
from xscale_launch.slurm.save_deadline import with_save_deadline
from xscale_launch.status import LaunchError

FIELDS = {
    "partition": str,
    "account": str,
    "qos": str,
    "constraint": str,
    "reservation": str,
    "nodes": int,
    "processes_per_node": int,
    "gpus_per_node": int,
    "gpu": str,
    "gpu_memory_gigabytes": float,
    "cpus_per_process": int,
    "memory": str,
    "time": str,
    "start": str,
    "signal_seconds": int,
    "crash_limit": int,
    "interface": str,
    "python": str,
}
"""Settings of a profile that are options too, such as `--processes-per-node` for `processes_per_node`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `xscale launch slurm`."""
    command.add_config(parser)
    parser.add_argument(
        "--cluster", help="profile of clusters.toml; default: the one named by `default`"
    )
    parser.add_argument(
        "--clusters", type=path_argument, metavar="FILE", help="file with the profiles"
    )
    _add_fields(parser)
    parser.add_argument(
        "--exclude", metavar="NODE,NODE", help="nodes to exclude besides those of the profile"
    )
    parser.add_argument(
        "--no-requeue", action="store_true", help="never requeue the job automatically"
    )
    parser.add_argument(
        "--no-preflight", action="store_true", help="skip the preflight check of the nodes"
    )
    parser.add_argument("--no-plan", action="store_true", help="only check the config: no plan")
    parser.add_argument("--name", help="name of the job; default: the name of the run folder")
    parser.add_argument(
        "--after", metavar="JOB", help="start after this job has ended, with any exit status"
    )
    parser.add_argument(
        "--chain",
        type=int,
        default=1,
        metavar="K",
        help="submit K jobs that run one after the other",
    )
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=A,B", help="one run for each value"
    )
    parser.add_argument(
        "--members",
        type=path_argument,
        metavar="FILE",
        help="JSON: name of each run -> its list of overrides, in place of --sweep",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=0,
        metavar="K",
        help="maximum number of sweep members that run at the same time",
    )
    parser.add_argument(
        "--with-code",
        type=path_argument,
        nargs="+",
        default=[],
        help="your own modules to copy into the run folder",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the batch script without submitting it"
    )


def _add_fields(parser: argparse.ArgumentParser) -> None:
    """Add the options that replace settings of the profile."""
    for name, kind in FIELDS.items():
        choices = profile.STARTS if name == "start" else None
        option = f"--{name.replace('_', '-')}"
        what = f"replaces {name} of the profile"
        parser.add_argument(option, type=kind, choices=choices, help=what)


def run(options: argparse.Namespace) -> int:
    """Submit the job, or print it with `--dry-run`. All checks come before anything is written."""
    config = command.check_config(options.config, options.overrides)
    site = chosen_profile(options)
    if options.chain < 1 or options.at_once < 0:
        raise LaunchError("--chain and --at-once must be at least 1")
    members = sweep_members(options)
    processes = site.nodes * site.processes_per_node
    try:
        gpu = [] if options.no_plan else gpu_options(site)
        plans = query_member_plans(options, config, members, processes, gpu)
    except LaunchError as error:
        raise LaunchError("\n".join([str(error), *other_problems(options, site)])) from None
    top = plans[0].run_dir.parent if members else plans[0].run_dir
    job = check_job(build_job(options, site, top, len(members)))
    plan_problems = dict.fromkeys(
        f"{problem} Submit it without a plan: --no-plan."
        for plan in plans
        for problem in plan.problems
    )
    cluster_problems, cluster_known = check_cluster(job, options.dry_run)
    configs, deadline_problems = save_deadlines(
        [plan.config for plan in plans], site.signal_seconds
    )
    problems = [*plan_problems, *deadline_problems, *cluster_problems]
    if problems:
        raise LaunchError("not submitted:\n" + "\n".join(f"  - {problem}" for problem in problems))
    text = script.render(job)
    if options.dry_run:
        write(script.render(job, shown=True), end="")
        if cluster_known:
            say(f"sbatch --test-only: {test_only(text)}")
        say(f"dry run: nothing was written or submitted; the run folder would be {top}")
        return status.DONE
    require_idle(top)
    folders = [plan.run_dir for plan in plans]
    for folder, resolved in zip(folders, configs, strict=True):
        prepare(folder)
        snapshot.config(folder, resolved)
    prepare(top)
    if members:
        write_run_file(top / "launch" / "members.txt", "".join(f"{folder}\n" for folder in folders))
    snapshot.code(top, options.with_code)
    write_private(job.script, text)
    ids = submit_script(job, options.after, options.chain)
    announce(ids, top, folders if members else [])
    return status.DONE


def save_deadlines(configs: Sequence[str], signal_seconds: int) -> tuple[list[str], list[str]]:
    """Return the resolved configs with deadlines that fit the cluster's signal, and the problems of the others."""
    fitting: list[str] = []
    problems: dict[str, None] = {}
    for config in configs:
        try:
            fitting.append(with_save_deadline(config, signal_seconds))
        except LaunchError as error:
            problems[str(error)] = None
    return fitting, list(problems)


def sweep_members(options: argparse.Namespace) -> list[sweep.SweepMember]:
    """Return the members that `--sweep` or `--members` give; none for a single run."""
    if options.sweep and options.members:
        raise LaunchError("--sweep cannot be combined with --members: the file has all runs")
    if options.chain > 1 and (options.sweep or options.members):
        option = "--sweep" if options.sweep else "--members"
        raise LaunchError(
            f"--chain cannot be combined with {option}: omit --chain, members are requeued by themselves"
        )
    if options.members:
        return sweep.read_members(options.members)
    return sweep.members(options.sweep) if options.sweep else []


def chosen_profile(options: argparse.Namespace) -> profile.Profile:
    """Return the profile with the settings of the command line applied."""
    site = profile.load(
        profile.find_file(options.clusters, Path.home(), Path.cwd()), options.cluster
    )
    settings = {name: value for name in FIELDS if (value := getattr(options, name)) is not None}
    site = dataclasses.replace(site, **settings)
    if options.exclude:
        site = dataclasses.replace(site, exclude=(*site.exclude, *options.exclude.split(",")))
    return dataclasses.replace(
        site,
        requeue=site.requeue and not options.no_requeue,
        preflight=site.preflight and not options.no_preflight,
    )


def gpu_options(site: profile.Profile) -> list[str]:
    """Return the GPU options for `xscale plan`; empty if the profile does not give the GPU."""
    kind = ["--device", site.gpu] if site.gpu else []
    return kind + (
        ["--memory", f"{site.gpu_memory_gigabytes:g}"] if site.gpu_memory_gigabytes else []
    )


def query_member_plans(
    options: argparse.Namespace,
    config: Path,
    members: Sequence[sweep.SweepMember],
    processes: int,
    gpu: Sequence[str],
) -> list[plan_query.RunPlan]:
    """Query the plan of the run, or of each member of a sweep, whose run folders are subfolders of the sweep's."""
    trainer, variables = plan_query.xscale_command(options.xscale), environment()
    if not members:
        return [
            plan_query.query_plan(
                trainer, config, options.overrides, processes, variables, say, gpu
            )
        ]
    runs = [[*options.overrides, *member.overrides] for member in members]
    plans = plan_query.query_plans(trainer, config, runs, processes, variables, say, gpu)
    return [plan.below(member.name) for plan, member in zip(plans, members, strict=True)]


def build_job(options: argparse.Namespace, site: profile.Profile, top: Path, members: int) -> Job:
    """Build the job, unchecked."""
    inside = site.container.python if site.container else None
    python = inside or site.python or command.PYTHON
    return Job(
        name=options.name or top.name,
        run=top,
        folder=Path.cwd(),
        profile=site,
        python=python,
        trainer=(*plan_query.xscale_command(options.xscale, python), "train"),
        members=members,
        at_once=options.at_once,
        chain=options.chain > 1,
    )


def check_cluster(job: Job, dry_run: bool) -> tuple[list[str], bool]:
    """Return the problems that the cluster has with the job, and whether it was queried (a dry run works without)."""
    try:
        return check_request.cluster_problems(job, getpass.getuser()), True
    except LaunchError as error:
        if not dry_run:
            raise LaunchError(f"{error}; --dry-run works anywhere") from None
        say(f"the request was not checked against a cluster: {error}")
        return [], False


def require_idle(run: Path) -> None:
    """Raise `LaunchError` if a job of this run is still in the queue: two jobs would overwrite each other's files."""
    if not (run / "launch" / "jobs.jsonl").is_file():
        return
    for job in queue.known_jobs([entry.id for entry in submitted_jobs(run)]):
        if job["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"):
            raise LaunchError(
                f"job {job['JobId']} of {run} is {job['JobState']}: wait for it, `xscale launch cancel {run}`, "
                f"or choose another run folder with run.dir=..."
            )


def prepare(run: Path) -> None:
    """Create the launcher's folders in the run folder, and delete the result of an earlier submission.

    `LaunchError` where one of them is a link: Slurm and the batch script would write to where it leads.
    """
    make_run_folder(run, "launch", "output")
    make_run_folder(run, "launch", "attempts")
    for name in ("over", "crashes", "bad_nodes"):
        remove_file(run / "launch", name)


def submit_script(job: Job, after: str | None, chain: int) -> list[str]:
    """Submit the script `chain` times and record the job ids; raise `LaunchError` with sbatch's message."""
    ids: list[str] = []
    for _ in range(chain):
        previous = ids[-1] if ids else after
        ids.append(sbatch(job.script, [f"--dependency=afterany:{previous}"] if previous else []))
        record_job(job.run, ids[-1], job.script)
    return ids


def sbatch(path: Path, more: Sequence[str]) -> str:
    """Submit a script and return its job id."""
    argv = ["sbatch", "--parsable", *more, str(path)]
    done = subprocess.run(
        argv,
        env=for_submission(environment()),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise LaunchError(f"sbatch rejected {path}:\n{done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def other_problems(options: argparse.Namespace, site: profile.Profile) -> list[str]:
    """Return the problems of a job besides its config, so that all are reported at once."""
    try:
        job = check_job(
            build_job(
                options, site, Path.cwd(), len(options.sweep) or int(options.members is not None)
            )
        )
        return [f"  - {line}" for line in check_request.cluster_problems(job, getpass.getuser())]
    except LaunchError as error:
        return [] if shutil.which("scontrol") is None else [f"  - {error}"]


def test_only(text: str) -> str:
    """Return when and where sbatch would start a script, or why it cannot start; nothing is submitted."""
    argv = ["sbatch", "--test-only"]
    done = subprocess.run(
        argv,
        input=text,
        env=for_submission(environment()),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return re.sub(r"^sbatch: (?:Job \d+ )?", "", done.stderr.strip() or "no output")


def announce(ids: Sequence[str], run: Path, members: Sequence[Path]) -> None:
    """Print what was submitted and how to watch it."""
    submitted = (
        f"job {ids[0]}" if len(ids) == 1 else f"jobs {', '.join(ids)}, each after the previous one"
    )
    write(f"submitted {submitted}" + (f", an array of {len(members)} runs" if members else ""))
    for folder in members:
        write(f"  {folder}")
    write(
        f"run folder  {run}\nwatch       xscale launch status {run}\n            xscale launch logs {run} --follow"
    )

"""Render the batch script of a `Job`: text made to be read, stored with the run, and submitted by hand with sbatch."""

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path

from xscale_launch import attempts, status
from xscale_launch.agent import PREFLIGHT_FAILED
from xscale_launch.env import PORT_BASE, PORT_SPAN, PORT_STRIDE
from xscale_launch.files import masked
from xscale_launch.slurm.job import Job
from xscale_launch.slurm.save_deadline import stop_seconds

HEADER = """
# Written by `xscale launch slurm`. Submit it again with `xscale launch resume {run}`, or by hand: sbatch {script}
# Exit status: 0 finished, 2 invalid config (never requeued), 75 stopped on purpose (requeued), other: failure.

set -u
say() {{ echo "xscale launch: $(date +%FT%T) job $SLURM_JOB_ID: $*"; }}
"""

FOLDERS = """
# The status files of this attempt; a job has one attempt per requeue.
notes=$run/launch
attempt=$notes/attempts/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
mkdir -p "$attempt"
{
  echo "nodes $SLURM_JOB_NODELIST"
  echo "began $(date +%FT%T)"
} > "$attempt/began"

# A finished run is not started again by a chain, by a requeue after a node failure, or by mistake.
if [ -e "$notes/over" ]; then
  say "the run has ended (status $(cat "$notes/over")); \\`xscale launch resume\\` submits it again"
  exit "$(cat "$notes/over")"
fi
"""

RENDEZVOUS = """
# The rendezvous is on the job's first node, at a port derived from the job id that changes with each attempt.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{address}MASTER_PORT=$(({base} + 2 * (SLURM_JOB_ID + {stride} * ${{SLURM_RESTART_COUNT:-0}}) % {span}))
export MASTER_ADDR MASTER_PORT
say "attempt ${{SLURM_RESTART_COUNT:-0}} on $SLURM_JOB_NODELIST, rendezvous at $MASTER_ADDR:$MASTER_PORT"
"""

ADDRESS = """\
# Its address on the profile's interface, if there is one: the store listens at an address alone, at a name everywhere.
address=$(ip -4 -o addr show dev {interface} 2> /dev/null | sed -n 's/.* inet \\([0-9.]*\\).*/\\1/p' | head -n 1)
MASTER_ADDR=${{address:-$MASTER_ADDR}}
"""

TRAP = """
# SIGTERM is sent on cancellation, preemption and time limit; the workers get it too and save: wait for them.
trap : TERM USR1

# Since Slurm 22.05 srun does not inherit --cpus-per-task from sbatch, and may bind a task to one core.
"""

WAITING = """
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2> /dev/null; do # a signal interrupts `wait`, not the step
  wait "$step"
  code=$?
done
"""

STATUS = """
# Exit status of the attempt. The agents record it in files, because srun returns only the largest exit status. Shell
# builtins only: a cancellation or node failure would kill other programs before they print a result.
status={lost}
set -- "$attempt"/ended-*
[ -e "$1" ] || shift
if [ -s "$attempt/fault" ]; then
  read -r status < "$attempt/fault"
  [ -e "$attempt/said" ] || say "$(tail -n +2 "$attempt/fault")"
elif [ "$code" -ne 0 ]; then
  status=$code
elif [ $# -ne "$SLURM_NTASKS" ]; then
  say "only $# of $SLURM_NTASKS tasks recorded an exit status"
else
  status={done}
  [ ! -e "$attempt/go_on" ] || status={go_on}
  for file in "$@"; do
    read -r ended < "$file"
    [ "$ended" = {done} ] || status=${{ended:-{lost}}}
  done
fi
echo "$status" > "$attempt/status"

case $status in
  {done} | {mistake})
    echo "$status" > "$notes/over"
    say "run ended with status $status"
    exit "$status"
    ;;
esac

# Cancelled, or preempted by Slurm (which requeues the job itself): nothing to decide here.
state=$(scontrol show job -o "{job}" | sed -n 's/.*JobState=\\([A-Z_]*\\).*/\\1/p')
if [ "$state" != RUNNING ]; then
  say "status $status; the job's state in Slurm is $state: no requeue from here"
  exit "$status"
fi
"""

CRASHES = """
# A crashed job is requeued, but gives up after {limit} crashes without a new checkpoint.
if [ "$status" -ne {go_on} ]; then
  newest=$(ls -t "$run/checkpoints" 2> /dev/null | head -n 1)
  echo "after checkpoint: ${{newest:-none}}" >> "$notes/crashes"
  crashes=$(grep -cFx "after checkpoint: ${{newest:-none}}" "$notes/crashes")
  if [ "$crashes" -ge {limit} ]; then
    say "status $status; giving up after $crashes crashes without a new checkpoint"
    echo "$status" > "$notes/over"
    exit "$status"
  fi
  say "status $status; crash $crashes of {limit} since checkpoint ${{newest:-none}}"
fi
"""

BAD_NODES = """
# Nodes that failed the preflight, now or in an earlier attempt, are excluded.
if [ "$status" -eq {preflight} ] && [ -s "$attempt/bad_nodes" ]; then
  kept={kept}
  cat "$attempt/bad_nodes" >> "$kept/bad_nodes"
  bad={excluded}$(sort -u "$kept/bad_nodes" | paste -sd,)
"""

RESUBMISSION = """
  unset SLURM_RESTART_COUNT # the new job would inherit it
  if ! next=$(sbatch --parsable{options} --exclude="$bad" "$kept/job.sbatch"); then
    say "not enough nodes with $bad excluded: not submitted again"
    exit "$status"
  fi
  say "submitted again as job $next with $bad excluded"
  echo "{{\\"id\\": \\"${{next%%;*}}\\", \\"script\\": \\"$kept/job.sbatch\\"}}" >> "$kept/jobs.jsonl"
  exit "$status"
fi
"""

CHAIN_EXCLUSION = """
  for next in $(sed -n 's/.*"id": "\\([0-9]*\\)".*/\\1/p' "$kept/jobs.jsonl"); do
    [ "$next" -le "$SLURM_JOB_ID" ] || scontrol update JobId="$next" ExcNodeList="$bad"
  done
  say "the remaining jobs of the chain exclude $bad"
fi
"""

REQUEUE = """
say "status $status: requeueing the job"
for _ in 1 2 3 4 5; do
  scontrol requeue "{job}" && break
  sleep 5
done
exit "$status"
"""

CHAINED = """
if tail -n 1 "$notes/jobs.jsonl" | grep -qF "\\"$SLURM_JOB_ID\\""; then
  say "status $status; this was the last job of the chain: resume with \\`xscale launch resume $run\\`"
else
  say "status $status: the next job of the chain resumes the run"
fi
exit "$status"
"""

NO_REQUEUE = """
say "status $status: not requeued (requeue = false); resume with \\`xscale launch resume $run\\`"
exit "$status"
"""


MEMBER = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
"""The id of one array task: SLURM_JOB_ID of the last task is the id of the whole array."""


def render(job: Job, *, shown: bool = False) -> str:
    """Render the complete script; `shown` on a terminal, it hides values of variables whose names say secret."""
    profile = job.profile
    if shown:
        profile = dataclasses.replace(profile, environment=masked(profile.environment))
        job = dataclasses.replace(job, profile=profile)
    parts = ["#!/bin/bash\n", *(f"#SBATCH {option}\n" for option in options(job))]
    parts.append(HEADER.format(run=shlex.quote(str(job.run)), script=shlex.quote(str(job.script))))
    parts.append(_folder(job))
    parts.append(FOLDERS)
    parts.append(_site(job))
    address = ADDRESS.format(interface=shlex.quote(profile.interface)) if profile.interface else ""
    parts.append(
        RENDEZVOUS.format(base=PORT_BASE, span=PORT_SPAN, stride=PORT_STRIDE, address=address)
    )
    parts += [TRAP, _step(job), WAITING]
    numbers = {
        "lost": attempts.NO_REPORT,
        "done": status.DONE,
        "mistake": status.USER_MISTAKE,
        "go_on": status.RESUMABLE,
        "limit": profile.crash_limit,
        "job": MEMBER if job.members else "$SLURM_JOB_ID",
    }
    parts.append(STATUS.format(**numbers))
    if profile.exclude_bad_nodes and profile.preflight:
        parts.append(_exclusion(job))
    if job.chain:
        parts.append(CHAINED)
    elif profile.requeue:
        parts += [CRASHES.format(**numbers), REQUEUE.format(**numbers)]
    else:
        parts.append(NO_REQUEUE)
    return "".join(parts)


def options(job: Job) -> Iterator[str]:
    """Yield the #SBATCH options."""
    profile = job.profile
    per_node = profile.processes_per_node if profile.start == "task" else 1
    cpus = profile.cpus_per_process * (1 if profile.start == "task" else profile.processes_per_node)
    pairs: list[tuple[str, object]] = [
        ("job-name", job.name),
        ("partition", profile.partition),
        ("account", profile.account),
        ("qos", profile.qos),
        ("constraint", profile.constraint),
        ("reservation", profile.reservation),
        ("nodes", profile.nodes),
        ("ntasks-per-node", per_node),
        ("cpus-per-task", cpus or None),
        ("gpus-per-node", profile.gpus_per_node or None),
        ("mem", profile.memory),
        ("time", profile.time),
        ("exclude", ",".join(profile.exclude) or None),
        ("signal", f"USR1@{profile.signal_seconds}"),
        ("open-mode", "append"),
        (
            "output",
            _literal(job.run / "launch" / "output") + ("/%A_%a.log" if job.members else "/%j.log"),
        ),
        ("chdir", job.folder),
    ]
    yield from (f"--{name}={_quoted(value)}" for name, value in pairs if value is not None)
    if job.members:
        yield f"--array=0-{job.members - 1}" + (f"%{job.at_once}" if job.at_once else "")
    if profile.exclusive:
        yield "--exclusive"
    yield "--requeue" if profile.requeue and not job.chain else "--no-requeue"
    yield from profile.options


def _exclusion(job: Job) -> str:
    """Render how bad nodes are excluded: submit the job (or the array task of a sweep's member) again with --exclude.

    In a chain the remaining jobs are updated instead: a second submission would train beside the next job.
    """
    excluded = "".join(f"{node}," for node in job.profile.exclude)
    kept = shlex.quote(str(job.script.parent)) if job.members else "$notes"
    head = BAD_NODES.format(preflight=PREFLIGHT_FAILED, kept=kept, excluded=excluded)
    if job.chain:
        return head + CHAIN_EXCLUSION[1:]
    return head + RESUBMISSION[1:].format(
        options=' --array="$SLURM_ARRAY_TASK_ID"' if job.members else ""
    )


def _quoted(value: object) -> str:
    """Quote a value for an #SBATCH line, of which sbatch interprets quotes only."""
    text = str(value)
    return f'"{text}"' if " " in text or "#" in text else text


def _literal(path: Path) -> str:
    """Write a path so that Slurm does not replace its `%j` and the like."""
    return str(path).replace("%", "%%")


def _folder(job: Job) -> str:
    if not job.members:
        return f"run={shlex.quote(str(job.run))}\n"
    members = shlex.quote(str(job.run / "launch" / "members.txt"))
    return f'\n# The run folder of this member of the sweep.\nrun=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {members})\n'


def _site(job: Job) -> str:
    """Render modules, variables and PYTHONPATH."""
    profile = job.profile
    lines = ["", "# Environment of the site and the run."]
    lines += [f"module load {shlex.quote(name)}" for name in profile.modules]
    lines += profile.setup
    lines += [f"export {name}={shlex.quote(value)}" for name, value in profile.environment.items()]
    if profile.interface:
        interface = shlex.quote(profile.interface)
        lines.append(f"export NCCL_SOCKET_IFNAME={interface} GLOO_SOCKET_IFNAME={interface}")
    lines += [
        "",
        "# The code as of submission; without PYTHONSAFEPATH the working directory would take precedence.",
        f"export PYTHONPATH={shlex.quote(str(job.run / 'launch' / 'code'))}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export PYTHONSAFEPATH=1",
        "",
    ]
    return "\n".join(lines)


def _step(job: Job) -> str:
    """Render the job step: srun, the container if there is one, the agent, and after `--` the trainer."""
    profile = job.profile
    per_task = 1 if profile.start == "task" else profile.processes_per_node
    agent = [f'--attempt "$attempt" --outputs "$run/logs" --processes {per_task}']
    if profile.start == "torchrun":
        agent[0] += " --torchrun"
    if not profile.preflight:
        agent[0] += " --no-preflight"
    else:
        agent[0] += f" --gpus {profile.gpus_per_node} --disk {profile.minimum_disk_gigabytes:g}"
    agent[0] += f" --stop-seconds {stop_seconds(profile.signal_seconds)}"
    if profile.preflight and profile.links and profile.nodes > 1:
        links_command = shlex.join((*job.trainer[:-1], "bench", "links"))
        agent.append(
            f"--links {shlex.quote(links_command)} --slowest-link {profile.minimum_link_gigabytes:g}"
        )
    srun = [
        'srun --export=ALL --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}'
    ]
    python = shlex.quote(job.python)
    inside = _container(job)
    if profile.container and profile.container.kind == "pyxis":
        srun += inside
    elif profile.container:
        srun += [" ".join(["apptainer exec", *inside])]
    trainer = " ".join(shlex.quote(word) for word in job.trainer)
    words = [
        *srun,
        " \\\n  ".join([f"{python} -m xscale_launch.agent {agent[0]}", *agent[1:]]) + " --",
        f'{trainer} "$notes/config.yaml" run.dir="$run" &',
    ]
    return " \\\n  ".join(words)


def _container(job: Job) -> list[str]:
    container = job.profile.container
    if container is None:
        return []
    required = [str(job.run), str(job.folder)]
    if container.kind == "pyxis":
        mounts = [
            mount if ":" in mount else f"{mount}:{mount}"
            for mount in (*required, *container.mounts)
        ]
        return [
            f"--container-image={shlex.quote(container.image)}",
            f"--container-mounts={shlex.quote(','.join(dict.fromkeys(mounts)))}",
            f"--container-workdir={shlex.quote(str(job.folder))}",
            *container.options,
        ]
    binds = ",".join(dict.fromkeys((*required, *container.mounts)))
    gpu = ["--nv"] if job.profile.gpus_per_node else []
    pwd = f"--pwd {shlex.quote(str(job.folder))}"
    return [
        *gpu,
        f"--bind {shlex.quote(binds)}",
        pwd,
        *container.options,
        shlex.quote(container.image),
    ]


def script_path(run: Path) -> Path:
    """Return the path of a submitted run's batch script."""
    return run / "launch" / "job.sbatch"

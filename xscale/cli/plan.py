"""`xscale plan`: what a run needs, without starting it."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from xscale.cli.terminal.complete import complete_run, one_of
from xscale.cli.terminal.options import ConfigFile, Json, Overrides
from xscale.core.errors import ConfigError
from xscale.core.paths import path

World = Annotated[
    int | None, typer.Option(help="World size; default: the smallest that fits parallel.mesh.")
]
Device = Annotated[
    str | None,
    typer.Option(
        help="h100, h200, a100, b200, cpu, or another one by --flops, --memory and --bandwidth: estimate step time and "
        "check memory.",
        autocompletion=one_of("h100", "h200", "a100", "b200", "cpu"),
    ),
]
Draw = Annotated[
    Path | None,
    typer.Option(help="Plot the pipeline schedule to a .png or .svg file.", parser=path),
]
Memory = Annotated[
    float | None,
    typer.Option(help="Device memory in GB; without --device only memory is checked."),
]
Node = Annotated[int | None, typer.Option(help="Devices per node.")]
Link = Annotated[
    float | None, typer.Option(help="Bandwidth between devices of a node, in GB/s, one way.")
]
Network = Annotated[float | None, typer.Option(help="Bandwidth between nodes per device, in GB/s.")]
Flops = Annotated[
    float | None, typer.Option(help="TFLOP/s of a device in dense matmuls of bfloat16.")
]
Bandwidth = Annotated[
    float | None, typer.Option(help="Bandwidth between a device and its memory, in GB/s.")
]
OverloadFactor = Annotated[
    float | None,
    typer.Option(
        "--overload",
        help="Rows of the busiest expert-parallel rank over the mean, whose memory and time are planned; default: 1, "
        "balanced.",
    ),
]
FromRun = Annotated[
    Path | None,
    typer.Option(
        help="Take the overload factor that this run has measured.",
        autocompletion=complete_run,
        parser=path,
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Only validate the config; skip memory and time.")
]
Search = Annotated[
    bool, typer.Option("--search", help="Search the fastest layouts that fit --device.")
]
Best = Annotated[int, typer.Option(help="With --search: number of layouts to print.", min=1)]
Members = Annotated[
    typer.FileText | None,
    typer.Option(
        help="JSON list of lists of overrides (- reads stdin); prints a JSON list of plans."
    ),
]


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    world: World = None,
    device: Device = None,
    draw: Draw = None,
    memory: Memory = None,
    node: Node = None,
    link: Link = None,
    network: Network = None,
    flops: Flops = None,
    bandwidth: Bandwidth = None,
    overload: OverloadFactor = None,
    from_run: FromRun = None,
    check: Check = False,
    search: Search = False,
    best: Best = 4,
    members: Members = None,
    json: Json = False,
) -> None:
    """Plan a run without starting it: memory, communication, step time, layout; or every problem of the config.

    The exit status is 3 where the run does not fit into the memory of --device or --memory.
    """
    from xscale.commands import plan as commands
    from xscale.commands.overload import OverloadOptions

    if check:
        options = {"--device": device, "--draw": draw, "--memory": memory, "--node": node}
        options |= {"--link": link, "--search": search or None, "--network": network}
        options |= {"--flops": flops, "--bandwidth": bandwidth}
        options |= {"--overload": overload, "--from-run": from_run}
        _require_check_alone(options)
    load = OverloadOptions(overload, from_run)
    machine = (
        None if check else commands.hardware(device, memory, node, link, network, flops, bandwidth)
    )
    if members is not None:
        if search or draw is not None:
            what = "cannot be combined with --search or --draw"
            raise ConfigError("--members", what, "Omit --search and --draw.")
        commands.members(config, overrides or [], members.read(), world, machine, load)
        return
    if not json:
        _say_contradicting_deadline(config, overrides or [])
    if machine is None:
        commands.check(config, overrides or [], world, as_json=json)
        return
    if search:
        _require_search_alone({"--draw": draw, "--overload": overload, "--from-run": from_run})
        commands.search(config, overrides or [], world, machine, best=best, as_json=json)
        return
    status = commands.run(
        config, overrides or [], world, machine, overload=load, draw=draw, as_json=json
    )
    raise typer.Exit(status)


def _require_check_alone(options: Mapping[str, object]) -> None:
    """ConfigError for the first of the options that is given beside --check."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(name, "cannot be combined with --check", f"Omit {name} or --check.")


def _require_search_alone(options: Mapping[str, object]) -> None:
    """ConfigError for the first of the options that is given beside --search, whose layouts differ in pp and ep."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(name, "cannot be combined with --search", "Omit --search.")


def _say_contradicting_deadline(config: Path, overrides: list[str]) -> None:
    """Say where the config's own deadline of a save contradicts the cluster to which `xscale launch slurm` submits.

    The launcher refuses such a config. It asks for a plan as JSON, and knows which cluster was chosen.
    """
    from xscale.core.compose import compose_leniently
    from xscale_launch.profile import find_file, load
    from xscale_launch.slurm.save_deadline import contradiction
    from xscale_launch.status import LaunchError

    composed = compose_leniently(config, overrides)
    section = composed.data.get("checkpoint")
    deadline = section.get("deadline_seconds") if isinstance(section, dict) else None
    if not isinstance(deadline, int | float):
        return
    try:
        file = find_file(None, Path.home(), Path.cwd())
        signal_seconds = load(file, None).signal_seconds
    except LaunchError:
        # A bad file of clusters is the launcher's to refuse.
        return
    origin = composed.origin.get("checkpoint.deadline_seconds", str(config))
    if file is not None and (sentence := contradiction(deadline, origin, signal_seconds)):
        print(f"xscale: warning: {sentence} ({file})", file=sys.stderr, flush=True)

"""`xscale plan`: what a run needs, without starting it."""

from pathlib import Path
from typing import Annotated

import typer

from xscale.cli.options import ConfigFile, Json, Overrides
from xscale.cli.paths import path
from xscale.core.errors import ConfigError


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    world: Annotated[
        int | None, typer.Option(help="World size; default: the smallest that fits parallel.mesh.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="h100, h200, a100 or cpu: estimate step time and check memory.")
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="Plot the pipeline schedule to a .png or .svg file.", parser=path)
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Device memory in GB; without --device only memory is checked.")
    ] = None,
    node: Annotated[int | None, typer.Option(help="Devices per node.")] = None,
    link: Annotated[float | None, typer.Option(help="Bandwidth between devices of a node, in GB/s, one way.")] = None,
    network: Annotated[float | None, typer.Option(help="Bandwidth between nodes per device, in GB/s.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only validate the config; skip memory and time.")] = False,
    search: Annotated[bool, typer.Option("--search", help="Search the fastest layouts that fit --device.")] = False,
    best: Annotated[int, typer.Option(help="With --search: number of layouts to print.", min=1)] = 4,
    members: Annotated[
        typer.FileText | None,
        typer.Option(help="JSON list of lists of overrides (- reads stdin); prints a JSON list of plans."),
    ] = None,
    json: Json = False,
) -> None:
    """Plan a run without starting it: memory, communication, step time, layout; or every problem of the config.

    The exit status is 3 where the run does not fit into the memory of --device or --memory.
    """
    from xscale.commands import plan as commands

    if check:
        options = {"--device": device, "--draw": draw, "--memory": memory, "--node": node, "--link": link}
        options["--search"] = search or None
        for name in [name for name, value in {**options, "--network": network}.items() if value is not None]:
            raise ConfigError(name, "cannot be combined with --check", f"Omit {name} or --check.")
    machine = None if check else commands.hardware(device, memory, node, link, network)
    if members is not None:
        if search or draw is not None:
            raise ConfigError("--members", "cannot be combined with --search or --draw", "Omit --search and --draw.")
        commands.members(config, overrides or [], members.read(), world, machine)
        return
    if machine is None:
        commands.check(config, overrides or [], world, as_json=json)
        return
    if search:
        if draw is not None:
            raise ConfigError("--draw", "cannot be combined with --search", "Omit --search.")
        commands.search(config, overrides or [], world, machine, best=best, as_json=json)
        return
    raise typer.Exit(commands.run(config, overrides or [], world, machine, draw=draw, as_json=json))

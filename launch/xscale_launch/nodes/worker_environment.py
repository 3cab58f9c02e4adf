"""The environment of a worker: its rank, GPU variables and threads, beside those that the user has set."""

import socket
from collections.abc import Mapping
from pathlib import Path

from xscale_launch.env import RankEnv
from xscale_launch.nodes import devices
from xscale_launch.nodes.gpu_env import gpu_variables

HOST = "127.0.0.1"


def worker_settings(
    variables: Mapping[str, str], rank_env: RankEnv, outputs: Path | None = None
) -> dict[str, str]:
    """Return the variables that the launcher adds to a worker's environment; the user's own values are kept.

    `outputs` is the folder of the workers' logs.
    """
    added = rank_env.variables()
    if devices.gpus(variables):
        added |= gpu_variables(variables, outputs)
    if "OMP_NUM_THREADS" not in variables:
        added["OMP_NUM_THREADS"] = str(devices.threads(rank_env.local_world_size))
    # gloo resolves the machine's own name, which often fails on a laptop; one machine needs loopback only.
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback and rank_env.master_addr == HOST and "GLOO_SOCKET_IFNAME" not in variables:
        added["GLOO_SOCKET_IFNAME"] = loopback
    return added


def worker_environment(
    variables: Mapping[str, str], rank_env: RankEnv, outputs: Path | None = None
) -> dict[str, str]:
    """Return the complete environment of one worker."""
    return {**variables, **worker_settings(variables, rank_env, outputs)}

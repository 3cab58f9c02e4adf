"""Debian's packages that some tests start programs of: installed by the test that needs them, or the reason why not."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


class MissingError(Exception):
    """This machine lacks or forbids what a test needs; the text says what."""


def provide(programs: Sequence[str], packages: Sequence[str]) -> None:
    """Installs `packages` when one of `programs` is missing; raises `MissingError` where that is not possible."""
    absent = [program for program in programs if shutil.which(program) is None]
    if not absent:
        return
    wanted = f"{', '.join(absent)} is not installed"
    if os.getuid() != 0:
        raise MissingError(f"{wanted}, and only root may install it: apt-get install {' '.join(packages)}")
    if shutil.which("apt-get") is None:
        raise MissingError(f"{wanted}, and there is no apt-get to install {' '.join(packages)} with")
    # Tests run side by side, and apt-get's update waits for nobody.
    with (Path(tempfile.gettempdir()) / "apt-get.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install(wanted, packages)
    still = [program for program in programs if shutil.which(program) is None]
    if still:
        raise MissingError(f"{' '.join(packages)} are installed, and there is still no {', '.join(still)}")


def _install(wanted: str, packages: Sequence[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    patient = ("-o", "DPkg::Lock::Timeout=300", "-qq")
    for command in (
        ["apt-get", *patient, "update"],
        ["apt-get", *patient, "install", "-y", "--no-install-recommends", *packages],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it does not say why"])[-1]
            raise MissingError(f"{wanted}, and `{' '.join(command)}` failed: {last}")

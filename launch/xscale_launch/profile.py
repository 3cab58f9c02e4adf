"""Profiles of clusters: what a site wants said with every job, kept in one file instead of in every command.

The file is `clusters.toml` or `clusters.yaml` with the same keys: the launcher runs on a login node's bare Python too,
whose standard library reads TOML and not YAML. Looked for in this order: `--clusters FILE`, the working directory,
`configs` in it, `~/.config/xscale`. `configs/clusters.example.toml` shows every key.
"""

import dataclasses
import difflib
import tomllib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from xscale_launch import profile_yaml
from xscale_launch.errors import LaunchError

CONTAINER_KINDS = ("apptainer", "pyxis")
STARTS = ("node", "task", "torchrun")
YAML = (".yaml", ".yml")
NAMES = ("clusters.toml", "clusters.yaml")
Typed = Callable[[Any, Any], Any]
"""Makes of a value what its field wants, where the file's language does not tell."""


@dataclass(frozen=True)
class Container:
    """The container in which a job's processes run."""

    kind: str = "apptainer"
    """`apptainer` (Singularity's successor), or `pyxis` (Enroot images through srun)."""
    image: str = ""
    """Path of the image, or its address in a registry."""
    mounts: tuple[str, ...] = ()
    """Folders to mount, `host:inside` or one name for both; the run and working folders are always there."""
    options: tuple[str, ...] = ()
    """More words for `apptainer exec`, or for srun with pyxis."""
    python: str = "python3"
    """The Python inside the image."""


@dataclass(frozen=True)
class Profile:
    """What one cluster wants; every field may be given in the file, most on the command line too."""

    partition: str | None = None
    """Partition (queue); the cluster's default one when left out."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the nodes must have, such as `h200`."""
    reservation: str | None = None
    """Reservation to run in."""
    nodes: int = 1
    """Nodes of a job."""
    processes_per_node: int = 1
    """Workers on a node: one for each GPU as a rule."""
    gpus_per_node: int = 0
    """GPUs of a node; 0 asks for none."""
    gpu: str | None = None
    """Kind of the GPUs, as `xscale plan --device` knows it, such as `h100`: what does not fit is refused."""
    gpu_memory_gigabytes: float = 0.0
    """Memory of one GPU, where the kind is none that plan knows, or has another size; 0 leaves it to the kind."""
    cpus_per_process: int = 0
    """Processors for each worker; 0 leaves it to the cluster."""
    memory: str | None = None
    """Memory of a node in Slurm's words, such as `64G`; `0` is all of it."""
    time: str | None = None
    """Time limit in Slurm's words: `minutes`, `hours:minutes:seconds`, `days-hours`."""
    exclusive: bool = False
    """Share the nodes with nobody."""
    exclude: tuple[str, ...] = ()
    """Nodes never to be used."""
    exclude_bad_nodes: bool = False
    """A node that fails the preflight is excluded and the job submitted again; otherwise it is only named."""
    preflight: bool = True
    """Look at every node before the model is built."""
    links: bool = True
    """With the preflight, measure an all-reduce between each two nodes; takes some seconds."""
    minimum_link_gigabytes: float = 0.0
    """Gigabytes a second that each two nodes must reach; 0 only holds them against each other."""
    minimum_disk_gigabytes: float = 1.0
    """Free space that the run folder's disk must have for the preflight to pass."""
    start: str = "node"
    """`node`: one task a node, which starts the workers; `torchrun`: through torchrun; `task`: a task a worker."""
    signal_seconds: int = 120
    """How long before the time limit the workers are told to save."""
    requeue: bool = True
    """Put the job back into the queue when it stopped on purpose, when it crashed and when a node failed."""
    crash_limit: int = 3
    """Crashes without a new checkpoint in between after which a job is not put back."""
    modules: tuple[str, ...] = ()
    """Environment modules to load."""
    setup: tuple[str, ...] = ()
    """Lines of shell to run first on the head node, such as `source /shared/venv/bin/activate`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the job."""
    interface: str | None = None
    """Network interface that NCCL and gloo talk over, such as `ib0`."""
    python: str | None = None
    """Python on the nodes; the one that submits when left out."""
    mpi: str | None = None
    """For `xscale launch mpi --srun`: what `srun --mpi=` gets, such as `pmix`."""
    container: Container | None = None
    """Run inside a container."""
    options: tuple[str, ...] = ()
    """More options for sbatch, each as in `--comment=sparse`."""


def find(given: str | None, home: Path, here: Path) -> Path | None:
    """The profiles' file, or None when there is none; raises `LaunchError` when the given one is missing."""
    if given is not None:
        path = Path(given)
        if not path.is_file():
            raise LaunchError(f"there is no file {given} with clusters; start from configs/clusters.example.toml")
        return path
    for folder in (here, here / "configs", home / ".config" / "xscale"):
        there = [path for name in NAMES if (path := folder / name).is_file()]
        if len(there) > 1:
            raise LaunchError(f"{folder} has {' and '.join(path.name for path in there)}: keep one of them")
        if there:
            return there[0]
    return None


def load(path: Path | None, name: str | None) -> Profile:
    """The profile called `name`, or the file's `default` one; without a file or a default, a `Profile()`."""
    if path is None:
        if name is not None:
            raise LaunchError(f"there is no clusters.toml that could hold {name!r}; see configs/clusters.example.toml")
        return Profile()
    content = _content(path)
    default = content.pop("default", None)
    if name is None and default is None:
        return Profile()
    chosen = str(name if name is not None else default)
    if chosen not in content:
        raise LaunchError(f"{path} has no cluster {chosen!r}; it has {', '.join(sorted(content)) or 'none'}")
    typed = profile_yaml.as_typed if path.suffix in YAML else _as_it_is
    profile: Profile = _build(Profile, content[chosen], f"{path}: {chosen}", typed)
    if profile.start not in STARTS:
        raise LaunchError(f"{path}: {chosen}.start is {profile.start!r}; it can be {', '.join(STARTS)}")
    if profile.container and profile.container.kind not in CONTAINER_KINDS:
        kinds = ", ".join(CONTAINER_KINDS)
        raise LaunchError(f"{path}: {chosen}.container.kind is {profile.container.kind!r}; it can be {kinds}")
    return profile


def _content(path: Path) -> dict[str, Any]:
    """What the file says, by its name's ending."""
    if path.suffix in YAML:
        content = profile_yaml.read(path)
        if not isinstance(content, dict):
            raise LaunchError(f"{path} should hold clusters by name, and is {content!r}")
        return content
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise LaunchError(f"{path} is no TOML: {error}") from None


def _build(kind: Any, content: object, where: str, typed: Typed) -> Any:
    """One table as a dataclass; unknown keys and wrong types are refused with the key's name."""
    if not isinstance(content, dict):
        raise LaunchError(f"{where} should be a table of settings, and is {content!r}")
    hints = get_type_hints(kind)
    values: dict[str, object] = {}
    for key, value in content.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            meant = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(hints)}"
            raise LaunchError(f"{where}.{key} is no setting of a cluster{meant}")
        values[key] = _value(hints[key], value, f"{where}.{key}", typed)
    return kind(**values)


def _value(hint: Any, value: object, where: str, typed: Typed) -> object:
    value = typed(hint, value)
    options = get_args(hint) if get_origin(hint) in (types.UnionType,) else (hint,)
    wanted = next(option for option in options if option is not type(None))
    if dataclasses.is_dataclass(wanted):
        return _build(wanted, value, where, typed)
    if get_origin(wanted) is tuple:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise LaunchError(f"{where} should be a list of strings, and is {value!r}")
    if get_origin(wanted) is Mapping or wanted is Mapping:
        return {str(key): str(item) for key, item in value.items()} if isinstance(value, dict) else _wrong(where, value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:
        raise LaunchError(f"{where} should be {_words(wanted)}, and is {value!r}")
    return value


def _as_it_is(hint: Any, value: Any) -> Any:
    return value


def _wrong(where: str, value: object) -> object:
    raise LaunchError(f"{where} should be a table of names and values, and is {value!r}")


def _words(kind: type) -> str:
    return {str: "a string", int: "a whole number", bool: "true or false", float: "a number"}[kind]

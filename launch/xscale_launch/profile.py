"""Profiles of clusters: the settings that a site needs for every job, stored in one file.

The file is `clusters.toml` or `clusters.yaml` with the same keys: the launcher also runs on a login node's Python,
whose standard library reads TOML but not YAML. The search order is `--clusters FILE`, the working directory, its
`configs` folder, `~/.config/xscale`. `configs/clusters.example.toml` shows every key. PyYAML is imported only for a
YAML file: every installation of xscale has it, a login node's Python may lack it.
"""

import dataclasses
import difflib
import re
import tomllib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from xscale_launch.files import check_variable, read_regular
from xscale_launch.status import LaunchError

CONTAINER_KINDS = ("apptainer", "pyxis")
STARTS = ("node", "task", "torchrun")
YAML = (".yaml", ".yml")
NAMES = ("clusters.toml", "clusters.yaml")
Typed = Callable[[Any, Any], Any]
"""Converts a value to the type of its field, for file formats without types."""


@dataclass(frozen=True)
class Container:
    """The container in which a job's processes run."""

    kind: str = "apptainer"
    """`apptainer` (Singularity's successor), or `pyxis` (Enroot images through srun)."""
    image: str = ""
    """Path of the image, or its address in a registry."""
    mounts: tuple[str, ...] = ()
    """Folders to mount, `host:inside` or one name for both; the run and working folders are always mounted."""
    options: tuple[str, ...] = ()
    """Further options of `apptainer exec`, or of srun with pyxis."""
    python: str = "python3"
    """The Python inside the image."""


@dataclass(frozen=True)
class Profile:
    """The settings of one cluster; each may be set in the file, most on the command line too."""

    partition: str | None = None
    """Partition (queue); default: the cluster's default partition."""
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
    """Workers per node, usually one per GPU."""
    gpus_per_node: int = 0
    """GPUs per node; 0 requests none."""
    gpu: str | None = None
    """GPU model as `xscale plan --device` knows it, such as `h100`: a run that does not fit is not submitted."""
    gpu_memory_gigabytes: float = 0.0
    """Memory of one GPU, if plan does not know the model or its size differs; 0: the model's default."""
    cpus_per_process: int = 0
    """CPU cores per worker; 0: the cluster's default."""
    memory: str | None = None
    """Memory per node in Slurm's format, such as `64G`; `0` requests all of it."""
    time: str | None = None
    """Time limit in Slurm's format: `minutes`, `hours:minutes:seconds`, `days-hours`."""
    exclusive: bool = False
    """Request exclusive nodes."""
    exclude: tuple[str, ...] = ()
    """Nodes that are never used."""
    exclude_bad_nodes: bool = False
    """Exclude a node that fails the preflight and submit the job again; otherwise the node is only reported."""
    preflight: bool = True
    """Check every node before the model is built."""
    links: bool = True
    """With the preflight, measure an all-reduce between each two nodes; takes some seconds."""
    minimum_link_gigabytes: float = 0.0
    """Minimum bandwidth between each two nodes, in GB/s; 0 only compares the links with each other."""
    minimum_disk_gigabytes: float = 1.0
    """Minimum free space on the run folder's disk for the preflight to pass, in GB."""
    start: str = "node"
    """`node`: one Slurm task per node starts the workers; `torchrun`: with torchrun; `task`: one task per worker."""
    signal_seconds: int = 120
    """Seconds before the time limit at which the workers are signalled to save; a save gets 20 s less than that."""
    requeue: bool = True
    """Requeue the job when it stopped on purpose, crashed, was preempted or lost a node."""
    crash_limit: int = 3
    """Crashes without a new checkpoint after which a job is not requeued."""
    modules: tuple[str, ...] = ()
    """Environment modules to load."""
    setup: tuple[str, ...] = ()
    """Shell lines that run first on the head node, such as `source /shared/venv/bin/activate`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the job."""
    interface: str | None = None
    """Network interface for NCCL and gloo, such as `ib0`."""
    python: str | None = None
    """Python on the nodes; default: the Python that submits the job."""
    mpi: str | None = None
    """For `xscale launch mpi --srun`: the value of `srun --mpi=`, such as `pmix`."""
    container: Container | None = None
    """The container to run in."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as `--comment=sparse`."""


def find_file(named: Path | None, home: Path, working_folder: Path) -> Path | None:
    """Return the file with the profiles, or None; raise `LaunchError` when `named` does not exist."""
    if named is not None:
        if not named.is_file():
            raise LaunchError(
                f"file {named} does not exist; start from configs/clusters.example.toml"
            )
        return named
    for folder in (working_folder, working_folder / "configs", home / ".config" / "xscale"):
        files = [path for name in NAMES if (path := folder / name).is_file()]
        if len(files) > 1:
            raise LaunchError(
                f"{folder} has {' and '.join(path.name for path in files)}: keep one of them"
            )
        if files:
            return files[0]
    return None


def load(path: Path | None, name: str | None) -> Profile:
    """Load the profile `name`, or the file's `default`; without a file or a default, a `Profile()`."""
    if path is None:
        if name is not None:
            raise LaunchError(
                f"no clusters.toml was found for --cluster {name}; see configs/clusters.example.toml"
            )
        return Profile()
    content = _content(path)
    default = content.pop("default", None)
    if name is None and default is None:
        return Profile()
    chosen = str(name if name is not None else default)
    if chosen not in content:
        raise LaunchError(
            f"{path} has no cluster {chosen!r}; it has {', '.join(sorted(content)) or 'none'}"
        )
    typed = as_typed if path.suffix in YAML else _untyped
    profile: Profile = _build(Profile, content[chosen], f"{path}: {chosen}", typed)
    if profile.start not in STARTS:
        raise LaunchError(
            f"{path}: {chosen}.start is {profile.start!r}; it can be {', '.join(STARTS)}"
        )
    if profile.container and profile.container.kind not in CONTAINER_KINDS:
        kinds = ", ".join(CONTAINER_KINDS)
        raise LaunchError(
            f"{path}: {chosen}.container.kind is {profile.container.kind!r}; it can be {kinds}"
        )
    return profile


def _content(path: Path) -> dict[str, Any]:
    """Read the file, as YAML or TOML by its suffix."""
    if path.suffix in YAML:
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise LaunchError(f"{path} must be a table of clusters by name, got {_kind(content)}")
        return content
    try:
        return tomllib.loads(_read(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise LaunchError(f"{path} is not valid TOML: {error}") from None


def _read(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise LaunchError(
            f"{path} cannot be read: {why}; start from configs/clusters.example.toml"
        ) from None


def _build(kind: Any, content: object, where: str, typed: Typed) -> Any:
    """Build a dataclass from a table; raise `LaunchError` with the key for unknown keys and wrong types."""
    if not isinstance(content, dict):
        raise LaunchError(f"{where} must be a table of settings, got {_kind(content)}")
    hints = get_type_hints(kind)
    values: dict[str, object] = {}
    for key, value in content.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; choose from {', '.join(hints)}"
            raise LaunchError(f"{where}.{key} is not a setting of a cluster{hint}")
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
        raise LaunchError(f"{where} must be a list of strings, got {_kind(value)}")
    if get_origin(wanted) is Mapping or wanted is Mapping:
        if not isinstance(value, dict):
            raise LaunchError(f"{where} must be a table of names and values, got {_kind(value)}")
        return {check_variable(where, str(key)): str(item) for key, item in value.items()}
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:
        raise LaunchError(f"{where} must be {_type_name(wanted)}, got {_kind(value)}")
    return value


def _untyped(hint: Any, value: Any) -> Any:
    return value


def _kind(value: object) -> str:
    """Describe a table or list without its content, which may be secret."""
    return (
        f"a {'table' if isinstance(value, dict) else 'list'}"
        if isinstance(value, dict | list)
        else repr(value)
    )


def _type_name(kind: type) -> str:
    return {str: "a string", int: "an integer", bool: "true or false", float: "a number"}[kind]


def read_yaml(path: Path) -> Any:
    """Read the file with all scalars as strings: YAML turns the time limit 12:00:00 into 43200, and `no` into false."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise LaunchError(
            f"{path} needs PyYAML, which this Python lacks: pip install pyyaml, or convert the file to clusters.toml"
        ) from None
    try:
        return yaml.load(_read(path), Loader=yaml.BaseLoader) or {}
    except RecursionError:
        raise LaunchError(f"{path} is not valid YAML: it is nested too deeply") from None
    except yaml.YAMLError as error:
        # The library's message quotes the line, which may hold a secret.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise LaunchError(
            f"{path} is not valid YAML: {getattr(error, 'problem', None) or 'it cannot be read'}{where}"
        ) from None


def as_typed(hint: Any, text: Any) -> Any:
    """Convert a scalar's text to the number or boolean of its field; return anything else unchanged."""
    kinds = get_args(hint) or (hint,)
    if not isinstance(text, str) or str in kinds:
        return text
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    if int in kinds and re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    if float in kinds and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
        return float(text)
    return text

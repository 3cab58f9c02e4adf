"""Contents of report.html: report.json, and the columns of metrics.jsonl."""

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import atomic_write
from xscale.core.files.file_safety import decode_json
from xscale.core.files.run_files import kind_of, read_run_file
from xscale.core.foreign import reason
from xscale.observe.events import EndReport, RunFacts, SampleReport
from xscale.observe.metrics import finite

if TYPE_CHECKING:
    import numpy
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from xscale.observe.metrics import METRICS_FILE, TASKS, read

RECORD_NAME = "report.json"
MAX_LAYOUT_SIZE = 1 << 16
"""Most heads, and most blocks of queries or keys, of a layout."""
ReportT = TypeVar("ReportT", RunFacts, SampleReport, EndReport)


@dataclasses.dataclass(frozen=True)
class Record:
    """Facts, samples and end of a run so far."""

    facts: RunFacts
    samples: tuple[SampleReport, ...] = ()
    end: EndReport | None = None
    resumed_from: tuple[int, ...] = ()
    """Steps from which later processes of the run resumed, ascending."""


def write(record: Record) -> None:
    """Write report.json into the run folder, by one rename. Errors: OSError."""
    facts = {
        item.name: getattr(record.facts, item.name) for item in dataclasses.fields(record.facts)
    }
    facts |= {"folder": None, "layouts": _pack(record.facts.layouts)}
    data = {
        "facts": {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in facts.items()
        },
        "samples": [dataclasses.asdict(sample) for sample in record.samples],
        "end": None if record.end is None else dataclasses.asdict(record.end),
        "resumed_from": list(record.resumed_from),
    }
    path = record.facts.folder / RECORD_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        # ASCII: a sample may contain half a surrogate pair, which UTF-8 cannot encode.
        json.dump(finite(data), file, allow_nan=False)


def read_record(folder: Path) -> Record:
    """Read the record of the run in `folder`, which may have been moved. Errors: ConfigError where there is none."""
    path = folder / RECORD_NAME
    try:
        data = decode_json(read_run_file(path))
        facts = data["facts"] | {"folder": folder, "layouts": _unpack(data["facts"]["layouts"])}
        facts["notes"], facts["repeats"] = tuple(facts["notes"]), tuple(facts.get("repeats", ()))
        return Record(
            _typed(RunFacts(**facts)),
            tuple(_typed(SampleReport(**sample)) for sample in data["samples"]),
            None if data["end"] is None else _typed(EndReport(**data["end"])),
            _steps(data.get("resumed_from", [])),
        )
    except FileNotFoundError:
        fix = "Give the folder of a run that was trained with observe.report=true."
        raise ConfigError(str(path), "the file does not exist", fix) from None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        zlib.error,
    ) as error:
        raise ConfigError(
            str(path), f"the file is not the record of a run ({reason(error)})"
        ) from error


def _steps(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(step) is int and 0 <= step < 2**63 for step in value
    ):
        raise TypeError("resumed_from is not a list of steps")
    return tuple(value)


def _typed(report: ReportT) -> ReportT:
    """Return `report`, whose fields come from a file; TypeError unless each has a value of its type."""
    for item in dataclasses.fields(report):
        value = getattr(report, item.name)
        if not _is_of(item.type, value):
            raise TypeError(f"{item.name} is {str(value)[:40]!r}")
    return report


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value of JSON is of an annotated type."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if kind is Any or isinstance(kind, str):
        # The layouts, whose annotation is quoted, are checked when they are unpacked.
        return True
    if origin is Literal:
        return value in arguments
    if origin is UnionType:
        return any(_is_of(option, value) for option in arguments)
    if origin in (int, float):
        return type(value) in (int, origin) and abs(value) < 2**1000
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(arguments[0], entry) for entry in value)
    if origin is Mapping:
        return isinstance(value, dict) and all(
            _is_of(arguments[1], entry) for entry in value.values()
        )
    return isinstance(value, origin)


def _pack(layouts: "Mapping[str, numpy.ndarray]") -> dict[str, Any]:
    """Compress layouts to bits; layers with the same layout share one entry."""
    import numpy

    kinds: dict[str, dict[str, Any]] = {}
    layers: dict[str, str] = {}
    for layer, layout in layouts.items():
        bits = base64.b64encode(
            zlib.compress(numpy.packbits(layout.astype(bool)).tobytes(), 6)
        ).decode()
        kind = {"shape": list(layout.shape), "bits": bits}
        key = next((key for key, known in kinds.items() if known == kind), str(len(kinds)))
        kinds[key], layers[layer] = kind, key
    return {"kinds": kinds, "layers": layers}


def _unpack(data: Any) -> "dict[str, numpy.ndarray]":
    import numpy

    kinds = {}
    for key, kind in data["kinds"].items():
        count = math.prod(kind["shape"])
        if len(kind["shape"]) != 3 or not all(
            type(size) is int and 0 < size <= MAX_LAYOUT_SIZE for size in kind["shape"]
        ):
            raise ValueError(f"a layout has the shape {kind['shape']}")
        # Never more than the shape needs: a few bytes can decompress to gigabytes.
        content = zlib.decompressobj().decompress(base64.b64decode(kind["bits"]), -(-count // 8))
        packed = numpy.frombuffer(content, dtype=numpy.uint8)
        kinds[key] = numpy.unpackbits(packed, count=count).astype(bool).reshape(kind["shape"])
    return {layer: kinds[key] for layer, key in data["layers"].items()}


SCALARS = (
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "seconds",
    "step_seconds",
    "tokens_per_second",
    "mfu",
    "skipped",
)
COLUMNS = 240
"""Columns of a heat map: about the pixels of its card on the page."""
WARM_UP = 5
"""First steps excluded from the mean phase times where there are more: they compile, allocate and fill caches."""


@dataclass
class History:
    """The numbers of a run; nulls are nan."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    scalars: "dict[str, array[float]]" = field(
        default_factory=lambda: {name: array("d") for name in SCALARS}
    )
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """Results of tasks, with step and tokens."""
    split: dict[str, float] = field(default_factory=dict)
    """Mean seconds of a step by phase."""
    loads: dict[str, list[list[float]]] = field(default_factory=dict)
    """By layer: the mean load of each expert in each column of time, [columns][E]."""
    statistics: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By name, then by layer: means over the columns of time."""
    ends: list[float] = field(default_factory=list)
    """Tokens at the end of each column of time."""


def load_history(folder: Path) -> History:
    """Read metrics.jsonl in two passes, for the count and for the numbers, never all of it in memory."""
    path = folder / METRICS_FILE
    history = History()
    if kind_of(path) is None:
        return history
    count = sum(1 for item in read(path) if "loss" in item)
    size = max(1, math.ceil(count / COLUMNS))
    column: list[dict[str, Any]] = []
    splits: list[tuple[int, dict[str, float]]] = [(0, {})]
    for item in read(path):
        if "eval_loss" in item:
            history.evaluations.append(item)
        elif any(name.startswith(TASKS) for name in item):
            history.tasks.append(item)
        elif "loss" in item:
            _scalars(history, item)
            _split(splits, item, skip=count > 2 * WARM_UP and len(history.steps) <= WARM_UP)
            column.append(item)
            if len(column) == size:
                _column(history, column)
                column = []
    if column:
        _column(history, column)
    steps, sums = splits[0]
    history.split = {phase: seconds / steps for phase, seconds in sums.items()}
    for evaluation in (*history.evaluations, *history.tasks):
        evaluation["tokens"] = value_at(
            history.steps, history.scalars["tokens"], evaluation["step"]
        )
    return history


def value_at(steps: Sequence[int], values: Sequence[float], step: int) -> float:
    """Value of a total, of which `values` are known at `steps`, at `step`: in proportion between two; 0 at step 0."""
    index = bisect_left(steps, step)
    first, start = (steps[index - 1], values[index - 1]) if index else (0, 0.0)
    if index == len(steps):
        return start
    gap = steps[index] - first
    # Steps that do not rise were not written by a run.
    return start + (values[index] - start) * (step - first) / gap if gap > 0 else start


def _scalars(history: History, item: dict[str, Any]) -> None:
    history.steps.append(item["step"])
    for name, values in history.scalars.items():
        value = item.get(name)
        values.append(math.nan if value is None else value)


def _split(splits: list[tuple[int, dict[str, float]]], item: dict[str, Any], *, skip: bool) -> None:
    phases = {name[6:]: value for name, value in item.items() if name.startswith("split/")}
    if phases and not skip:
        steps, sums = splits[0]
        splits[0] = (
            steps + 1,
            {phase: sums.get(phase, 0.0) + (value or 0.0) for phase, value in phases.items()},
        )


def _column(history: History, items: list[dict[str, Any]]) -> None:
    """One column of time: the means over `items`."""
    history.ends.append(items[-1].get("tokens") or 0)
    position = len(history.ends) - 1
    for key in {key: None for item in items for key in item}:
        layer, slash, name = key.rpartition("/")
        values = [item[key] for item in items if item.get(key) is not None]
        values = [value for value in values if _shape(value) == _shape(values[0])]
        if not slash or layer == "split" or not values:
            continue
        if isinstance(values[0], list):
            if name == "load":
                columns = history.loads.setdefault(layer, [])
                empty = [math.nan] * len(values[0])
                columns += [empty] * (position - len(columns))
                columns.append([_mean(expert) for expert in zip(*values, strict=True)])
        else:
            series = history.statistics.setdefault(name, {}).setdefault(layer, [])
            series += [math.nan] * (position - len(series))
            series.append(_mean(values))


def _shape(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else None


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan

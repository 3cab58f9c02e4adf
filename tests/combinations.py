"""The table of parallelism combinations, computed by the checks of the configs."""

from math import prod
from typing import Any, get_args

from xscale.core.config import decode
from xscale.core.errors import Problem
from xscale.parallel.config import PipelineConfig, ZeroConfig
from xscale.recipe import Recipe

Section = dict[str, Any]
AXES: dict[str, Section] = {
    "pp": {"mesh": {"pp": 2}},
    "dp_replicate": {"mesh": {"dp_replicate": 2}},
    "dp_shard": {"mesh": {"dp_shard": 2}},
    "cp": {"mesh": {"cp": 2}},
    "tp": {"mesh": {"tp": 2}},
    "tp, sequence parallel": {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
    "ep": {"mesh": {"dp_shard": 2, "ep": 2}},
}
"""Axis -> the smallest layout that uses it."""
ATTENTION: Section = {"kind": "attention", "heads": 8}
DENSE: Section = {"kind": "dense", "hidden": 64}
MIXTURE: Section = {"kind": "moe", "experts": 4}


def markdown() -> str:
    """Return one row per axis and per other feature; a number refers to the reason why a combination is rejected."""
    reasons: dict[str, int] = {}
    heads = columns()
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + ":-:|" * len(heads)]
    for name, (parallel, model) in rows().items():
        cells = [_cell(parallel, model, column, reasons) for column in heads.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, "", *notes]) + "\n"


def columns() -> dict[str, Section]:
    """Return column name -> its settings in section `parallel`: the axes, the pipeline schedules, the ZeRO engines."""
    settings = dict(AXES)
    for schedule in get_args(PipelineConfig.model_fields["schedule"].annotation):
        settings[f"`{schedule}`"] = {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule}}
    if "engine" in ZeroConfig.model_fields:
        for engine in get_args(ZeroConfig.model_fields["engine"].annotation):
            settings[f"`{engine}`"] = {"mesh": {"dp_shard": 2}, "zero": {"engine": engine}}
    return settings


def rows() -> dict[str, tuple[Section, str]]:
    """Return row name -> its settings in section `parallel`, and the model that it is checked with."""
    rows_by_name: dict[str, tuple[Section, str]] = {name: (axis, "decoder") for name, axis in AXES.items()}
    for stage in get_args(ZeroConfig.model_fields["stage"].annotation):
        rows_by_name[f"ZeRO {stage}"] = ({"zero": {"stage": stage}}, "decoder")
    return rows_by_name | {
        "mixture of experts": ({}, "mixture"),
        "tied embeddings": ({}, "tied"),
        "encoder-decoder": ({}, "pair"),
        "block-sparse core": ({}, "patterns"),
        "linear core": ({}, "linear"),
        "activation checkpointing": ({"recompute": {"every": 1}}, "decoder"),
        "selective activation checkpointing": ({"recompute": {"every": 1, "granularity": "selective"}}, "decoder"),
        "`torch.compile`": ({"compile": True}, "decoder"),
    }


def _cell(parallel: Section, model: str, column: Section, reasons: dict[str, int]) -> str:
    rejections = problems(parallel, model, column)
    schedule = column.get("pipeline", {}).get("schedule")
    texts = sorted({f"{problem.what}. {problem.advice}".replace(f"'{schedule}'", "it") for problem in rejections})
    return " ".join(f"({reasons.setdefault(text, len(reasons) + 1)})" for text in texts) or "yes"


def problems(row: Section, model: str, column: Section) -> list[Problem]:
    """Return the problems of a row and a column combined."""
    parallel: Section = {"mesh": {"dp_shard": 1}}
    for section in (row, column):
        for key, value in section.items():
            parallel[key] = {**parallel.get(key, {}), **value} if isinstance(value, dict) else value
    mesh = parallel["mesh"]
    world = prod(mesh.get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    sections = {
        "model": model_of(model, experts=mesh.get("ep", 1) > 1),
        "objective": {"kind": "span" if model == "pair" else "causal"},
        "parallel": parallel,
        "data": {"cross_documents": True},
        "train": {"batch_size": 64, "micro_batch_size": 1},
    }
    return decode(Recipe, sections).check(world)


def model_of(name: str, *, experts: bool) -> Section:
    """Return a small model that differs from `decoder` in one feature."""
    core = {"patterns": {"kind": "block_sparse"}, "linear": {"kind": "linear"}}.get(name, {"kind": "softmax"})
    ffn = MIXTURE if experts or name == "mixture" else DENSE
    stack = {"depth": 8, "block": {"mixer": {**ATTENTION, "core": core}, "ffn": ffn}}
    if name == "pair":
        return {"kind": "encoder_decoder", "width": 64, "encoder": stack, "decoder": stack}
    return {"kind": "decoder", "width": 64, "tied": name == "tied", "stack": stack}

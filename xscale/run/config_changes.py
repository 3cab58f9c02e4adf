"""Configs of a run compared: with the one that it had before, and between its ranks."""

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

import yaml

from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError, Problem
from xscale.core.key_words.renamed import RenamedWarning, rename_old_keys
from xscale.mesh.consensus import Consensus
from xscale.settings.settings import RunConfig, Settings

FIXED = (
    "model",
    "objective",
    "run.seed",
    "train.freeze",
    "lora",
    "optimizer.kind",
    "train.batch_size",
    *(
        f"data.{key}"
        for key in (
            "from_caller",
            "source",
            "tokenizer",
            "prepared",
            "blend",
            "blend_rates",
            "blend_limit",
            "blend_temperature",
            "validation",
            "order",
        )
    ),
    *(f"data.{key}" for key in ("sequence_length", "max_source_length", "max_target_length")),
)
"""Keys that must not change when a run resumes."""
OPTIONAL = ("train.ema_decay",)
"""Keys that must not become null or cease to be null when a run resumes; another value is a change like any."""
CHANGEABLE: tuple[str, ...] = get_args(
    get_args(RunConfig.model_fields["allow_changed"].annotation)[0]
)
"""Those that may, if run.allow_changed names them."""
REPEATABLE = (
    "run",
    "parallel",
    "kernels",
    "checkpoint",
    "observe",
    "train.stop_after",
    "train.micro_batch_size",
    "data.workers",
)
"""Sections and keys whose values make no other result of a run."""
LISTED = 8
"""How many values that differ a message lists."""


def problems_of(changed: list[tuple[str, str]], sentence: str) -> list[Problem]:
    """The first of the `differences` as problems of run.dir, each after `sentence`, and how many more there are."""
    problems = [
        Problem("run.dir", f"{sentence}: {what}", how_to_fix(key)) for key, what in changed[:LISTED]
    ]
    if len(changed) > LISTED:
        what = f"{sentence}: {len(changed) - LISTED} more values differ"
        problems.append(
            Problem("run.dir", what, "Compare its config.yaml with the output of --print-config.")
        )
    return problems


def how_to_fix(key: str) -> str:
    """The advice on a changed key."""
    usual = "Choose another run.dir, or give the config that the run was started with."
    if key not in CHANGEABLE:
        return usual
    return f"{usual[:-1]}; if the change is intended, 'run.allow_changed=[{key}]' resumes with it."


def with_new_names(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with old keys under their new names."""
    # The user need not mend a file that the run itself wrote: no warnings.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RenamedWarning)
        renamed: dict[str, Any] = rename_old_keys(Settings, config, {})
    return renamed


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with old keys under their new names and the defaults of keys that it lacks, where it is valid."""
    renamed = with_new_names(config)
    try:
        return encode(decode(Settings, renamed))
    except ConfigError:
        return renamed


def changes_since(before: dict[str, Any], now: dict[str, Any], step: int) -> list[str]:
    """One line for each value of the config that is not what it was up to `step`."""
    old, new = flatten(before, ""), flatten(now, "")

    def value(leaves: dict[str, Any], key: str) -> str:
        return one_line(leaves[key]) if key in leaves else "(absent)"

    return [
        f"since step {step}: {key.lstrip('.')} {value(old, key)} -> {value(new, key)}"
        for key in [*new, *(key for key in old if key not in new)]
        if key not in old or key not in new or old[key] != new[key]
    ]


def differences(
    before: dict[str, Any], now: dict[str, Any], allow_changed: Collection[str] = ()
) -> list[tuple[str, str]]:
    """The fixed keys, except those in `allow_changed`, whose values differ: (key, what differs)."""
    changes = []
    for key in (key for key in FIXED if key not in allow_changed):
        old, new = flatten(lookup(before, key), key), flatten(lookup(now, key), key)
        # First what both have: the rest follows from it, as the keys of another kind do.
        for path in sorted(
            old.keys() | new.keys(), key=lambda path: (path not in old or path not in new, path)
        ):
            if old.get(path) != new.get(path):
                changes.append(
                    (
                        key,
                        f"{path} was {one_line(old.get(path))} and is now {one_line(new.get(path))}",
                    )
                )
    for key in OPTIONAL:
        values = lookup(before, key), lookup(now, key)
        if (values[0] is None) != (values[1] is None):
            changes.append(
                (key, f"{key} was {one_line(values[0])} and is now {one_line(values[1])}")
            )
    return changes


def lookup(data: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for part in path.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def flatten(data: Any, path: str) -> dict[str, Any]:
    """Leaf values by dotted path."""
    if isinstance(data, dict) and data:
        return {
            key: leaf
            for name, item in data.items()
            for key, leaf in flatten(item, f"{path}.{name}").items()
        }
    return {path: data}


def one_line(value: Any) -> str:
    """A value as YAML on one line."""
    return str(yaml.safe_dump(value, default_flow_style=True)).splitlines()[0]


MAX_KEYS_LISTED = 3
"""How many keys a message lists."""
SAME_CONFIG_ADVICE = "Start every process with the same config and overrides."


def check_same_config(settings: Settings) -> None:
    """Raise ConfigError, the same on every rank, with the ranks and keys that differ from rank 0. Collective."""
    local = flatten(encode(settings), "")
    ranks, folder = Consensus(doing="begun"), Path(settings.run.dir)
    on_rank0 = ranks.on_rank0(folder, lambda: local)
    different = sorted(
        key for key in local.keys() | on_rank0.keys() if local.get(key) != on_rank0.get(key)
    )
    mismatches = [
        f"{key.lstrip('.')} is {one_line(local.get(key))}, on rank 0 {one_line(on_rank0.get(key))}"
        for key in different
    ]
    problems = [
        Problem(
            "config",
            f"rank {rank} was started with a different config: {'; '.join(keys[:MAX_KEYS_LISTED])}{_more(keys)}",
            SAME_CONFIG_ADVICE,
        )
        for rank, keys in enumerate(ranks.on_all(folder, lambda: mismatches))
        if keys
    ]
    if problems:
        error = ConfigError(problems)
        error.same_on_all_ranks = True
        raise error


def _more(keys: list[str]) -> str:
    return f" and {len(keys) - MAX_KEYS_LISTED} more" if len(keys) > MAX_KEYS_LISTED else ""

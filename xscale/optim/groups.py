"""Parameter groups: settings of the optimizer for the parameters whose names match a pattern."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

from pydantic import Field

from xscale.core.config import Config, FractionBelowOne, NonNegativeFloat, PositiveFloat
from xscale.core.errors import Problem
from xscale.core.requirements import take

NEAREST = 3
"""How many names a problem lists."""


class ParameterGroup(Config):
    match: str = Field(min_length=1)
    """Pattern of full parameter names, such as `*.router.*`: * any characters, ? one, [ab] one of these."""
    lr_factor: NonNegativeFloat = 1.0
    """Multiplier of the learning rate of these parameters, on top of the schedule."""
    weight_decay: NonNegativeFloat | None = None
    """Decoupled weight decay of all these parameters, gains and biases too; null: as without a group."""
    clip_grad_norm: PositiveFloat | None = None
    """Greatest norm of the gradient of these parameters alone, to which it is scaled down; null: they are clipped by
    `train.clip_grad_norm`, together with all others that have no limit of their group."""
    since: FractionBelowOne = 0.0
    """Fraction of the run's steps before which these parameters are frozen."""
    until: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the run's steps from which on these parameters are frozen."""


def group_of(name: str, groups: Sequence[ParameterGroup]) -> int | None:
    """Return the index of the first group whose pattern matches the parameter's full name."""
    return next(
        (index for index, group in enumerate(groups) if fnmatchcase(name, group.match)), None
    )


@dataclass(frozen=True)
class ClipGroup:
    """Parameters whose gradients have one norm and are scaled down by one factor."""

    label: str
    """Key of the config that names them, such as `optimizer.groups.0`."""
    limit: float | None
    """Greatest norm; None: no clipping."""
    members: tuple[int, ...]
    """Indices of the parameters; on a rank without a share of them there are none."""


OTHERS = "optimizer.others"
"""Label of the parameters that no group with a limit contains."""


def clip_groups(
    names: Sequence[str], groups: Sequence[ParameterGroup], limit: float | None
) -> list[ClipGroup]:
    """Split the parameters `names` by the limits of their groups: first those without, which have `limit`.

    There are as many entries on every rank, whatever parameters it holds.
    """
    indices = [group_of(name, groups) for name in names]
    limited = [number for number, group in enumerate(groups) if group.clip_grad_norm is not None]
    without_limit = tuple(member for member, index in enumerate(indices) if index not in limited)
    clipped = [ClipGroup(OTHERS, limit, without_limit)]
    for number in limited:
        members = tuple(member for member, index in enumerate(indices) if index == number)
        clipped.append(
            ClipGroup(f"optimizer.groups.{number}", groups[number].clip_grad_norm, members)
        )
    return clipped


def clip_factor(limit: float | None, norm: float) -> float:
    """Return the factor that scales a gradient of this norm down to `limit`; 1 where it is not above it."""
    return limit / norm if limit is not None and norm > limit else 1.0


def lr_factors(groups: Sequence[ParameterGroup | None], progress: float) -> list[float]:
    """Return the multiplier of the learning rate of weights in these groups, after the fraction `progress` of a run."""
    return [
        1.0 if group is None else group.lr_factor * (group.since <= progress < group.until)
        for group in groups
    ]


def check_groups(
    groups: Sequence[ParameterGroup], names: Sequence[str], path: str
) -> list[Problem]:
    """Return a problem for each group without a parameter; `names` are those of the full model's trained parameters."""
    chosen = {group_of(name, groups) for name in names}
    problems = []
    for index, group in enumerate(groups):
        if group.since >= group.until:
            what = f"is {group.since:g}, and until={group.until:g}: the parameters would never be trained"
            problems.append(
                Problem(f"{path}.{index}.since", what, "Or a value below until.", choices=take(0.0))
            )
        if index in chosen:
            continue
        matched = [name for name in names if fnmatchcase(name, group.match)]
        if matched:
            earlier = groups[group_of(matched[0], groups) or 0].match
            what = (
                f"'{group.match}' matches only parameters of earlier groups, "
                f"such as '{earlier}'; the first match wins"
            )
            reordered = [group, *groups[:index], *groups[index + 1 :]]
            first = [other.model_dump(mode="json", exclude_defaults=True) for other in reordered]
            choices = take(first, first[1:], key=path)
        else:
            what = f"no trained parameter has a name that matches '{group.match}'"
            choices = take(*nearest_patterns(group.match, names))
        problems.append(Problem(f"{path}.{index}.match", what, choices=choices))
    return problems


def nearest_patterns(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that have the most similar words, with * for each number: they are patterns that match."""
    wanted = [word for word in re.split(r"[.*?\[\]!]+", pattern) if word]

    def similarity(candidate: str) -> float:
        words = candidate.split(".")
        return sum(
            max(SequenceMatcher(None, word, other).ratio() for other in words) for word in wanted
        )

    candidates = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return sorted(candidates, key=similarity, reverse=True)[:NEAREST]


def describe_groups(groups: Sequence[ParameterGroup], sizes: Mapping[str, int]) -> list[str]:
    """Return a line for each group, and one for the rest: its settings, tensors and parameters.

    `sizes`: name of each trained parameter of the full model -> its elements. Empty without groups.
    """
    if not groups:
        return []
    members: dict[int | None, list[int]] = {index: [] for index in (*range(len(groups)), None)}
    for name, size in sizes.items():
        members[group_of(name, groups)].append(size)
    lines = []
    for index, held in members.items():
        counts = f"{len(held)} tensors, {sum(held):,} parameters"
        if index is None:
            lines.append(f"optimizer group of all others: {counts}")
            continue
        group = groups[index]
        settings = [f"lr_factor {group.lr_factor:g}"]
        settings += [] if group.weight_decay is None else [f"weight_decay {group.weight_decay:g}"]
        settings += (
            [] if group.clip_grad_norm is None else [f"clip_grad_norm {group.clip_grad_norm:g}"]
        )
        settings += [f"frozen before {group.since:g} of the steps"] * (group.since > 0)
        settings += [f"frozen from {group.until:g} of the steps"] * (group.until < 1)
        lines.append(f"optimizer group '{group.match}' ({', '.join(settings)}): {counts}")
    return lines

"""Search for the fastest layouts that fit: estimate hundreds of candidates, then simulate the best of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from xscale.core.errors import ConfigError, counted
from xscale.core.requirements import divisors_of
from xscale.mesh import axes
from xscale.mesh.axes import Degrees
from xscale.planning.cost_model import CostModel, Estimate, LayoutChoice, bubble, estimate
from xscale.planning.plan import Hardware, plan, vocabulary_of
from xscale.settings.settings import Settings, build_on_meta

SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
STAGES = (1, 2, 3)
"""ZeRO stages; stage 0 is stage 1 with more memory."""
SHORTEST = 1024
"""Least tokens of a sequence shard: larger cp is not tried."""
LARGEST_MICRO_BATCH = 8
"""Largest micro-batch size."""
ATTEMPTS_PER_LAYOUT = 3
"""Simulated layouts per wanted layout, at most."""
Values = Mapping[str, Any]


@dataclass(frozen=True)
class RankedLayout:
    """A layout that fits."""

    overrides: tuple[str, ...]
    """Command-line overrides that turn the recipe into it."""
    plan: dict[str, Any]
    """Plan of the simulated layout."""


def search(
    recipe: Settings,
    change: Callable[[Sequence[str]], Settings | None],
    fixed: frozenset[str],
    world: int,
    hardware: Hardware,
    wanted: int,
    say: Callable[[str], None],
) -> list[RankedLayout]:
    """Find the `wanted` fastest layouts of a recipe; keys in `fixed` keep their value.

    `change` returns the recipe with overrides, or None if its check rejects them. `say` gets progress messages.

    ConfigError if nothing fits.
    """
    device = hardware.resolve(recipe)
    if device is None or not device.timed:
        what = "layouts are ranked by their time, which needs a device of known speed"
        raise ConfigError("--search", what, "Name one with --device, such as --device h100.")
    cost_model = CostModel(build_on_meta(recipe, vocabulary_of(recipe)), recipe, device)
    tried = list(candidates(cost_model, fixed, world))
    room = device.memory if device.name != "cpu" else device.memory / world
    fitting = sorted(
        (entry for entry in tried if entry[1].memory <= room), key=lambda entry: entry[1].seconds
    )
    say(f"{len(tried)} layouts of {counted(world, 'rank')}, {len(fitting)} estimated to fit")
    ranked: list[RankedLayout] = []
    seen: list[Any] = []
    # The recipe's own layout first, so that a slower layout is not listed as the fastest.
    recipe_layout: list[tuple[str, ...]] = [()] if fitting else []
    for overrides in [*recipe_layout, *(changes(recipe, values) for values, _ in fitting)]:
        settings = change(overrides)
        if settings is None or _layout(settings, world) in seen:
            continue
        seen.append(_layout(settings, world))
        say(f"simulating {' '.join(overrides) or 'the layout of the recipe'}")
        planned = plan(settings, world, hardware)
        if planned["fits"] and planned["step_seconds"] is not None:
            ranked.append(RankedLayout(overrides, planned))
        if (
            len(ranked) == wanted + bool(ranked and not ranked[0].overrides)
            or len(seen) == ATTEMPTS_PER_LAYOUT * wanted
        ):
            break
    if not ranked:
        raise ConfigError(
            "--search",
            _nothing(tried, len(seen), world, room),
            "Take more devices, or larger ones.",
        )
    return sorted(ranked, key=lambda layout: layout.plan["step_seconds"])[:wanted]


def _layout(settings: Settings, world: int) -> tuple[Any, ...]:
    """Key that identifies a layout, with -1 resolved."""
    parallel = settings.parallel
    other_settings = {
        name: getattr(parallel, name) for name in type(parallel).model_fields if name != "mesh"
    }
    return axes.resolve(parallel.mesh, world), other_settings, settings.train.micro_batch_size


def candidates(
    cost_model: CostModel, fixed: frozenset[str], world: int
) -> Iterator[tuple[Values, Estimate]]:
    """Yield layouts whose degrees and batch divide, with estimates; the recipe's check may still refuse them."""
    for values in _grid(cost_model, fixed, world):
        choice = _choice(cost_model, values, world)
        if choice is not None and _sensible(cost_model, choice):
            yield values, estimate(cost_model, choice)


def _grid(cost_model: CostModel, fixed: frozenset[str], world: int) -> Iterator[Values]:
    """Yield every combination of the keys that are not fixed."""
    recipe, node = cost_model.settings, min(world, cost_model.device.node)
    parallel, mesh = recipe.parallel, recipe.parallel.mesh
    every: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "parallel.mesh.pp": (mesh.pp, _divisors(world, cost_model.blocks)),
        "parallel.mesh.tp": (mesh.tp, _divisors(world, node)),
        "parallel.mesh.cp": (
            mesh.cp,
            _divisors(world, max(1, recipe.data.sequence_length // SHORTEST)),
        ),
        "parallel.mesh.ep": (mesh.ep, _divisors(cost_model.experts, world)),
        "parallel.mesh.dp_shard": (mesh.dp_shard, (-1,)),
        "parallel.zero.stage": (parallel.zero.stage, STAGES),
        "parallel.pipeline.schedule": (parallel.pipeline.schedule, SCHEDULES),
        "parallel.recompute.every": (parallel.recompute.every, (0, 2, 1)),
        "parallel.recompute.granularity": (parallel.recompute.granularity, ("full", "selective")),
        "parallel.tensor.sequence": (parallel.tensor.sequence, (True,)),
        "train.micro_batch_size": (recipe.train.micro_batch_size, (1, 2, 4, LARGEST_MICRO_BATCH)),
    }
    choices = {
        key: (recipe_value,) if key in fixed else values
        for key, (recipe_value, values) in every.items()
    }
    seen = set()
    for values in product(*choices.values()):
        layout = dict(zip(choices, values, strict=True))
        # Keys without effect in this layout keep the recipe's value, so that no layout comes twice.
        if layout["parallel.mesh.pp"] == 1:
            layout["parallel.pipeline.schedule"] = parallel.pipeline.schedule
        if (
            layout["parallel.recompute.every"] == 0
            and "parallel.recompute.granularity" not in fixed
        ):
            layout["parallel.recompute.granularity"] = "full"
        if layout["parallel.mesh.tp"] == 1:
            layout["parallel.tensor.sequence"] = (
                "parallel.tensor.sequence" in fixed and parallel.tensor.sequence
            )
        if tuple(layout.values()) not in seen:
            seen.add(tuple(layout.values()))
            yield layout


def _divisors(number: int, most: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in divisors_of(number) if divisor <= most)


def _choice(cost_model: CostModel, values: Values, world: int) -> LayoutChoice | None:
    """Return None if the degrees do not give the world size, or the batch does not divide."""
    parallel = cost_model.settings.parallel
    named = {
        key.rpartition(".")[2]: value
        for key, value in values.items()
        if key.startswith("parallel.mesh.")
    }
    mesh = parallel.mesh.model_copy(update=named)
    if axes.check(mesh, world):
        return None
    degrees: Degrees = axes.resolve(mesh, world)
    micro_batch_size = values["train.micro_batch_size"]
    if cost_model.settings.train.batch_size % (micro_batch_size * degrees.dp):
        return None
    return LayoutChoice(
        degrees=degrees,
        stage=values["parallel.zero.stage"],
        schedule=values["parallel.pipeline.schedule"],
        chunks=parallel.pipeline.stages_per_rank,
        every=values["parallel.recompute.every"],
        micro_batch_size=micro_batch_size,
        granularity=values["parallel.recompute.granularity"],
    )


def _sensible(cost_model: CostModel, choice: LayoutChoice) -> bool:
    """Whether the pipeline bubble is at most half."""
    return bubble(choice, choice.micro_batches(cost_model)) <= 0.5


def changes(recipe: Settings, values: Values) -> tuple[str, ...]:
    """The overrides that turn the recipe into the layout: the values that differ."""
    text = []
    for key, value in values.items():
        recipe_value: Any = recipe
        for name in key.split("."):
            recipe_value = getattr(recipe_value, name)
        if recipe_value != value:
            text.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return tuple(text)


def _nothing(
    tried: Sequence[tuple[Values, Estimate]], rehearsed: int, world: int, room: float
) -> str:
    if rehearsed:
        return f"none of the {rehearsed} simulated layouts fits into {room / 1e9:.1f} GB of a rank"
    if not tried:
        return f"no layout of {counted(world, 'rank')} divides this batch and these blocks"
    least = min(estimate.memory for _, estimate in tried)
    layouts = f"{len(tried)} layouts of {counted(world, 'rank')}"
    return f"of {layouts} the smallest needs about {least / 1e9:.1f} GB of {room / 1e9:.1f}"


def format_ranked(ranked: Sequence[RankedLayout]) -> list[str]:
    """Format the layouts as a table, with the overrides of each below."""
    text = [f"{'':>3} {'step':>9} {'MFU':>6} {'memory':>9} {'bubble':>7}  layout"]
    for number, layout in enumerate(ranked, 1):
        plan = layout.plan
        over = " x ".join(
            f"{axis} {degree}"
            for axis, degree in plan["degrees"].items()
            if type(degree) is int and degree > 1
        )
        text.append(
            f"{number:>3} {plan['step_seconds']:>7.3g} s {plan['mfu']:>6.1%} "
            f"{plan['memory_bytes']['total'] / 1e9:>6.1f} GB {plan['bubble']:>7.1%}  {over or 'one process'}"
        )
        text.append(f"{'':>5}{' '.join(layout.overrides) or 'layout of the recipe'}")
    return text


def as_json(layout: RankedLayout) -> dict[str, Any]:
    """Plain values for JSON: the plan with its overrides."""
    return {"overrides": list(layout.overrides), **layout.plan}

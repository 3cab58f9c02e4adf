"""Law 5: a config is data. decode(encode(c)) == c, through JSON and YAML; no callable, no tensor."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pydantic
import pytest

from tests.families import each, entries, family
from tests.laws.tree import ROOT
from xscale.bench.compare import Comparison
from xscale.conformance.alternatives import neighbours
from xscale.core import compose
from xscale.core.config import Config, Slot, decode, encode
from xscale.core.errors import ConfigError
from xscale.core.registry import Entry
from xscale.core.yaml_reader import parse
from xscale.mesh.axes import min_world_size
from xscale.recipe import Recipe, read
from xscale.requirements.check import unsolved

RUNS = sorted((ROOT / "configs/run").glob("*.y*ml"))
# A comparison is a list of variants, a ladder one of sizes, and neither is a part of a run.
COMPARED = {path for name in ("compare", "ladder") for path in (ROOT / "configs" / name).rglob("*.y*ml")}
# The recipe of a variant is a whole run, which tests/commands/test_catalogue.py checks and trains.
VARIANTS = sorted((ROOT / "configs/xformer").glob("*.y*ml"))
PARTIAL = sorted(path for path in (ROOT / "configs").rglob("*.y*ml") if path not in {*RUNS, *VARIANTS, *COMPARED})


def only_data(value: Any) -> bool:
    """Whether `value` is mappings, lists, numbers, strings and nothing."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and only_data(item) for key, item in value.items())
    if isinstance(value, list):
        return all(only_data(item) for item in value)
    return value is None or type(value) in (str, int, float, bool)


def returns(config: Config) -> None:
    """Assert that `config` survives encoding, JSON and YAML."""
    data = encode(config)
    assert only_data(data), data
    for again in (data, json.loads(json.dumps(data)), parse(compose.dump(data), "dumped")):
        assert decode(type(config), again) == config


def held(config: Config) -> Config:
    """A config whose slot `part` holds `config`, as a recipe's slots do."""
    assert config.family is not None
    slot = Annotated[Config, Slot(family(config.family))]
    holder: type[Config] = pydantic.create_model("Holder", __base__=Config, part=(slot, ...))
    return holder.model_validate({"part": config})


@each(entries())
def test_a_parts_config_returns(entry: Entry[Any]) -> None:
    config = entry.part.Config()
    returns(held(config))
    for other in neighbours(config):
        returns(held(other))


@each(entries())
def test_a_parts_config_is_frozen_and_knows_its_part(entry: Entry[Any]) -> None:
    config = entry.part.Config()
    assert (config.kind, config.family) == (entry.name, entry.part.Config.family)
    assert hash(config) == hash(entry.part.Config())
    for name in type(config).model_fields:
        with pytest.raises(pydantic.ValidationError):
            setattr(config, name, getattr(config, name))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_run_returns_and_has_no_problem(path: Path) -> None:
    recipe, composed = read(path, [])
    returns(recipe)
    assert only_data(composed.data)
    world = min_world_size(recipe.parallel.mesh)
    assert [str(one) for one in recipe.check(world)] == []
    assert recipe.is_valid(world)


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_the_recipe_of_a_variant_returns(path: Path) -> None:
    recipe, composed = read(path, [])
    returns(recipe)
    assert only_data(composed.data)


@pytest.mark.parametrize("path", PARTIAL, ids=[str(path.relative_to(ROOT)) for path in PARTIAL])
@pytest.mark.sampled(3)
def test_a_choice_on_one_axis_goes_with_some_run(path: Path, tmp_path: Path) -> None:
    problems = []
    for run in RUNS:
        both = tmp_path / f"{run.stem}.yaml"
        both.write_text(json.dumps({"use": [str(run), str(path)]}), encoding="utf-8")
        try:
            recipe, _ = read(both, [])
        except ConfigError as error:
            # The choice has keys of another model than this run's.
            problems.append(f"{run.name}: {error}")
            continue
        returns(recipe)
        for world in (1, 2, 4, 8):
            found = unsolved(recipe, world)
            if not found:
                return
            problems += [f"{run.name} on {world}: {problem}" for problem in found]
            if not any(problem.path.startswith("parallel") for problem in found):
                break  # no number of ranks would help
    pytest.fail("\n".join(problems))


class Loose(Config):
    made: Any = None
    """Anything."""


@pytest.mark.parametrize("value", [print, {1: 2}, object(), (1, (2, set()))])
def test_what_is_no_data_is_seen(value: Any) -> None:
    assert not only_data(encode(Loose(made=value)))


def test_what_does_not_return_is_seen() -> None:
    class Forgetful(Config):
        length: int = 3
        """Length."""

        @pydantic.model_validator(mode="before")
        @classmethod
        def _forget(cls, data: dict[str, Any]) -> dict[str, Any]:
            return {}

    with pytest.raises(AssertionError):
        returns(Forgetful.model_construct(length=4))


MEANT = {
    ("MeshConfig", "dp_shard", -1): "the ranks that the other axes leave",
    ("Moe.Config", "eval_capacity_factor", math.inf): "an evaluation that drops nothing",
    ("Blockwise.Config", "shifts", -1): "a shift modulo the number of blocks",
    ("HardCodedGaussian.Config", "offsets", -1): "the token before",
    ("HaltingConfig", "bias", -1.0): "tokens that go on for longer at first",
    ("GatesConfig", "bias", -1.0): "tokens that go on for longer at first",
    ("PriorScores.Config", "own", -1.0): "any real weight of equation 22",
    ("PriorScores.Config", "previous", -1.0): "any real weight of equation 22",
    ("GeneralPrior.Config", "own", -1.0): "any real factor of scores",
    ("GeneralPrior.Config", "prior", -1.0): "any real factor of scores",
    ("GeneralPrior.Config", "previous", -1.0): "any real factor of scores",
}
"""Class, field and value: what a value that is impossible elsewhere means here."""


def configs() -> list[type[Config]]:
    """Every config class that a recipe or a comparison may contain: sections and parts."""
    schemas: dict[type[Config], None] = {}
    left: list[type[Config]] = [Recipe, Comparison]
    while left:
        schema = left.pop()
        if schema in schemas:
            continue
        schemas[schema] = None
        for field in schema.model_fields.values():
            for item in (*field.metadata, *nested(field.annotation)):
                if isinstance(item, Slot):
                    left += [entry.part.Config for entry in item.family]
                elif isinstance(item, type) and issubclass(item, Config):
                    left.append(item)
    return sorted(schemas, key=lambda schema: (schema.__module__, schema.__qualname__))


def nested(annotation: Any) -> Iterator[Any]:
    """An annotation, and all that it is made of."""
    yield annotation
    for argument in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from nested(argument)


def impossible_values(schema: type[Config]) -> list[tuple[str, float]]:
    """Fields of a config, and the negative or not finite numbers that it accepts for them."""
    accepted = []
    for name, field in schema.model_fields.items():
        kinds = set(nested(field.annotation)) if get_origin(field.annotation) is not Literal else set()
        in_tuple = any(get_origin(item) is tuple for item in nested(field.annotation))
        numbers = [-1.0, math.nan, math.inf, -math.inf] if float in kinds else [-1] if int in kinds else []
        for number in numbers:
            try:
                schema.model_validate({name: (number,) if in_tuple else number})
            except pydantic.ValidationError as error:
                if any(fault["loc"][:1] == (name,) for fault in error.errors()):
                    continue
            accepted.append((name, number))
    return accepted


def test_impossible_numbers_are_refused() -> None:
    accepted = {(schema.__qualname__, *taken) for schema in configs() for taken in impossible_values(schema)}
    assert sorted(accepted - MEANT.keys(), key=str) == [], "bound these fields, or say in MEANT what the value means"
    assert sorted(MEANT.keys() - accepted, key=str) == [], "these are refused: take them out of MEANT"


def test_a_number_without_bounds_is_seen() -> None:
    class Unbounded(Config):
        model_config = pydantic.ConfigDict(allow_inf_nan=True)
        rate: float = 0.1
        """A rate."""
        sizes: tuple[int, ...] | None = None
        """Sizes."""

    assert [name for name, _ in impossible_values(Unbounded)] == ["rate"] * 4 + ["sizes"]

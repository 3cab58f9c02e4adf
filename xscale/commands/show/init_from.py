"""`xscale init --from`: a recipe from a config of another trainer, checked before it is written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xscale.commands.show.recipe_file import (
    commented_text,
    print_next_commands,
    recipe_target,
    write_new,
)
from xscale.convert.hf.architecture import ModelSizes
from xscale.convert.hf.config_json import CONFIG_JSON, UNKNOWN, read_config_json
from xscale.convert.hf.registry import architecture_of, model_from_hf_config
from xscale.convert.trainers.read_file import read_file
from xscale.convert.trainers.to_recipe import (
    OmittedKey,
    convert,
    recipe_data,
    table_of,
    unset_keys,
)
from xscale.core.compose import compose_mapping
from xscale.core.errors import ConfigError, Problem, counted, plain
from xscale.recipe import read_and_check

VALUE_CHARACTERS = 80
"""Characters of another trainer's value that a line shows."""
TO_DO = "data.source.paths is empty: give the text, or data.prepared."
NO_MODEL = (
    "The file has no model that is known: the recipe has the default sizes. Give the model's config.json by a "
    "second --from, or edit the section model."
)
NO_STEPS = "The file has no number of steps: train.steps is the default, 1000."


def init_from(recipe: str | None, files: list[Path], out: Path | None) -> None:
    """Write a recipe with the keys of `files`: a config of another trainer, the config.json of a model, or both.

    ConfigError where a file is neither, where two are of one kind, where `xscale plan` refuses the recipe,
    and if the file to write exists. Then nothing is written.
    """
    if recipe is not None:
        what = f"the recipe comes from {files[0]}, got {recipe!r} too"
        raise ConfigError("--from", what, "Give a recipe or --from.")
    target = recipe_target(out, files[0].stem)
    settings, left_out, notes, sources = _of_trainer(files)
    data = recipe_data(settings)
    data.setdefault("run", {}).setdefault("dir", f"runs/{target.stem}")
    if (model := _of_model(files)) is not None:
        section, sizes = model
        data["model"] = section
        data["data"]["tokenizer"]["vocabulary"] = sizes.vocabulary
        data["data"].setdefault("sequence_length", sizes.length)
    elif "width" not in data.setdefault("model", {"kind": "decoder"}):
        data["model"].setdefault("kind", "decoder")
        notes.append(NO_MODEL)
    if "steps" not in data.get("train", {}):
        notes.append(NO_STEPS)
    data = _kinds_first(data)
    try:
        read_and_check(compose_mapping(data, []))
    except ConfigError as error:
        what = "its recipe does not pass the check of `xscale plan`, so nothing is written"
        raise ConfigError([Problem(str(files[0]), what), *error.problems]) from None
    notes.append(TO_DO)
    lines = [_sentence(item) for item in left_out]
    heading = f"Written by `xscale init --from {' --from '.join(file.name for file in files)}`, from {sources}."
    opening = [plain(heading), *notes]
    if lines:
        opening += ["Not carried over:", *(f"- {line}" for line in lines)]
    write_new(target, commented_text(data, opening))
    print(f"wrote {target} from {sources}. Edit it, then:")
    print_next_commands(target)
    print("\n".join(notes))
    if lines:
        print(f"{counted(len(lines), 'key')} not carried over:")
        print("\n".join(f"  {line}" for line in lines))


def _is_model(file: Path, data: Mapping[str, Any]) -> bool:
    return file.suffix.lower() == ".json" and "model_type" in data


def _of_trainer(files: list[Path]) -> tuple[dict[str, Any], list[OmittedKey], list[str], str]:
    """Settings, keys left out, notes and the name of what was read, of the files that are no model's."""
    contents = {file: read_file(file) for file in files}
    trainers = [file for file, data in contents.items() if not _is_model(file, data)]
    if len(trainers) > 1 or len(contents) - len(trainers) > 1:
        of_one_kind = [str(file) for file in (trainers if len(trainers) > 1 else contents)]
        what = f"{' and '.join(of_one_kind)} are of one kind"
        raise ConfigError("--from", what, "Give one config of a trainer, and one config.json.")
    if not trainers:
        return {}, [], [], "a model of transformers"
    data = contents[trainers[0]]
    table = table_of(trainers[0], data)
    converted = convert(table, data)
    left_out = [*unset_keys(data, table), *converted.left_out]
    return converted.settings, left_out, [], f"a config of {table.name}"


def _of_model(files: list[Path]) -> tuple[dict[str, Any], ModelSizes] | None:
    """The section `model` and the sizes of the file that is a model's config.json; None if none is."""
    for file in files:
        data = read_file(file)
        if not _is_model(file, data):
            continue
        if file.name != CONFIG_JSON:
            what = (
                "is the config of a model by its key model_type, and must have the name config.json"
            )
            raise ConfigError(str(file), what)
        # Its error names the nearest type.
        architecture_of(data)
        _, section, sizes = model_from_hf_config(read_config_json(file.parent, UNKNOWN))
        return section, sizes
    return None


def _kinds_first(data: Any) -> Any:
    """The same data with `kind` before the other keys of each part, and the sections that a reader looks for first."""
    if isinstance(data, list):
        return [_kinds_first(item) for item in data]
    if not isinstance(data, dict):
        return data
    first = [key for key in ("run", "kind", "model", "data") if key in data]
    return {
        key: _kinds_first(data[key]) for key in [*first, *(key for key in data if key not in first)]
    }


def _sentence(item: OmittedKey) -> str:
    return plain(f"{item.key} = {plain(str(item.value), VALUE_CHARACTERS)}: {item.why}.")

"""The recipes that come with xscale: their names, `xscale list recipes`, and `xscale init`, which writes one."""

import json
import os
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path

from xscale.commands.show import catalogue
from xscale.core.compose import configs_folder
from xscale.core.config_keys.keys import first_sentence
from xscale.core.errors import ConfigError, nearest

RUNS = "run"
"""Folder of the configs that a user starts by their name."""
YAML = (".yaml", ".yml")
SHOWN_BY = {
    RUNS: "`xscale list recipes` shows the recipes, and `xscale init NAME` writes one to a file."
}
"""Folder of configs -> sentence on the command that lists it."""
DEFAULT = "quickstart"
COMMENT_WIDTH = 110
NEAR = 0.75
"""Words of less similarity are no misspellings: `llama` is no misspelling of `glam`, nor `mine` of `admin`."""
FEW = 8
"""At most so many kinds are written beside a key."""


def run_recipes() -> dict[str, Path]:
    """Name -> file of each recipe in configs/run. Imports no torch."""
    return _shipped(RUNS)


def recipe_names() -> list[str]:
    """The names that `xscale train NAME` takes: the recipes of runs, then the variants that have one."""
    return [
        *run_recipes(),
        *(id for id in catalogue.ids() if catalogue.recipe_file(id) is not None),
    ]


def config_file(config: str | Path, folder: str = RUNS) -> Path:
    """Return the file that a user means by `config`: a path, or the name of a file of configs/`folder` without .yaml.

    Of configs/run the name is a recipe's, or the id of a variant. Where there is no folder `configs`, a path in it
    is that of a file that comes with xscale. ConfigError with what is near for a missing one. Imports no torch.
    """
    path = Path(config)
    names = recipe_names() if folder == RUNS else list(_shipped(folder))
    if path.is_dir() and str(config) not in names:
        raise ConfigError(str(path), "this is a folder, and no config", _in_folder(path, folder))
    if path.suffix not in YAML and path.name == str(config) and not path.is_file():
        return recipe_named(str(config)) if folder == RUNS else _named(str(config), folder)
    if os.path.lexists(path):
        return path
    if (shipped := _shipped_file(path)) is not None:
        return shipped
    files = [file.name for file in path.parent.glob("*.y*ml")]
    near = [str(path.with_name(name)) for name in get_close_matches(path.name, files, n=2)]
    near += [f"'{name}' (without .yaml)" for name in get_close_matches(path.stem, names, 2, NEAR)]
    fix = f"Did you mean {' or '.join(near)}? " if near else f"{_listed(path.parent, files)} "
    raise ConfigError(
        str(path),
        "there is no such file",
        fix + SHOWN_BY.get(folder, f"By name there are: {', '.join(names)}."),
    )


def _in_folder(folder: Path, of: str) -> str:
    """A sentence on the config that a folder has: that of its run, or its YAML files; or on those of configs/`of`."""
    if not (config := _config_of_run(folder)).is_file():
        return _listed(folder, [file.name for file in folder.glob("*.y*ml")])
    if of != RUNS:
        return f"It has a run. Give a file as those of configs/{of}: {', '.join(_shipped(of))}."
    return f"It has a run, whose config is {config}: with it, `train` resumes the run."


def _shipped_file(path: Path) -> Path | None:
    """The file that comes with xscale under a path such as configs/run/quickstart.yaml; None in a checkout."""
    if path.parts[:1] != ("configs",) or ".." in path.parts or os.path.lexists("configs"):
        return None
    file = configs_folder().joinpath(*path.parts[1:])
    return file if file.is_file() else None


def _listed(folder: Path, files: list[str]) -> str:
    """A sentence with the YAML files of a folder."""
    if not folder.is_dir():
        return f"There is no folder {folder}."
    if not files:
        return f"The folder {folder} has no YAML file."
    more = f" and {len(files) - FEW} more" if len(files) > FEW else ""
    return f"The YAML files of {folder} are {', '.join(sorted(files)[:FEW])}{more}."


def _shipped(folder: str) -> dict[str, Path]:
    """Name -> file of each config in a folder of the configs that come with xscale."""
    return {file.stem: file for file in sorted((configs_folder() / folder).glob("*.yaml"))}


def _named(word: str, folder: str) -> Path:
    shipped = _shipped(folder)
    if word not in shipped:
        raise ConfigError(
            word,
            f"there is no such file, and configs/{folder} has none of this name",
            nearest(word, shipped),
        )
    return shipped[word]


def recipe_or_run(word: str) -> Path:
    """Return the config that `word` has: that of a run whose folder it is, or the file of `config_file`."""
    file = _config_of_run(word)
    return file if file.is_file() and word not in recipe_names() else config_file(word)


def _config_of_run(folder: str | Path) -> Path:
    return Path(folder, "config.yaml")


def what_else(word: str) -> str:
    """A sentence on a word that was taken for a config key and is a recipe, a famous model, a config file or a run;
    else empty."""
    if word in recipe_names() or Path(word).suffix in YAML:
        return f"It is a recipe: `xscale explain KEY {word}` says where it has a key, and its value there."
    if _config_of_run(word).is_file():
        return f"It is a run: `xscale explain KEY {word}` says where its config has a key."
    # A key such as moe_layers begins as the name of a model does.
    return _famous(word) if word.replace("-", "").isalnum() else ""


FAMOUS = {
    "llama": ("dense_7b", "has LLaMA 2's 7B shape"),
    "mixtral": ("mixtral_8x7b", "has the shape of Mixtral 8x7B"),
    "gptoss": ("gpt_oss_20b", "has the shape of gpt-oss-20b"),
    "nanogpt": ("small", "is a decoder of a million parameters for one machine"),
    "switch": ("switch_1.6t", "has the shape of Switch-C"),
    "bert": ("bert_masked", "is a small masked language model"),
    "roberta": ("bert_masked", "is a small masked language model"),
    "t5": ("t5_span", "is a small encoder-decoder with T5's objective"),
    **dict.fromkeys(
        ("mistral", "qwen", "gemma", "olmo", "phi"),
        ("dense_7b", "has LLaMA 2's 7B shape, which is near"),
    ),
    "deepseek": (
        "mixtral_8x7b",
        "is a large mixture, and configs/model/moe_deepseek.yaml is DeepSeek's layer",
    ),
    **dict.fromkeys(
        ("moe", "nano", "tiny"),
        ("quickstart", "is a small mixture of experts, in minutes on a CPU"),
    ),
}
"""Beginning of a famous model's name, without signs -> the recipe of configs/run that is nearest, and why."""


def _famous(word: str) -> str:
    """A sentence on the recipe that stands for a famous model; empty for a word that names none."""
    letters = "".join(letter for letter in word.lower() if letter.isalnum())
    recipe, why = next(
        (stand_in for name, stand_in in FAMOUS.items() if letters.startswith(name)), ("", "")
    )
    return f"The recipe '{recipe}' {why}." if recipe else ""


DATA = (".txt", ".jsonl", ".json", ".parquet", ".csv", ".tsv", ".bin")
"""Ends of files that are text or data, and no configs."""


def _near(word: str) -> str:
    """A sentence on the recipe or variant whose name is near, in any case, or begins so; or on what is no name."""
    if word.lower() in ("help", "?"):
        return "`xscale --help` shows the commands, and `xscale COMMAND --help` its options."
    if Path(word).suffix in DATA:
        return f"A config is a YAML file or a recipe's name; 'data.source={{kind: text, paths: [{word}]}}' is text."
    names = recipe_names()
    lower = word.lower()
    close = get_close_matches(lower, names, n=1, cutoff=NEAR)
    close = close or [name for name in names if len(word) > 2 and name.startswith(lower)][:3]
    return (
        f"Did you mean {' or '.join(map(repr, close))}?"
        if close
        else "`xscale list recipes` and `xscale list xformers` show them."
    )


def recipe_named(word: str) -> Path:
    """Return the recipe that `xscale train WORD` takes: one of configs/run, or a variant's.

    ConfigError with the nearest name for an unknown one. Imports no torch.
    """
    runs = run_recipes()
    if word in runs:
        return runs[word]
    if not catalogue.ids_like(word):
        fix = _famous(word) or _near(word)
        raise ConfigError(word, "there is no such file, and no recipe or variant of this name", fix)
    return catalogue.variant_named(word)


@dataclass(frozen=True)
class RecipeSummary:
    """One recipe of configs/run, as `xscale list recipes --json` prints it."""

    name: str
    summary: str
    """The first sentence of the file's heading."""
    parameters: int
    active_parameters: int
    """Parameters that one token uses."""
    ranks: int
    """The fewest ranks on which its layout is possible."""
    tokens_per_step: int
    precision: str
    """Number format of the computation."""
    source: str
    """Kind of the corpus."""
    needs_paths: bool
    """Whether `data.source.paths` must be given."""


def summaries() -> list[RecipeSummary]:
    """Return every recipe of configs/run with its size and the ranks that it wants."""
    from xscale.measure.flops import size
    from xscale.mesh.axes import min_world_size
    from xscale.planning import vocabulary_of
    from xscale.recipe import read
    from xscale.settings.settings import build_on_meta

    table = []
    for name, file in run_recipes().items():
        recipe, _ = read(file, [])
        counted = size(build_on_meta(recipe, vocabulary_of(recipe)))
        table.append(
            RecipeSummary(
                name=name,
                summary=first_sentence(heading(file)),
                parameters=counted.parameters,
                active_parameters=counted.active,
                ranks=min_world_size(recipe.parallel.mesh),
                tokens_per_step=recipe.train.batch_size * recipe.sample_tokens,
                precision=recipe.precision.compute,
                source=str(recipe.data.source.kind),
                needs_paths=not getattr(recipe.data.source, "paths", ("the library's",)),
            )
        )
    return sorted(
        table, key=lambda entry: (entry.ranks, entry.precision != "float32", entry.parameters)
    )


def show(*, as_json: bool) -> None:
    """Print the recipes of configs/run, the smallest first, and where those of the variants are."""
    from xscale.observe.format import quantity

    table = summaries()
    if as_json:
        print(json.dumps([asdict(entry) for entry in table], indent=2))
        return
    print(
        f"recipes: {len(table)}; `xscale train NAME` trains one, `xscale init NAME` writes it to a file of your own"
    )
    for entry in table:
        active = (
            ""
            if entry.active_parameters == entry.parameters
            else f" ({quantity(entry.active_parameters)} active)"
        )
        facts = [
            f"{quantity(entry.parameters)} parameters{active}",
            f"{entry.ranks} {'rank' if entry.ranks == 1 else 'ranks'}",
            f"{quantity(entry.tokens_per_step)} tokens a step in {entry.precision}",
            "data.source.paths must be given" if entry.needs_paths else f"source {entry.source}",
        ]
        print(f"  {entry.name}: {entry.summary}\n    {'; '.join(facts)}")
    variants = len(recipe_names()) - len(table)
    print(
        f"{variants} variants of Transformers have a small recipe each, such as bigbird: `xscale list xformers`"
    )


def heading(file: Path) -> str:
    """The comment at the head of a recipe as one text, without indented lines, which are commands."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("#  "):
            lines.append(line.removeprefix("#").strip())
    return " ".join(lines)

"""Each variant of the catalogue is listed once; each recipe is valid, trains as it stands and keeps to its traits."""

import itertools
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.made import ready
from xscale.cli.main import main
from xscale.commands.show import catalogue, find_modes, list_parts, modes, recipes
from xscale.core import compose
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.core.yaml_reader import parse
from xscale.nn.ffn.moe.router.router import ROUTERS
from xscale.nn.model.model import MODELS
from xscale.nn.tokens import Tokens
from xscale.recipe import Recipe, read
from xscale.settings.settings import About
from xscale.train.run import train

FOLDER = Path(__file__).parents[2] / "configs" / "xformer"
RECIPES = sorted(FOLDER.glob("*.yaml"))
REQUIRED = {
    "id",
    "name",
    "kind",
    "status",
    "recipe",
    "parts",
    "causal",
    "bidirectional",
    "cross",
    "deviations",
    "paper",
}
LENGTH, VOCABULARY = 256, 64
MISSING = next(id for id in catalogue.ids() if catalogue.recipe_file(id) is None)
"""A variant without a recipe."""


def recipe_of(file: Path) -> Recipe:
    return read(file, [])[0]


def test_each_id_has_one_entry() -> None:
    items = parse(catalogue.ROWS.read_text(encoding="utf-8"), "")
    ids = catalogue.ids()
    assert len(ids) == len(set(ids)) == len(items) == 199
    with_recipe = {item for item in items if isinstance(item, str)}
    assert with_recipe == {file.stem for file in RECIPES}, "a row has a recipe or the fields of a missing one"
    missing = [decode(About, item) for item in items if not isinstance(item, str)]
    assert all(about.why and not about.deviations for about in missing)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_valid_and_headed_by_what_it_is(file: Path) -> None:
    recipe = recipe_of(file)
    assert recipe.check() == []
    about, row = recipe.about, catalogue.row(file.stem)
    assert about is not None
    assert about.id == file.stem
    assert recipe.run.dir == f"runs/xformer/{file.stem}"
    assert row.status == ("partly" if about.why else "works"), "a row is as good as its recipe"
    assert row.deviations[: len(about.deviations)] == about.deviations
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[:2] == [f"# {about.paper}.", f"# {about.summary}"]
    flags = "; ".join(
        f"{name}: {'yes' if getattr(row, name) else 'no'}" for name in ("causal", "bidirectional", "cross")
    )
    assert lines[2].lower().startswith(f"# {flags}. differs from the paper: ")
    assert not lines[3].startswith("#")


@pytest.mark.long
def test_the_rows_claim_the_modes_in_which_they_load() -> None:
    assert modes.TABLE.read_text(encoding="utf-8") == find_modes.drawn(), (
        "run: python -m xscale.commands.show.find_modes --write"
    )


@pytest.mark.parametrize(
    ("id", "loads"),
    [
        ("bigbird", ["bidirectional"]),
        ("sortcut-sinkhorn", ["bidirectional"]),
        ("yoso", ["bidirectional"]),
        ("guided-attention-loss", ["bidirectional"]),
        ("deberta-disentangled", ["bidirectional"]),
        ("rfa-gate", ["causal"]),
        ("base-layers", ["causal", "bidirectional", "cross"]),
        ("clm-objective", ["causal"]),
    ],
)
def test_a_mode_that_the_config_refuses_is_not_claimed(id: str, loads: list[str]) -> None:
    assert find_modes.found(FOLDER / f"{id}.yaml") == loads
    row = catalogue.row(id)
    assert [mode for mode in find_modes.BASES if getattr(row, mode)] == loads


def test_list_prints_an_object_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    list_parts.show("xformers", as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == catalogue.ids()
    assert all(row.keys() >= REQUIRED and row["name"] and row["paper"] and row["summary"] for row in rows)
    assert all(row["why"] for row in rows if row["status"] != "works")
    for row in rows:
        if row["status"] == "missing":
            assert (row["recipe"], row["parts"], row["causal"]) == (None, [], None)
        else:
            assert row["recipe"] == f"configs/xformer/{row['id']}.yaml"
            assert {"model", "objective", "optimizer"} <= {part.partition(":")[0] for part in row["parts"]}
    bigbird = next(row for row in rows if row["id"] == "bigbird")
    assert {"model:encoder", "core:block_sparse", "pattern:bigbird"} <= set(bigbird["parts"])
    list_parts.show("xformers", as_json=True, kind="moe")
    of_kind = json.loads(capsys.readouterr().out)
    assert of_kind == [row for row in rows if row["kind"] == "moe"]
    assert 0 < len(of_kind) < len(rows)
    with pytest.raises(ConfigError, match="Did you mean 'position'"):
        list_parts.show("xformers", as_json=True, kind="positions")
    with pytest.raises(ConfigError, match="only variants have a kind"):
        list_parts.show("core", as_json=True, kind="moe")


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("bigbird", "bigbird is a pattern of the core block_sparse; recipe: configs/xformer/bigbird.yaml"),
        ("BigBird", "BigBird has the recipe configs/xformer/bigbird.yaml"),
        ("reformer", "reformer is a core; recipe: configs/xformer/reformer-lsh.yaml"),
        ("hash", "hash is a router of the ffn moe; recipe: configs/xformer/hash-layers.yaml"),
        ("sinkhorn", "sinkhorn is a core and a router of the ffn moe"),
        ("rms", "rms is a norm"),
        ("wibble", ""),
    ],
)
def test_a_word_has_its_place(word: str, place: str) -> None:
    assert catalogue.where(word) == place


def test_list_says_what_a_word_is(capsys: pytest.CaptureFixture[str]) -> None:
    list_parts.show("bigbird", as_json=False)
    assert capsys.readouterr().out.startswith(catalogue.where("bigbird"))
    list_parts.show("hash", as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert ([row["name"] for row in answer["router"]], [row["id"] for row in answer["xformers"]]) == (
        ["hash"],
        ["hash-layers"],
    )
    list_parts.show(MISSING, as_json=False)
    assert f"{MISSING} is missing: " in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"no family, part or variant\. Did you mean 'longformer'"):
        list_parts.show("longfromer", as_json=False)
    with pytest.raises(ConfigError, match=r"Families: model, mixer, .*; variants: xformers\."):
        list_parts.show("wibble", as_json=False)


def test_a_name_is_one_thing() -> None:
    """`xscale train NAME` takes a recipe of configs/run or a variant, and no name is both."""
    names = recipes.recipe_names()
    assert len(set(names)) == len(names)
    assert {name: ids for name in recipes.run_recipes() if (ids := catalogue.ids_like(name))} == {}
    assert recipes.recipe_named("bert") == FOLDER / "bert.yaml"


def test_an_id_stands_for_its_recipe() -> None:
    assert catalogue.variant_named("bigbird") == FOLDER / "bigbird.yaml"
    assert catalogue.variant_named("reformer") == FOLDER / "reformer-lsh.yaml"
    with pytest.raises(ConfigError, match=r"no variant of this name\. Did you mean 'bigbird'"):
        catalogue.variant_named("bigbrd")
    with pytest.raises(ConfigError, match="Give one of: performer-favor, performer-favor-plus"):
        catalogue.variant_named("performer")
    with pytest.raises(ConfigError, match=f"the variant {MISSING} is missing: "):
        catalogue.variant_named(MISSING)


def test_a_wheel_has_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "configs" in wheel["only-include"]
    installed = tmp_path / "xscale"
    shutil.copytree(FOLDER.parent, tmp_path / wheel["sources"]["configs"])
    monkeypatch.setattr(compose, "PACKAGE", installed)
    recipe = catalogue.variant_named("bigbird")
    assert recipe == installed / "configs" / "xformer" / "bigbird.yaml"
    assert recipe_of(recipe) == recipe_of(FOLDER / "bigbird.yaml"), "what it uses is found there too"


def test_a_kind_of_another_family_is_refused_with_its_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["xscale", "plan", "rope", "--check", "model.stack.block.mixer.core=bigbird"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert f"there is no core of kind 'bigbird'. {catalogue.where('bigbird')}." in text


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A `data` section that leaves length and documents to the recipe: the text of a few modules, prepared once."""
    paths = [f"{Path(json.__file__).parent}/*.py"]
    return {
        "source": {"kind": "text", "paths": paths},
        "tokenizer": {"kind": "sentencepiece", "vocabulary": 512},
        "folder": str(tmp_path_factory.mktemp("data")),
        "validation": 0.3,
        "workers": 1,
    }


def pairs_of(folder: Path) -> str:
    """Write a file of pairs, each line of the corpus with the one after it."""
    files = sorted(Path(json.__file__).parent.glob("*.py"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [{"source": one, "target": two} for one, two in itertools.pairwise(lines)]
    made = folder / "pairs.jsonl"
    made.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(made)


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_trains(file: Path, corpus: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_of(file)
    sections = encode(recipe)
    sections["run"] |= {"dir": str(tmp_path), "device": "cpu"}
    sections["data"] |= corpus
    if recipe.has_pairs:
        sections["data"] |= {"source": {"kind": "pairs", "paths": [pairs_of(tmp_path)]}}
    sections["train"] |= {"steps": 2, "batch_size": 2, "micro_batch_size": 2, "eval_every": 0}
    sections["schedule"] |= {"warmup_steps": 0}
    sections["observe"] |= {"progress": False, "tensorboard": False, "report": False}
    assert train(decode(Recipe, sections)) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 2
    assert all(0 < loss < 12 for loss in losses)


def logits_before(model: nn.Module, ids: Tensor, cut: int, *, source: bool) -> Tensor:
    """Logits of the first `cut` tokens, in training: with the noise of one seed."""
    tokens = Tokens.from_ids(ids, rng_seed=3)
    read_tokens = Tokens.from_ids(torch.arange(40)[None], rng_seed=3) if source else None
    logits: Tensor = model(tokens, source=read_tokens)
    return logits[:, :cut]


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_causal_recipe_does_not_leak_in_training(file: Path) -> None:
    recipe = recipe_of(file)
    traits = MODELS.of(recipe.model).traits
    parts = catalogue.parts_of(recipe)
    routers = [ROUTERS.get(name).traits for family, name in parts if family == "router"]
    if not (traits.causal and catalogue.row(file.stem).causal and all(router.causal for router in routers)):
        return
    model = ready(MODELS.build(recipe.model, VOCABULARY, LENGTH)).train()
    # One sample: the places in an expert go to the earlier tokens of the micro-batch, which another sample may have.
    ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    for cut in (1, 100, 255):
        changed = torch.cat((ids[:, :cut], (ids[:, cut:] + 7) % VOCABULARY), 1)
        before, after = (logits_before(model, tokens, cut, source=traits.source) for tokens in (ids, changed))
        torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)

"""Recipes by name, `xscale list recipes`, and `xscale init`: a file with the same values, and nothing overwritten."""

import json
import os
import re
from pathlib import Path

import pytest

import xscale
from tests.commands.test_catalogue import MISSING
from xscale.cli.main import main
from xscale.commands.show import list_parts, recipe_file, recipes
from xscale.commands.show.explain import config_keys
from xscale.core.config import encode
from xscale.core.errors import ConfigError
from xscale.recipe import read

ROOT = Path(__file__).parents[2]
RUNS = sorted((ROOT / "configs/run").glob("*.yaml"))
NAMES = [*(file.stem for file in RUNS), "bigbird", "luna", "glam", "reformer-lsh", "multi-scale-transformer"]


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """The sentence with which a command is refused; it prints nothing else and its status is 2."""
    monkeypatch.setattr("sys.argv", ["xscale", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return output.err


def test_a_name_stands_for_its_recipe() -> None:
    assert recipes.recipe_named("quickstart") == ROOT / "configs/run/quickstart.yaml"
    assert recipes.recipe_named("switch_1.6t") == ROOT / "configs/run/switch_1.6t.yaml"
    assert recipes.recipe_named("bigbird") == ROOT / "configs/xformer/bigbird.yaml"
    with pytest.raises(ConfigError, match=r"no recipe or variant of this name\. Did you mean 'quickstart'"):
        recipes.recipe_named("quikstart")
    with pytest.raises(ConfigError, match="`xscale list recipes`"):
        recipes.recipe_named("xyzzy")


@pytest.mark.parametrize(
    ("config", "folder", "fix"),
    [
        # Near: a recipe by its name, a file of the same folder, or both.
        ("quickstart.yaml", "run", "Did you mean 'quickstart' (without .yaml)? `xscale list recipes` shows"),
        ("configs/run/quikstart.yaml", "run", "Did you mean 'quickstart' (without .yaml)?"),
        ("mine/experment.yaml", "run", "Did you mean mine/experiment.yaml?"),
        ("mine/quikstart.yml", "run", "Did you mean mine/quickstart.yml or 'quickstart' (without .yaml)?"),
        # Nothing is near.
        ("mine/xyzzy.yaml", "run", "The YAML files of mine are experiment.yaml, quickstart.yml. `xscale list recipes`"),
        ("xyzzy.yaml", "run", "The folder . has no YAML file. `xscale list recipes`"),
        ("there/xyzzy.yaml", "run", "There is no folder there. `xscale list recipes`"),
        ("experts.yml", "compare", "Did you mean 'experts' (without .yaml)? By name there are: experts, memory."),
        ("byts", "ladder", "configs/ladder has none of this name. Did you mean 'bytes'?"),
    ],
)
def test_a_missing_file_is_refused_with_what_is_near(
    config: str, folder: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("experiment.yaml", "quickstart.yml"):
        (tmp_path / "mine" / name).touch()
    with pytest.raises(ConfigError) as refusal:
        recipes.config_file(config, folder)
    assert str(refusal.value).startswith(f"{config}: there is no such file")
    assert fix in str(refusal.value)


def test_comparisons_and_ladders_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipes.config_file("experts", "compare") == ROOT / "configs/compare/experts.yaml"
    assert recipes.config_file("bytes", "ladder") == ROOT / "configs/ladder/bytes.yaml"
    # A file of that name in the working directory comes first.
    (tmp_path / "bytes").touch()
    assert recipes.config_file("bytes", "ladder") == Path("bytes")


def test_python_and_the_command_line_know_the_same_names() -> None:
    # The name has a dot in it, which is no ending of a file.
    assert xscale.load_recipe("switch_1.6t").model == read(ROOT / "configs/run/switch_1.6t.yaml", [])[0].model
    with pytest.raises(ConfigError, match=r"Did you mean 'quickstart' \(without .yaml\)"):
        xscale.load_recipe("quickstart.yaml")


def test_list_has_each_recipe_with_its_size_and_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    list_parts.show("recipes", as_json=True)
    table = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(table) == {file.stem for file in RUNS}
    # The weights that were published, to the parameter, and the GPUs that the recipe's heading says.
    assert (table["mixtral_8x7b"]["parameters"], table["mixtral_8x7b"]["ranks"]) == (46_702_792_704, 64)
    assert (table["quickstart"]["ranks"], table["quickstart"]["tokens_per_step"]) == (1, 8 * 512)
    with_paths = {file.stem for file in RUNS if "data/text" in file.read_text(encoding="utf-8")}
    assert {name for name, row in table.items() if row["needs_paths"]} == with_paths
    list_parts.show("recipes", as_json=False)
    text = capsys.readouterr().out
    assert "  bert_masked: BERT (Devlin et al. 2019): a bidirectional encoder predicts masked tokens.\n" in text
    assert "46.7G parameters (12.9G active); 64 ranks; 4.19M tokens a step in bfloat16; data.source.paths" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_file_that_init_writes_is_the_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe_file.init(name, None)
    assert os.listdir() == [f"{name}.yaml"]
    written, composed = read(Path(f"{name}.yaml"), [])
    original, _ = read(recipes.recipe_named(name), [])
    unlike = {"about": None, "run": None}
    assert encode(written) | unlike == encode(original) | unlike
    assert encode(written.run) == encode(original.run) | {"dir": f"runs/{name}"}
    assert len(composed.files) == 1, "it uses no other file"
    lines = Path(f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    schema = re.fullmatch(r"# yaml-language-server: \$schema=file://(\S+)", lines[0])
    assert schema is not None
    assert Path(schema[1]) == ROOT / "configs/recipe.schema.json"
    assert f"xscale train {name}.yaml" in capsys.readouterr().out


def test_init_gives_the_file_a_run_of_its_name(tmp_path: Path) -> None:
    recipe_file.init("quickstart", tmp_path / "my_first.yaml")
    written, _ = read(tmp_path / "my_first.yaml", [])
    assert written.run.dir == "runs/my_first", "runs/quickstart may have a run, which would be resumed"


def test_every_key_has_its_sentence(tmp_path: Path) -> None:
    recipe_file.init("quickstart", tmp_path / "mine.yaml")
    lines = (tmp_path / "mine.yaml").read_text(encoding="utf-8").splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r" *(- )?\w+:", line)]
    assert len(keys) > 50
    assert [lines[number] for number in keys if not lines[number - 1].lstrip().startswith("# ")] == []
    (depth,) = config_keys().at("model.stack.depth")
    assert lines[lines.index("    depth: 4") - 1] == f"    # {depth.sentence}"
    assert r"""    prompts: ['def ', "import os\n", 'class ']""" in lines


def test_init_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart.yaml").write_text("mine: 1\n", encoding="utf-8")
    assert "quickstart.yaml: the file exists, and is not overwritten" in refused(capsys, monkeypatch, "init")
    Path("link.yaml").symlink_to("nowhere.yaml")
    assert "link.yaml: the file exists" in refused(capsys, monkeypatch, "init", "--out", "link.yaml")
    assert Path("quickstart.yaml").read_text(encoding="utf-8") == "mine: 1\n"
    assert sorted(os.listdir()) == ["link.yaml", "quickstart.yaml"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["quickstrat"], "Did you mean 'quickstart'?"),
        ([MISSING], f"the variant {MISSING} is missing"),
        (
            ["quickstart", "--out", "nowhere/mine.yaml"],
            "nowhere/mine.yaml: cannot be written: No such file or directory",
        ),
        (["quickstart", "--out", "mine"], "--out: must be a .yaml file, got 'mine'. Give --out mine.yaml."),
        (["quickstart", "--out", "folder.yaml"], "folder.yaml: the file exists"),
        (["quickstart", "--out", f"{'x' * 300}.yaml"], "cannot be written: File name too long"),
        (["quickstart", "--out", "/dev/null/mine.yaml"], "/dev/null/mine.yaml: cannot be written: Not a directory"),
    ],
)
def test_init_refuses_with_a_sentence_and_writes_nothing(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.yaml").mkdir()
    assert sentence in refused(capsys, monkeypatch, "init", *words)
    assert os.listdir() == ["folder.yaml"]


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def no_space(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.link", no_space)
    assert "quickstart.yaml: cannot be written: No space left on device" in refused(capsys, monkeypatch, "init")
    assert os.listdir() == []


def test_a_file_of_ones_own_may_use_the_configs_of_xscale(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("use: [run/small, data/stdlib]\ntrain: {steps: 7}\n", encoding="utf-8")
    recipe, composed = read(tmp_path / "mine.yaml", [])
    assert recipe.train.steps == 7
    assert str(ROOT / "configs/run/small.yaml") in {str(file) for file in composed.files}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/small.yaml").write_text("train: {batch_size: 32}\n", encoding="utf-8")
    assert read(tmp_path / "mine.yaml", [])[0].train.batch_size == 32, "one's own is found first"

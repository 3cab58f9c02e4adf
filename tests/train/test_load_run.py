"""A run is used on one process: its layout does not bind there, and its plugins are imported only when asked for."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.distributed import Pool
from tests.faults.test_forged import write_forged
from tests.train.tiny import recipe, run
from xscale.checkpoint.load import load_tensors, read_config
from xscale.cli.main import app
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.evaluate.evaluate_run import evaluate_run
from xscale.mesh.environment import read_rank_info
from xscale.optim.schedule import SCHEDULES

MODEL = {
    "kind": "decoder",
    "width": 32,
    "stack": {
        "depth": 2,
        "block": {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "gated", "hidden": 48}},
    },
}
TRAIN = {"steps": 1, "batch_size": 8, "micro_batch_size": 2, "eval_every": 0}
MIXTURE = "model.stack.block.ffn={kind: moe, experts: 2, expert: {kind: gated, hidden: 48}}"


def call(*words: object) -> str:
    """Run the command line; returns what it prints on stdout, and raises a ConfigError."""
    found = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(found.exception, ConfigError):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


def train_with_layout(folder: Path, layout: dict[str, Any]) -> int:
    return run(recipe(folder, model=MODEL, train=TRAIN, parallel=layout))


@pytest.mark.parametrize("mesh", ["tp", "pp"])
def test_a_layout_does_not_bind_one_process(tmp_path: Path, pool: Pool, mesh: str) -> None:
    layout = {"mesh": {mesh: 2}}
    assert pool.run(train_with_layout, 2, tmp_path, layout) == [EXIT_DONE] * 2
    folder = tmp_path / "run"
    assert evaluate_run(folder, 4)["step"] == 1
    assert call("generate", folder, "--prompt", "def ", "--tokens", 2).startswith("def ")
    assert call("generate", folder, "def ", "--tokens", 2, "--top-p", 0.9, "--repetition-penalty", 1.2).startswith(
        "def "
    )
    call("checkpoint", "export", folder, tmp_path / "universal", "--to", "deepspeed-universal")
    output = call("checkpoint", "upcycle", folder, tmp_path / "mixture", MIXTURE)
    assert "validation loss of" in output
    config = yaml.safe_load((tmp_path / "mixture" / "config.yaml").read_text())
    assert config["parallel"]["mesh"][mesh] == 2, "the new run keeps the layout"
    assert (tmp_path / "mixture" / "tokenizer" / "fingerprint.json").is_file()
    assert load_tensors(tmp_path / "mixture" / "checkpoints" / "step-00000000")


PLUGIN = '''
from pathlib import Path

from xscale.optim.schedule import SCHEDULES, Constant, ScheduleTraits

Path(__file__).with_name("imported").touch()


@SCHEDULES.register("of_a_plugin", traits=ScheduleTraits(bounded=False))
class OfAPlugin(Constant):
    """Config `constant`."""
'''


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    observe = {"report": True, "tensorboard": False, "progress": False}
    assert run(recipe(folder, model=MODEL, train=TRAIN, observe=observe)) == EXIT_DONE
    return folder


@pytest.fixture
def with_plugin(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose config names a plugin that writes the file `imported` when it is imported."""
    shutil.copytree(trained / "run", tmp_path / "run")
    (tmp_path / "plugin_of_a_test.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(file.read_text()) | {"plugins": ["plugin_of_a_test"]}
    file.write_text(yaml.safe_dump(config))
    yield tmp_path
    sys.modules.pop("plugin_of_a_test", None)
    SCHEDULES._entries.pop("of_a_plugin", None)


COMMANDS: dict[str, list[object]] = {
    "eval": ["--sequences", 2],
    "generate": ["--tokens", 1],
    "checkpoint show": [],
    "checkpoint ls": [],
    "checkpoint verify": [],
    "checkpoint upcycle": ["NEW", MIXTURE],
    "checkpoint export": ["NEW", "--to", "deepspeed-universal"],
    "checkpoint consolidate": ["NEW"],
    "checkpoint diff": ["RUN"],
    "checkpoint prune": ["--keep-last", 1],
    "report": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_a_run_imports_nothing_that_it_names(with_plugin: Path, command: str) -> None:
    folders = {"NEW": with_plugin / "new", "RUN": with_plugin / "run"}
    arguments = [folders.get(str(word), word) for word in COMMANDS[command]]
    call(*command.split(), with_plugin / "run", *arguments)
    assert not (with_plugin / "imported").exists()


def test_a_run_that_needs_its_plugin_says_how_to_import_it(with_plugin: Path) -> None:
    file = with_plugin / "run" / "config.yaml"
    config = yaml.safe_load(file.read_text()) | {"schedule": {"kind": "of_a_plugin"}}
    file.write_text(yaml.safe_dump(config))
    for command in ("eval", "generate", "checkpoint upcycle"):
        arguments = [with_plugin / "new", MIXTURE] if "upcycle" in command else []
        with pytest.raises(ConfigError, match=r"plugins, which are not imported: plugin_of_a_test\. Give --plugins"):
            call(*command.split(), with_plugin / "run", *arguments)
    assert not (with_plugin / "imported").exists()
    call("eval", with_plugin / "run", "--sequences", 2, "--plugins")
    assert (with_plugin / "imported").exists()


def test_an_export_imports_plugins_when_it_is_told(with_plugin: Path) -> None:
    (checkpoint,) = (with_plugin / "run" / "checkpoints").glob("step-*")
    config = read_config(checkpoint) | {"plugins": ["plugin_of_a_test"]}
    config["model"]["stack"]["block"]["mixer"]["core"] = {"kind": "of_a_plugin"}
    write_forged(checkpoint, "config.json", config)
    arguments = ["checkpoint", "export", with_plugin / "run", with_plugin / "new", "--to", "hf"]
    with pytest.raises(ConfigError, match=r"plugins, which are not imported: plugin_of_a_test\. Give --plugins"):
        call(*arguments)
    assert not (with_plugin / "imported").exists()
    # This plugin has no such core, so that the export ends with the part that is unknown even so.
    with pytest.raises(ConfigError, match="no core of kind 'of_a_plugin'") as caught:
        call(*arguments, "--plugins")
    assert "--plugins" not in str(caught.value)
    assert (with_plugin / "imported").exists()


def evaluated(folder: Path, source: str | None, elsewhere: bool = False) -> Any:
    """Evaluate on this rank; with `elsewhere`, rank 1 is on a machine that has no folder of rank 0's."""
    is_dir = Path.is_dir
    if elsewhere and read_rank_info().rank == 1:
        Path.is_dir = lambda path: "xscale-eval-" not in str(path) and is_dir(path)  # type: ignore[method-assign]
    try:
        return evaluate_run(folder, 6, source=source)
    except ConfigError as error:
        return str(error), error.same_on_all_ranks
    finally:
        Path.is_dir = is_dir  # type: ignore[method-assign]


def test_several_processes_evaluate_together(
    trained: Path, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("def evaluate(model, sequences):\n    return model\n" * 40)
    for source in (None, str(tmp_path / "text.txt")):
        alone, together = evaluate_run(trained / "run", 6, source=source), None
        for together in pool.run(evaluated, 2, trained / "run", source):
            assert together == pytest.approx(alone, rel=1e-6)
    (first, second) = pool.run(evaluated, 2, trained / "run", str(tmp_path / "text.txt"), elsewhere=True)
    assert first == second
    assert "which processes on other machines do not see. Evaluate on one machine" in first[0]
    assert first[1], "one rank speaks for all"

"""Law 10 for parts and configs: a part is in a file of its name or in one that names it; sentences; light imports."""

import functools
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import xscale
from tests.families import each, entries
from xscale.core import config as core_config
from xscale.core.config import Config, sentences
from xscale.core.registry import Entry

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch numpy sentencepiece matplotlib tensorboard transformers deepspeed megatron mpi4py wandb triton safetensors "
    "fla liger_kernel"
)
HEAVY_TO_CHECK = (
    "torch.distributed.tensor torch.distributed.fsdp torch.distributed.checkpoint torch.distributed.pipelining "
    "torch._dynamo torch._inductor sympy scipy sentencepiece matplotlib tensorboard transformers deepspeed megatron "
    "mpi4py wandb safetensors xscale.planning xscale.train.setup xscale.train.run"
)
"""Modules that a run needs and the check of its config does not: a submission waits for that check."""
CHECK = f"""
from pathlib import Path
from xscale.recipe import read
recipe, _ = read(Path({str(Path(__file__).parents[2] / "configs/run/quickstart.yaml")!r}), [])
assert not recipe.check(1)
"""


HEAVY_TO_TRAIN = (
    "torch._dynamo torch._inductor torch.onnx scipy pandas matplotlib PIL transformers tokenizers huggingface_hub "
    "datasets pyarrow deepspeed megatron mpi4py wandb mlflow safetensors fla liger_kernel torchao lm_eval accelerate "
    "sacrebleu sklearn xscale.convert xscale.bench "
    "xscale.parallel.engine.deepspeed.engine"
)
"""Modules that the first step of the quickstart does not use: they are imported by the run that has them, or later."""
TRAIN = f"""
import os, sys, tempfile
from unittest.mock import patch
from xscale.cli.main import main
import xscale.train.loop
os.chdir(tempfile.mkdtemp())
sys.argv = ["xscale", "train", "quickstart", "train.steps=1", "train.batch_size=2", "train.micro_batch_size=1"]
sys.argv += ["data.sequence_length=64", "data.workers=1", "data.tokenizer.vocabulary=1024", "run.dir=run"]
sys.argv += ["data.source={{kind: text, paths: [{Path(__file__).parents[2] / "xscale/core/*.py"}]}}"]
with patch.object(xscale.train.loop.Loop, "run", side_effect=lambda: sys.exit(" ".join(["loaded", *sys.modules]))):
    main()
"""


@each(entries())
def test_a_part_is_in_a_file_of_its_name_or_in_one_that_names_it(entry: Entry[Any]) -> None:
    """Small parts of one idea share a file; its docstring then has the name of each, so that a search finds it."""
    module = sys.modules[entry.part.__module__]
    if module.__name__.split(".")[-1] != entry.name:
        assert f"`{entry.name}`" in (module.__doc__ or ""), f"{module.__name__} does not name {entry.name}"
        assert vars(entry.part).get("__doc__"), f"{entry.name} shares a file and has no docstring of its own"


@each(entries())
def test_a_part_says_in_a_sentence_what_it_is(entry: Entry[Any]) -> None:
    assert len(entry.summary.split()) >= 4
    assert entry.summary.endswith((".", "?", "!"))


NO_CONFIG = {"round_robin": "balances the load of a benchmark by force, which no run wants"}
"""Parts that no config uses, with the reason."""


def values(data: Any) -> set[str]:
    """All texts in parsed YAML."""
    if isinstance(data, dict):
        return set().union(*map(values, data.values()))
    if isinstance(data, list):
        return set().union(*map(values, data))
    return {data} if isinstance(data, str) else set()


def test_a_config_uses_each_part() -> None:
    """So that a user finds it in a file that loads, and the sweep over all configs trains it."""
    used = values([yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / "configs").rglob("*.yaml")])
    unused = {entry.name for entry in entries() if entry.name not in used}
    assert unused == set(NO_CONFIG)


def silent(config: type[Config]) -> list[str]:
    """Fields without a sentence."""
    said = sentences(config)
    return [
        f"{config.__module__}.{config.__qualname__}.{name}"
        for name in config.model_fields
        if not said.get(name, "").strip()
    ]


def subclasses(config: type[Config]) -> list[type[Config]]:
    below = [one for child in config.__subclasses__() for one in [child, *subclasses(child)]]
    return list(dict.fromkeys(below))


def test_every_config_field_has_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without this each file would be parsed once for each class that it is above.
    monkeypatch.setattr(core_config, "_sentences_of_file", functools.cache(core_config._sentences_of_file))
    for module in pkgutil.walk_packages(xscale.__path__, "xscale."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    configs = [config for config in subclasses(Config) if config.__module__.startswith("xscale.")]
    assert len(configs) > 20
    assert [field for config in configs for field in silent(config)] == []


def test_a_silent_field_is_seen() -> None:
    class Mute(Config):
        length: int = 1

    class Told(Mute):
        width: int = 1
        """Names of the parts that messages mention."""

    assert len(silent(Mute)) == 1
    assert [name.rpartition(".")[2] for name in silent(Told)] == ["length"]


def loaded(statement: str, heavy: str = HEAVY) -> set[str]:
    """Which of the heavy packages a fresh process holds after `statement`."""
    code = f"{statement}\nimport sys; print(*[name for name in {heavy.split()!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import xscale", "import xscale.core.config", "import xscale.cli.main"])
def test_importing_is_light(statement: str) -> None:
    assert loaded(statement) == set()


def test_checking_a_config_is_light() -> None:
    assert loaded(CHECK, HEAVY_TO_CHECK) == set()


@pytest.mark.long
def test_a_run_imports_what_its_first_step_uses() -> None:
    """The quickstart does not wait for what other runs need."""
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=False, timeout=600)
    (modules,) = [line.split() for line in done.stderr.splitlines() if line.startswith("loaded ")]
    assert "torch" in modules
    assert set(modules) & set(HEAVY_TO_TRAIN.split()) == set()


def test_a_heavy_import_is_seen() -> None:
    assert loaded("import numpy") == {"numpy"}

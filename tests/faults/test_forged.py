"""Every field of a checkpoint's JSON changed, with hashes that fit: set aside for the step before, or a clear error."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tiny import recipe, run
from xscale.checkpoint.disk import hash_file
from xscale.checkpoint.load import Restored, restore
from xscale.checkpoint.tools import tools
from xscale.core.config import encode
from xscale.core.errors import ConfigError, FaultError
from xscale.mesh.environment import read_rank_info
from xscale.mesh.mesh import destroy_process_group
from xscale.run.config_changes import CHANGEABLE, FIXED, changes_since, with_defaults
from xscale.run.parts import RunParts
from xscale.run.saved_state import state_check
from xscale.run.state import State
from xscale.train.setup import set_up

NEWER, OLDER = "step-00000004", "step-00000002"
UNKNOWN = [
    "tokenizer_fingerprint deleted",
    "tokenizer_fingerprint null",
    "unpadded_vocabulary deleted",
    "unpadded_vocabulary null",
    "sequence_length null",
    "loss_scale deleted",
    "loss_scale_steps deleted",
    "pending deleted",
]
"""Changes that say less than before, which a state may: these fields may be unknown, or earlier versions lack them."""
DEEP = "DEEP"
"""Stands for a value nested too deeply to write by json."""
WRONG: dict[str, Callable[[Any], Any]] = {
    "of another type": lambda value: 3.5 if isinstance(value, str) else "three",
    "null": lambda value: None if value is not None else {},
    "true": lambda value: True if value is not True else 17,
    "negative": lambda value: -1 if not isinstance(value, dict) else {"a": -1},
    "huge": lambda value: 10**30,
    "nested": lambda value: [[[value]]],
    "nested without end": lambda value: DEEP,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, RunParts]]:
    """The checkpoints of steps 2 and 4 of a run, and its parts as they are when it resumes."""
    folder = tmp_path_factory.mktemp("forged")
    model = {
        "kind": "decoder",
        "width": 8,
        "stack": {
            "depth": 1,
            "block": {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 8}},
        },
    }
    settings = recipe(folder, model=model, train={"steps": 4, "eval_every": 0}, checkpoint={"every_steps": 2})
    run(settings)
    parts = set_up(settings, read_rank_info())
    yield folder / "run" / "checkpoints", parts
    destroy_process_group()


def paths(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in JSON data, sections too."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from paths(value, (*at, key))


def holder(data: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        data = data[key]
    return data


def write_forged(checkpoint: Path, name: str, data: Any) -> None:
    """Write a file of a checkpoint and hashes that fit it."""
    text = json.dumps(data, indent=1).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    (checkpoint / name).write_text(text)
    manifest = checkpoint / "manifest.json"
    if name != "manifest.json":
        held = json.loads(manifest.read_bytes())
        digest = hash_file(checkpoint / name)
        held["files"][name] = {"size": digest.size, "value": digest.value, "hash": digest.hash}
        manifest.write_text(json.dumps(held))
    seal = hashlib.sha256(manifest.read_bytes()).hexdigest()
    (checkpoint / "manifest.sha256").write_text(f"{seal}  manifest.json\n")


def resumed(folder: Path, parts: RunParts) -> Restored | str:
    """Step that a run resumes from, or the sentence with which it ends."""
    tensors = parts.stepper.engine.state_tensors()
    try:
        return restore(folder, tensors, check=state_check(parts))
    except (ConfigError, FaultError) as error:
        return str(error)


def forged(trained: tuple[Path, RunParts], tmp_path: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Each forgery of a file, in a copy of the checkpoints: (what was changed, folder)."""
    content = json.loads((trained[0] / NEWER / name).read_bytes())
    for place in paths(content):
        for what, change in {"deleted": None, **WRONG}.items():
            data = json.loads((trained[0] / NEWER / name).read_bytes())
            above = holder(data, place)
            if change is None:
                del above[place[-1]]
            else:
                above[place[-1]] = change(above[place[-1]])
            folder = tmp_path / "checkpoints"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(trained[0], folder)
            write_forged(folder / NEWER, name, data)
            yield f"{name}: {'.'.join(map(str, place))} {what}", folder


@pytest.mark.long
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_each_field_of_manifest_and_state(
    trained: tuple[Path, RunParts], tmp_path: Path, name: str, count_cases: Callable[[int, str], None]
) -> None:
    """Never a traceback, never taken for the run's state: the step before, with a message, or a sentence."""
    cases = 0
    for case, folder in forged(trained, tmp_path, name):
        for row in tools.ls(folder):
            assert row.status in ("good", "bad"), case
        after = resumed(folder, trained[1])
        if isinstance(after, str):
            # Another version's manifest, which this one cannot judge.
            assert "Read it with the version" in after or "read it with the version" in after, (case, after)
        else:
            assert after.loaded is not None, case
            assert after.loaded.step == (4 if case.removeprefix("state.json: ") in UNKNOWN else 2), case
            assert after.loaded.step == 4 or "set aside as bad-step-00000004-" in after.reasons[0], case
        cases += 1
    assert cases > 50
    count_cases(cases, f"forged {name}")


@pytest.mark.nightly
def test_each_field_of_the_config(
    trained: tuple[Path, RunParts], tmp_path: Path, count_cases: Callable[[int, str], None]
) -> None:
    """A key that must not change is refused, any other is named as changed: the user sees every difference."""
    cases = 0
    now = encode(trained[1].settings)
    fixed_keys = set(FIXED) - set(CHANGEABLE)
    for case, folder in forged(trained, tmp_path, "config.json"):
        after = resumed(folder, trained[1])
        if isinstance(after, Restored) and after.loaded is not None and after.loaded.step == 4:
            before = with_defaults(after.loaded.config)
            assert before == now or changes_since(before, now, 4), case
            key = case.split(": ")[1].split(" ")[0]
            assert before == now or not any(f"{key}.".startswith(f"{fixed}.") for fixed in fixed_keys), case
        elif isinstance(after, Restored):
            assert after.loaded is not None, case
            assert after.loaded.step == 2, case
        cases += 1
    count_cases(cases, "forged config.json")


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_another_step(trained: tuple[Path, RunParts], tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained[0], folder)
    data = json.loads((folder / NEWER / name).read_bytes())
    write_forged(folder / NEWER, name, data | {"step": 99})
    after = resumed(folder, trained[1])
    assert isinstance(after, Restored)
    assert after.loaded is not None
    assert after.loaded.step == 2
    assert "99" in after.reasons[0]


def test_what_was_not_changed_is_resumed(trained: tuple[Path, RunParts], tmp_path: Path) -> None:
    """The control: writing the same again is no forgery."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained[0], folder)
    for name in ("state.json", "config.json", "manifest.json"):
        write_forged(folder / NEWER, name, json.loads((folder / NEWER / name).read_bytes()))
    after = resumed(folder, trained[1])
    assert isinstance(after, Restored)
    assert after.loaded is not None
    assert after.loaded.step == 4
    State.check(after.loaded.state, {"step"})
    assert not after.reasons
    assert torch.isfinite(next(iter(trained[1].stepper.engine.state_tensors().values()))).all()

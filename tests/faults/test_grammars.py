"""Generated hostile files: whatever they hold, a command ends with status 0 or 2 and one sentence a problem, in bounds.

A case is a function of its seed, which a failure prints: `--grammar-seed=N --grammars=1` runs it alone. The nightly
tier prints how the cases of each grammar ended, the slowest of them and the one that took most memory.
"""

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bounds import HangError, begin_peak, bounded, listing, peak_above
from tests.convert.hf.test_hostile_models import good as good  # a fixture
from tests.grammars import json_bytes, torn, yaml_text
from xscale.checkpoint.load import CheckpointReader, read_config, read_state, restore
from xscale.checkpoint.save import save
from xscale.checkpoint.tools import tools
from xscale.commands.checkpoints.import_hf import import_run
from xscale.core.compose import compose_leniently
from xscale.core.errors import EXIT_DONE, EXIT_FAULT, EXIT_USER, ConfigError, FaultError
from xscale.data.corpus.manifest import DatasetManifest
from xscale.data.tokenizer.huggingface import HuggingFace
from xscale.recipe import read_and_check
from xscale.run.state import State

EXAMPLES = 12
"""Cases of each grammar in the quick tier."""
PROCESSOR_SECONDS = 2
"""Most that a case may take of the processor, in the better of two runs: a busy machine does not count."""
Case = Callable[[Random, Path], Counter[int] | None]
"""Writes a case into an empty folder and gives it to what reads it; exit statuses, if that is done several times."""

CONFIG: dict[str, Any] = {
    "run": {"dir": "run", "device": "cpu", "seed": 3},
    "model": {
        "kind": "decoder",
        "width": 32,
        "position": "rope",
        "stack": {
            "depth": 2,
            "block": {
                "mixer": {"kind": "attention", "heads": 4},
                "ffn": {"kind": "gated", "hidden": 64},
                "norm": "rms",
            },
            "rules": [
                {"every": 2, "at": 1, "ffn": {"kind": "moe", "experts": 4, "router": {"kind": "topk", "top_k": 2}}}
            ],
        },
    },
    "objective": {"kind": "causal"},
    "optimizer": {"kind": "adamw", "lr": 1e-3},
    "schedule": {"kind": "cosine", "warmup_steps": 1},
    "data": {
        "source": {"kind": "text", "paths": ["a.txt"]},
        "tokenizer": {"kind": "byte"},
        "folder": "data",
        "sequence_length": 32,
        "validation": 0.2,
    },
    "train": {"steps": 4, "batch_size": 4, "micro_batch_size": 4, "eval_every": 0},
    "parallel": {"mesh": {"dp_shard": 1}, "zero": {"stage": 1}},
    "checkpoint": {"every_steps": 2},
    "observe": {"every_steps": 1},
    "precision": {"compute": "float32"},
}


def config(random: Random, folder: Path) -> None:
    """A config that is checked as `xscale plan --check` does, on one rank."""
    (folder / "a.txt").write_text("some text\n" * 50)
    file = folder / "c.yaml"
    file.write_bytes(yaml_text(random, CONFIG).encode(errors="surrogatepass"))
    with contextlib.chdir(folder):
        read_and_check(compose_leniently(file, []), 1)


def override(random: Random, folder: Path) -> None:
    """An override of a good config."""
    (folder / "a.txt").write_text("some text\n" * 50)
    (folder / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    lines = yaml_text(random, {"train.steps": 3, "model.stack.depth": 2, "optimizer": {"kind": "lion"}}).splitlines()
    words = [line.replace(": ", "=", 1) for line in lines][:3]
    with contextlib.chdir(folder):
        read_and_check(compose_leniently(folder / "c.yaml", words), 1)


def checkpoint(random: Random, folder: Path) -> Counter[int]:
    """A checkpoint whose files were changed, and whose hashes fit again, as somebody who forges one does it."""
    tensors = {"model.a": torch.arange(6.0).reshape(2, 3), "optimizer.mean.a": torch.zeros(2, 3)}
    state = {"step": 2, "consumed": 8, "tokens": 64, "losses": [1.5], "optimizer": {"step": 2}}
    path = save(folder / "checkpoints", 2, tensors, state, CONFIG)
    for name in random.sample(
        ["state.json", "config.json", "manifest.json", "tensors/.metadata"], random.choice((1, 2))
    ):
        content = (path / name).read_bytes()
        changed = json_bytes(random, json.loads(content)) if name.endswith(".json") else torn(random, content)
        (path / name).write_bytes(changed)
        if name != "manifest.json":
            reseal(path, name)
    if random.randrange(3):
        seal(path)
    statuses: Counter[int] = Counter()
    for act in (
        lambda: tools.show(path),
        lambda: tools.verify(folder),
        lambda: read_state(path),
        lambda: read_config(path),
        lambda: tensor_of(path),
        lambda: restore(folder / "checkpoints", tensors, check=lambda data, _: State.check(data, ("step",))),
    ):
        with contextlib.suppress(MissingTensorError):
            try:
                act()
                statuses[EXIT_DONE] += 1
            except (ConfigError, FaultError) as error:
                one_line(error)
                statuses[EXIT_USER if isinstance(error, ConfigError) else EXIT_FAULT] += 1
    return statuses


class MissingTensorError(Exception):
    """The forged index does not name the tensor that is asked for."""


def tensor_of(path: Path) -> None:
    reader = CheckpointReader(path)
    if "model.a" not in reader.entries:
        raise MissingTensorError
    reader.tensor("model.a")


def reseal(path: Path, name: str) -> None:
    """Give the manifest the size and hash of a file."""
    from xscale.checkpoint.disk import hash_file

    try:
        data = json.loads((path / "manifest.json").read_bytes())
        digest = hash_file(path / name, "blake2b" if "blake2b" in str(data) else "sha256")
        entry = data["files"][name]
        entry |= {key: value for key, value in vars(digest).items() if key in entry}
        (path / "manifest.json").write_text(json.dumps(data))
    except (ValueError, KeyError, TypeError, RecursionError):
        return


def seal(path: Path) -> None:
    from xscale.checkpoint import manifest

    (path / manifest.SEAL).write_bytes(manifest._seal((path / manifest.MANIFEST).read_bytes()))


def data_manifest(random: Random, folder: Path) -> None:
    """The manifest of prepared data."""
    stored = {
        "source": {"kind": "text", "paths": ["a.txt"]},
        "corpus": "a" * 32,
        "tokenizer": {"kind": "byte"},
        "fingerprint": "b" * 32,
        "vocabulary": 361,
        "validation": 0.2,
        "counts": {"train": {"documents": 3, "tokens": 40, "bytes": 40}},
        "skipped": {"documents": 1, "reasons": {"not JSON": 1}, "first": ["a:1"]},
        "labels": {"kind": "class", "names": ["a", "b"], "pairs": False},
    }
    file = folder / "manifest.json"
    file.write_bytes(json_bytes(random, stored))
    DatasetManifest.load(file)


def tokenizer_file(random: Random, folder: Path, source: Path) -> None:
    """A tokenizer.json that is opened and given texts."""
    content = json.loads((source / "tokenizer.json").read_text())
    content |= random.choice(STEPS)
    file = folder / "tokenizer.json"
    file.write_bytes(json_bytes(random, content))
    opened = HuggingFace(HuggingFace.Config(file=str(file), eos="</s>"), folder)
    ids = opened.encode("some text </s> é \U0001f600 " * 20)
    assert len(ids) < 10**6
    opened.decode(ids)


SPLIT = {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": False}
WORD_PIECES = {
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
    "vocab": {"[UNK]": 0, "</s>": 1, "a": 2},
}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["a", -1.0]]}
STEPS: tuple[dict[str, Any], ...] = (
    {},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}},
    {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "bb"}},
    {"normalizer": {"type": "Prepend", "prepend": "x"}, "pre_tokenizer": SPLIT},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, {"type": "Digits", "individual_digits": True}]}},
    {"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}},
    {"model": WORD_PIECES},
    {"model": UNIGRAM},
    {"model": {"type": "WordLevel", "vocab": {"<unk>": 0, "</s>": 1}, "unk_token": "<unk>"}},
)


def hub_config(random: Random, folder: Path, source: Path) -> None:
    """A model of a hub, of which config.json, and at times a file of its tokenizer, is hostile."""
    model = folder / "model"
    shutil.copytree(source, model)
    names = random.choice(
        (["config.json"], ["config.json"], ["tokenizer_config.json"], ["config.json", "tokenizer.json"])
    )
    for name in names:
        (model / name).write_bytes(json_bytes(random, json.loads((model / name).read_text())))
    said: list[str] = []
    before = listing(folder)
    try:
        import_run(model, folder / "run", None, [], say=said.append)
    except ConfigError:
        assert listing(folder) == before, "a run folder is left half-made"
        raise
    assert all(len(line.splitlines()) == 1 for line in said), said
    shutil.rmtree(folder / "run", ignore_errors=True)


GRAMMARS: dict[str, Case] = {
    "configs": config,
    "overrides": override,
    "checkpoints": checkpoint,
    "manifests of data": data_manifest,
}
OF_A_HUB = {"tokenizer files": tokenizer_file, "config.json": hub_config}


def one_line(error: Exception) -> None:
    """A sentence of one line each, which a terminal can show, and not endless."""
    sentences = [str(problem) for problem in error.problems] if isinstance(error, ConfigError) else [str(error)]
    assert 1 <= len(sentences) <= 200, len(sentences)
    for sentence in sentences:
        assert len(sentence.splitlines()) == 1, sentence
        assert len(sentence) < 3000, sentence[:400]


@dataclass
class Costs:
    """Exit statuses of cases, and the seconds of the processor and bytes of the most expensive, each with its seed."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: tuple[float, int] = (0.0, 0)
    memory: tuple[int, int] = (0, 0)

    def add(self, other: "Costs", seed: int) -> None:
        self.statuses += other.statuses
        self.seconds = max(self.seconds, (other.seconds[0], seed))
        self.memory = max(self.memory, (other.memory[0], seed))

    def __str__(self) -> str:
        ended = ", ".join(f"{count} with status {status}" for status, count in sorted(self.statuses.items()))
        (seconds, slowest), (memory, largest) = self.seconds, self.memory
        return f"{ended}; at most {seconds:.2f} s (seed {slowest}) and {memory / 1e6:.0f} MB (seed {largest})"


def check(case: Case, random: Random, folder: Path) -> Costs:
    """Run one case in a folder of its own, of which nothing outside may change; what it took."""
    room, outside = folder / "room", folder / "outside"
    shutil.rmtree(folder, ignore_errors=True)
    room.mkdir(parents=True)
    outside.mkdir()
    (outside / "mine.txt").write_text("mine")
    begin, before = time.process_time(), begin_peak()
    with bounded():
        try:
            statuses = case(random, room) or Counter([EXIT_DONE])
        except ConfigError as error:
            one_line(error)
            statuses = Counter([EXIT_USER])
    seconds, memory = time.process_time() - begin, peak_above(before)
    assert {path.name for path in folder.iterdir()} == {"room", "outside"}
    assert listing(outside) == {"mine.txt": ((outside / "mine.txt").stat().st_mode, b"mine")}
    return Costs(statuses, (seconds, 0), (memory, 0))


def bound(name: str, source: Path) -> Case:
    if name in GRAMMARS:
        return GRAMMARS[name]
    of_a_hub = OF_A_HUB[name]
    return lambda random, folder: of_a_hub(random, folder, source)


@pytest.mark.parametrize("name", [*GRAMMARS, *OF_A_HUB])
def test_a_hostile_file_is_a_sentence(name: str, good: Path, tmp_path: Path) -> None:
    case = bound(name, good)

    @settings(max_examples=EXAMPLES, database=None)
    @given(random=st.randoms(use_true_random=False))
    def drawn(random: Random) -> None:
        check(case, random, tmp_path / "case")

    drawn()


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*GRAMMARS, *OF_A_HUB])
def test_a_thousand_hostile_files(
    name: str, good: Path, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    first, count = request.config.getoption("--grammar-seed"), request.config.getoption("--grammars")
    case, faults, costs = bound(name, good), [], Costs()
    for seed in range(first, first + count):
        try:
            cost = check(case, Random(f"{name} {seed}"), tmp_path / "case")
            if cost.seconds[0] > PROCESSOR_SECONDS:
                cost = min(cost, check(case, Random(f"{name} {seed}"), tmp_path / "case"), key=lambda one: one.seconds)
            costs.add(cost, seed)
            assert cost.seconds[0] <= PROCESSOR_SECONDS, f"{cost.seconds[0]:.1f} s of the processor"
        except (Exception, HangError) as error:
            faults.append(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}")
    with capsys.disabled():
        print(f"\n{name}: seeds {first} to {first + count - 1}: {costs}; {len(faults)} beyond the bounds")
    assert not faults, "\n".join(faults)

"""A kept table of every recipe: its parameters, their initial weights, and its first ten losses.

    python -m tests.golden.first_losses               compares all recipes with the table, in about five minutes
    python -m tests.golden.first_losses run/bytes t5   those whose name has one of these words
    python -m tests.golden.first_losses --write       makes the table anew, and prints what changed

A change that must change no number leaves the table as it is. The recipes are made small (`shrink.py`), and train on
one process and one thread in float64. Bits depend on torch and the processor, which the first line of the table names:
elsewhere names and shapes are compared exactly, losses to `TOLERANCE`, and weights through the losses. To compare bits
there, write the table at the commit before the change, and compare at the one after it.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.golden.shrink import RECIPES, ROOT, VARIANTS, small
from xscale import api
from xscale.bench.compare import read_comparison, slug
from xscale.core.config import decode, encode
from xscale.core.errors import EXIT_REQUEUE
from xscale.core.yaml_reader import parse
from xscale.recipe import Recipe

TABLE = Path(__file__).with_name("first_losses.txt")
STEPS = 10
TOLERANCE = 1e-10
"""Relative, of a loss on another processor or torch, where sums round in another order."""
HASH_DIGITS = 16


@dataclass(frozen=True)
class Case:
    """A recipe that can be trained: a file, and what a comparison or a ladder overrides in it."""

    file: Path
    overrides: tuple[str, ...] = ()
    variant: str = ""

    @property
    def name(self) -> str:
        """Such as run/bytes, or compare/experts/dense."""
        name = f"{self.file.parent.name}/{self.file.stem}"
        return f"{name}/{slug(self.variant)}" if self.variant else name


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    parameters: int
    names: str
    """Hash of the names and shapes of all tensors that a checkpoint has of the model."""
    weights: str
    """Hash of their initial values."""
    losses: tuple[float, ...]
    """Nats of each step."""

    def text(self) -> str:
        return " ".join([str(self.parameters), self.names, self.weights, *(loss.hex() for loss in self.losses)])

    @classmethod
    def read(cls, words: list[str]) -> "Row":
        return cls(int(words[0]), words[1], words[2], tuple(float.fromhex(word) for word in words[3:]))


def cases() -> dict[str, Case]:
    """Every recipe of configs/run and configs/xformer, every variant of configs/compare, and a size of each ladder.

    It is the first size, since the others would be made as small.
    """
    trained = [Case(file) for file in [*RECIPES, *VARIANTS]]
    for file in sorted((ROOT / "configs/compare").glob("*.yaml")):
        trained += [Case(file, overrides, name) for name, overrides in read_comparison(file).variants.items()]
    for file in sorted((ROOT / "configs/ladder").glob("*.yaml")):
        ladder: Any = parse(file.read_text(encoding="utf-8"), str(file))
        name, own = next(iter(ladder["sizes"].items()))
        trained.append(Case(file, (*ladder["overrides"], *own), name))
    return {case.name: case for case in trained}


def small_recipe(case: Case, folder: Path, *, compiled: bool = False) -> Recipe:
    """The recipe made small, for `STEPS` steps; without torch.compile, which takes half a minute, unless `compiled`."""
    file = case.file
    if case.variant:
        file = file.parent / str(parse(file.read_text(encoding="utf-8"), str(file))["run"])
    data: Any = encode(small(file, folder, case.overrides))
    data["train"]["steps"] = STEPS
    data["parallel"]["compile"] = compiled
    return decode(Recipe, data)


def row_of(case: Case, *, compiled: bool = False) -> Row:
    """Build the model, and train it."""
    printed = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        folder = Path(name)
        recipe = small_recipe(case, folder, compiled=compiled)
        model = api.build_model(recipe).model
        names, weights = hashlib.sha256(), hashlib.sha256()
        for key, value in sorted(model.state_dict().items()):
            names.update(f"{key} {tuple(value.shape)}\n".encode())
            weights.update(value.contiguous().numpy().tobytes())
        status = api.train(recipe)
        if status == EXIT_REQUEUE:
            # A run takes a signal as a wish to stop; here all of them are meant.
            sys.exit(f"stopped by a signal in {case.name}")
        assert status == 0, f"{case.name} ended with {status}"
        lines = (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses = tuple(line["loss"] for line in map(json.loads, lines) if "loss" in line)
        assert len(losses) == STEPS, f"{case.name} has {len(losses)} losses"
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return Row(parameters, names.hexdigest()[:HASH_DIGITS], weights.hexdigest()[:HASH_DIGITS], losses)


def machine() -> str:
    """Text on the machine: the last bits depend on it."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), processor)
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {processor}"


def read_table() -> tuple[str, dict[str, Row]]:
    """Read the machine that the table was written on, and its rows."""
    head, _, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    return head.removeprefix("# "), {line.split()[0]: Row.read(line.split()[1:]) for line in lines}


def write_table(rows: dict[str, Row]) -> None:
    columns = " ".join(["recipe", *(field.name for field in fields(Row))])
    lines = [f"# {machine()}", f"# {columns} of steps 1 to {STEPS}"]
    lines += [f"{name} {row.text()}" for name, row in rows.items()]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def differences(row: Row, expected: Row, *, bits: bool) -> list[str]:
    """Sentences on what is otherwise than in the table; without `bits` losses may differ by `TOLERANCE`."""
    sentences = []
    if row.parameters != expected.parameters:
        sentences.append(f"{row.parameters} parameters, were {expected.parameters}")
    if row.names != expected.names:
        sentences.append("the names or shapes of tensors changed")
    if bits and row.weights != expected.weights:
        sentences.append("the initial weights changed")
    far = [abs(loss - before) / abs(before) for loss, before in zip(row.losses, expected.losses, strict=True)]
    limit = 0.0 if bits else TOLERANCE
    # `not <=` rather than `>`, so that a loss that is not a number differs.
    if changed := [step for step, relative in enumerate(far, 1) if not relative <= limit]:
        sentences.append(f"losses of steps {changed} changed, by up to {max(far):.1e} of the loss")
    return sentences


def main() -> int:
    """Compare or write. Exit status 1 where something is otherwise than in the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of recipes; none: all")
    parser.add_argument("--write", action="store_true", help="make the table anew; with words those lines of it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    known = cases()
    chosen = [case for name, case in known.items() if not options.words or any(word in name for word in options.words)]
    written_on, table = read_table() if TABLE.exists() else ("", {})
    bits = written_on == machine()
    if table and not bits:
        print(f"the table was written on another machine ({written_on}): losses are compared to {TOLERANCE:g}")
        if options.write and options.words:
            print("bits of two machines do not belong in one table: write all of it")
            return 2
    rows, changed = dict[str, Row](), 0
    for case in chosen:
        name = case.name
        try:
            rows[name] = row_of(case)
        except Exception as error:
            # The others are compared all the same.
            sentences = [f"does not train: {type(error).__name__}: {error}"]
        else:
            sentences = differences(rows[name], table[name], bits=bits) if name in table else ["not in the table"]
        changed += bool(sentences)
        for sentence in sentences:
            print(f"{name}: {sentence}", flush=True)
    gone = sorted(table.keys() - known.keys())
    for name in gone:
        print(f"{name}: in the table, and no recipe")
    if options.write:
        merged = table | rows
        write_table({name: merged[name] for name in known if name in merged})
    seconds = time.perf_counter() - began
    print(f"{len(chosen)} recipes in {seconds:.0f} s: {changed} differ, {len(gone)} are gone")
    return 0 if options.write else int(bool(changed or gone))


if __name__ == "__main__":
    sys.exit(main())

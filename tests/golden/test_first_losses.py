"""Every recipe begins with the parameters, the weights and the losses of the kept table; the nightly tests run all."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.golden.first_losses import STEPS, TABLE, Row, cases, differences, machine, read_table, row_of, write_table

CASES = cases()
WRITTEN_ON, ROWS = read_table()
BITS = machine() == WRITTEN_ON
QUICK = ("run/bytes", "run/t5_span", "xformer/rwkv7")
"""A decoder, an encoder of pairs of sentences, an encoder-decoder, a mixture of experts and a recurrence."""
COMPILED = ("run/dense_1b", "run/dense_7b", "run/fineweb")


def tier(name: str) -> list[pytest.MarkDecorator]:
    if name in QUICK:
        return []
    return [pytest.mark.long] if name.startswith("run/") else [pytest.mark.nightly]


@pytest.mark.parametrize("name", [pytest.param(name, marks=tier(name)) for name in CASES])
def test_a_recipe_begins_as_in_the_table(name: str) -> None:
    assert torch.get_num_threads() == 1
    assert not differences(row_of(CASES[name]), ROWS[name], bits=BITS)


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_recipe_has_the_losses_of_the_table(name: str) -> None:
    # Fused operators round in another order.
    assert not differences(row_of(CASES[name], compiled=True), ROWS[name], bits=False)


def test_the_table_has_a_row_for_each_recipe() -> None:
    assert list(ROWS) == list(CASES)
    for name, row in ROWS.items():
        assert len(row.losses) == STEPS, name
        assert len(set(row.losses)) > STEPS // 2, f"{name} does not learn"


def test_a_table_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = TABLE.read_text(encoding="utf-8")
    monkeypatch.setattr("tests.golden.first_losses.TABLE", tmp_path / "table.txt")
    write_table(ROWS)
    after = (tmp_path / "table.txt").read_text(encoding="utf-8")
    assert after.splitlines()[1:] == before.splitlines()[1:]
    assert read_table() == (machine(), ROWS)


ROW = Row(10, "names", "weights", (5.0, 4.0))
CHANGED = {
    "a parameter more": (replace(ROW, parameters=11), True, True),
    "a renamed parameter": (replace(ROW, names="other"), True, True),
    "other initial weights": (replace(ROW, weights="other"), True, False),
    "the last bit of a loss": (replace(ROW, losses=(5.0, math.nextafter(4.0, 5.0))), True, False),
    "a loss": (replace(ROW, losses=(5.0, 4.0 + 1e-8)), True, True),
    "no number": (replace(ROW, losses=(5.0, math.nan)), True, True),
    "nothing": (ROW, False, False),
}
"""Change -> the row, whether it differs on the machine of the table, and elsewhere."""


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_is_seen(name: str) -> None:
    row, here, elsewhere = CHANGED[name]
    assert bool(differences(row, ROW, bits=True)) == here
    assert bool(differences(row, ROW, bits=False)) == elsewhere

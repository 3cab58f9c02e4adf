"""The benchmark's gate, rows and files; times themselves are not tested."""

import json
from pathlib import Path

import pytest
import torch

from xscale_kernels.bench import OPERATORS, Case, NotGreenError, record, report, run, table
from xscale_kernels.bench.measure import peak_bytes


def test_every_operator_has_a_bench_with_tests_that_exist() -> None:
    import importlib

    here = Path(__file__).parent
    kernels = Path(report.__file__).parents[1]
    folders = {path.parent.name for path in kernels.glob("*/op.py")} - {"vocab_cross_entropy"}
    assert folders == set(OPERATORS)
    for operator in OPERATORS:
        bench = importlib.import_module(f"xscale_kernels.{operator}.bench")
        assert all((here / f"{name}.py").exists() for name in bench.TESTS)
        assert (kernels / operator / "README.md").exists()


def test_a_red_test_gives_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import xscale_kernels.rmsnorm.bench as bench

    monkeypatch.setattr(bench, "TESTS", ("no_such_test",))
    with pytest.raises(NotGreenError, match="are not here"):
        run("rmsnorm")
    monkeypatch.setattr(bench, "TESTS", ("../kernels/conftest",))
    with pytest.raises(NotGreenError, match="are red"):
        run("rmsnorm")


def test_rows_and_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import xscale_kernels.rmsnorm.bench as bench

    def small(device: str) -> list[Case]:
        from xscale_kernels.bench.case import both_ways
        from xscale_kernels.rmsnorm.op import IMPLEMENTATIONS, reference, rmsnorm

        x = torch.randn(64, 1024, requires_grad=True)
        ways = both_ways(
            lambda x, implementation: rmsnorm(x, None, implementation=implementation),
            lambda x: reference.rmsnorm(x, None, 1e-6),
            IMPLEMENTATIONS,
            (x,),
        )
        return [Case("64 x 1024", ways, bytes=1.0)]

    monkeypatch.setattr(bench, "cases", small)
    monkeypatch.setattr(report, "gate", lambda operator: None)
    monkeypatch.setattr(report, "ceilings", lambda device, dtype: (1e9, 1e9))
    rows = run("rmsnorm", against=("torch", "eager"))
    by_way = {row.way: row for row in rows}
    assert set(by_way) == {"eager", "cpu", "triton", "apex", "torch"}
    assert by_way["torch"].speedup == 1.0
    assert by_way["triton"].milliseconds is None
    assert "needs a GPU" in by_way["triton"].refused
    assert "needs a GPU" in table(rows)
    found = json.loads(record(rows, "cpu", tmp_path).read_text())
    assert found["device"] == "cpu"
    assert len(found["rows"]) == 5
    assert len(found["commit"]) == 40


def test_memory_is_how_far_it_rises() -> None:
    assert 4e6 <= peak_bytes(lambda: torch.ones(10**6), "cpu") < 5e6
    assert 8e6 <= peak_bytes(lambda: torch.ones(10**6) + torch.ones(10**6).sum(), "cpu") < 13e6

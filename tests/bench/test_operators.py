"""The benchmark's required tests, rows and files; times themselves are not tested."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from xscale.bench.harness.machine import ROOT
from xscale.bench.harness.timing import peak_bytes
from xscale.bench.operators import report
from xscale.bench.operators.command import main
from xscale.bench.operators.plot import axes_of, plot
from xscale.bench.operators.report import BenchmarkRow, FailedTestsError, record, run, table
from xscale.cli.bench import bench_app
from xscale.core.errors import ConfigError
from xscale.observe.events import source_commit
from xscale_kernels.cases import Case
from xscale_kernels.select import implementations, operators


@pytest.mark.parametrize("operator", operators())
def test_every_operator_has_a_bench_with_tests_that_exist(operator: str) -> None:
    bench = importlib.import_module(f"xscale_kernels.{operator}.cases")
    assert all((ROOT / "tests/kernels" / f"{name}.py").exists() for name in bench.TESTS)
    text = (ROOT / "kernels/xscale_kernels" / operator / "README.md").read_text(encoding="utf-8")
    for each in implementations(operator):
        assert f"| `{each.name}` |" in text, f"the README of {operator} does not mention {each.name}"


@pytest.mark.long
def test_a_failing_test_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import xscale_kernels.squared_norm.cases as bench

    monkeypatch.setattr(bench, "TESTS", ("no_such_test",))
    with pytest.raises(FailedTestsError, match="are missing"):
        run("squared_norm")
    monkeypatch.setattr(bench, "TESTS", ("../kernels/conftest",))
    assert main(["squared_norm"]) == 1
    assert "failed; not benchmarking" in capsys.readouterr().err


def test_invalid_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"rmsnorm is not measured against 'flashinfer'\. There are: apex, cpu"):
        main(["rmsnorm", "--against", "flashinfer"])
    with pytest.raises(ConfigError, match=r"there is no operator 'rmsnrm'.*rmsnorm"):
        run("rmsnrm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        main(["ops", "--device", "cuda"])
    with pytest.raises(ConfigError, match="they are timed on a GPU, and torch finds none"):
        main(["parts"])
    with pytest.raises(SystemExit):
        main(["rmsnrm"])


def test_an_operators_name_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[str]] = []
    monkeypatch.setattr("xscale.bench.operators.command.main", lambda arguments: said.append(arguments) or 0)
    for words in (["rmsnorm", "--against", "torch"], ["op", "rope"], ["ops", "--record"], ["parts"]):
        assert CliRunner().invoke(bench_app, words).exit_code == 0
    assert said == [["rmsnorm", "--against", "torch"], ["rope"], ["ops", "--record"], ["parts"]]
    refused = CliRunner().invoke(bench_app, ["rmsnrm"]).exception
    assert isinstance(refused, ConfigError)
    assert "rmsnrm" in str(refused)


def row(way: str, **changes: Any) -> BenchmarkRow:
    values = {"operator": "x", "case": "a", "way": way, "milliseconds": 1.0, "against": "eager", "speedup": 1.0}
    return BenchmarkRow(**{**values, "megabytes": 2.0, "of_ceiling": 0.5, **changes})


def test_plots_for_each_axis_that_varies(tmp_path: Path) -> None:
    rows = [row(way, at={"length": length, "density": 0.1}) for way in ("eager", "fast") for length in (1024, 4096)]
    assert axes_of(rows) == ["length"]
    files = plot([*rows, row("apex", milliseconds=None, megabytes=None, of_ceiling=None)], tmp_path, "cpu")
    assert [file.name for file in files] == ["x-cpu-length.png"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    # The rows differ on no numeric axis, so the axis is the case.
    assert axes_of([row("a", at={"width": 8}), row("b", at={"width": 8})]) == ["case"]
    assert plot([row("a")], tmp_path, "A B")[0].name == "x-a-b-case.png"


def test_rows_and_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import xscale_kernels.rmsnorm.cases as bench

    def small(device: str) -> list[Case]:
        from xscale_kernels.cases import forward_backward
        from xscale_kernels.rmsnorm.op import IMPLEMENTATIONS, reference_rmsnorm, rmsnorm

        x = torch.randn(64, 1024, requires_grad=True)
        ways = forward_backward(
            lambda x, implementation: rmsnorm(x, None, implementation=implementation),
            lambda x: reference_rmsnorm(x, None, 1e-6),
            IMPLEMENTATIONS,
            (x,),
        )
        return [Case("64 x 1024", ways, bytes=1.0)]

    monkeypatch.setattr(bench, "cases", small)
    monkeypatch.setattr(report, "require_passing_tests", lambda operator: None)
    monkeypatch.setattr(report, "ceilings", lambda device, dtype: (1e9, 1e9))
    rows = run("rmsnorm", against=("torch", "eager"))
    by_way = {row.way: row for row in rows}
    assert set(by_way) == {"eager", "cpu", "quack", "triton", "liger", "apex", "torch"}
    assert by_way["torch"].speedup == 1.0
    assert by_way["triton"].milliseconds is None
    assert "needs a GPU" in by_way["triton"].refused
    assert "needs a GPU" in table(rows)
    recorded = json.loads(record(rows, "cpu", tmp_path).read_text())
    assert recorded["device"] == "cpu"
    assert len(recorded["rows"]) == 7
    assert recorded["commit"] == source_commit()


def test_an_implementation_that_breaks_costs_its_own_row() -> None:
    def breaks() -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    begun: list[str] = []
    ways = {"eager": lambda: torch.ones(3), "broken": breaks, "skipped": breaks, "fast": lambda: torch.ones(3)}
    case = Case("x", ways, flops=1e9)

    def begin(way: str) -> bool:
        begun.append(way)
        return way != "skipped"

    rows = {row.way: row for row in report.measure_case("rope", case, "cpu", "eager", (1e9, 1e9), 0.0, begin)}
    assert begun == list(ways)
    assert list(rows) == ["eager", "broken", "fast"]
    assert rows["broken"].refused == "OutOfMemoryError: CUDA out of memory"
    assert rows["fast"].speedup is not None
    assert rows["fast"].fastest is not None
    assert rows["fast"].tflops == pytest.approx(1.0 / rows["fast"].milliseconds)  # type: ignore[operator]


def test_the_definition_is_compiled_where_it_is_one() -> None:
    import xscale_kernels.linear_attention.cases as against_softmax
    import xscale_kernels.rmsnorm.cases as definition

    assert list(report.with_compiled(next(definition.cases("cpu"))).ways)[:2] == ["eager", "compile"]
    assert "compile" not in report.with_compiled(next(against_softmax.cases("cpu"))).ways


def test_block_sparse_is_compared_with_masked_and_dense_attention() -> None:
    """`eager` computes the same result by torch's fused attention, `sdpa` a dense one; the table names both."""
    import xscale_kernels.block_sparse_attention.cases as bench
    from xscale_kernels.cases import ForwardBackward

    case = next(bench.cases("cpu"))
    assert set(case.says) == {"eager", "sdpa"} < set(case.ways)
    outs = {}
    for name in ("cpu", "eager", "sdpa"):
        way = case.ways[name]
        assert isinstance(way, ForwardBackward)
        outs[name] = way.function(*way.inputs)
    torch.testing.assert_close(outs["cpu"], outs["eager"])
    assert not torch.allclose(outs["cpu"], outs["sdpa"], atol=1e-2)
    text = table([row("eager", says="with the pattern"), row("eager", says="with the pattern"), row("cpu")])
    assert text.splitlines()[4:] == ["eager: with the pattern"]


def test_peak_bytes_counts_the_allocations_of_the_call() -> None:
    assert 4e6 <= peak_bytes(lambda: torch.ones(10**6), "cpu") < 5e6
    assert 8e6 <= peak_bytes(lambda: torch.ones(10**6) + torch.ones(10**6).sum(), "cpu") < 13e6

"""`xscale plan` as it is typed."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from xscale.cli.plan import plan
from xscale.commands.plan import PICTURES, check, hardware, members, run
from xscale.core.errors import ConfigError

TINY = [
    "model.stack.depth=2",
    "model.width=32",
    "data.sequence_length=32",
    "data.tokenizer={kind: byte}",
    "train.batch_size=4",
    "train.micro_batch_size=1",
]
CONFIG = Path("configs/run/quickstart.yaml")


def wrapped() -> typer.Typer:
    """The command as an app of its own."""
    app = typer.Typer()
    app.command()(plan)
    return app


def planned(
    capsys: pytest.CaptureFixture[str], *overrides: str, world: int = 1, device: str | None = None
) -> dict[str, Any]:
    run(CONFIG, [*TINY, *overrides], world, hardware(device, None, None, None, None), as_json=True)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_fits_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, device="h100")
    assert found["fits"] is True
    assert found["problems"] == []
    assert found["step_seconds"] > 0


def test_what_does_not_fit_is_a_problem_with_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(CONFIG, TINY, 1, hardware("h100", 1e-3, None, None, None), as_json=True) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert "h100 has 0.0 GB" in found["problems"][0]["what"]
    assert "Take " in found["problems"][0]["fix"]


def test_a_pattern_of_tokens_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Which tokens of a block are seen is read from numbers, which a simulated step has not."""
    core = "{kind: block_sparse, block: 8, pattern: {kind: band, left: 11, right: 0}}"
    planned_step = planned(capsys, f"model.stack.block.mixer.core={core}", device="h100")
    assert planned_step["step_seconds"] > 0


@pytest.mark.parametrize(("world", "pp", "count"), [(1, 1, 0), (2, 1, 1), (2, 2, 5)])
def test_memory_of_communicators_is_counted(
    capsys: pytest.CaptureFixture[str], world: int, pp: int, count: int
) -> None:
    """One for each group of a rank, of which pp has two more, and one each way to a neighbouring stage."""
    found = planned(capsys, f"parallel.mesh.pp={pp}", world=world, device="h100")
    assert found["memory_bytes"]["communicators"] == count * found["device"]["communicator"]


def test_without_a_device_there_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys)
    assert found["fits"] is None
    assert run(CONFIG, TINY, 1, hardware(None, None, None, None, None)) == 0, "nothing says that it does not fit"
    assert found["step_seconds"] is None


@pytest.mark.long
def test_memory_alone_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    for gigabytes, fits in ((80.0, True), (1e-3, False)):
        assert run(CONFIG, TINY, 1, hardware(None, gigabytes, None, None, None), as_json=True) == (0 if fits else 3)
        found = json.loads(capsys.readouterr().out)
        assert (found["fits"], found["step_seconds"], len(found["problems"])) == (fits, None, 1 - fits)
        run(CONFIG, TINY, 1, hardware(None, gigabytes, None, None, None))
        assert ("DOES NOT FIT" in capsys.readouterr().out) != fits


def test_without_a_simulated_step_the_model_states_must_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "parallel.zero.engine=deepspeed", "parallel.zero.stage=1", world=2, device="h100")
    assert (found["fits"], found["problems"]) == (None, [])
    engine = ["parallel.zero.engine=deepspeed", "parallel.zero.stage=1"]
    run(CONFIG, [*TINY, *engine], 2, hardware("h100", 1e-6, None, None, None), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert "and optimizer states, and one h100 has 0.0 GB" in found["problems"][0]["what"]


def test_offloaded_states_do_not_count_for_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed's states in host memory; the text names what is not included."""
    plans = {}
    for place in ("none", "cpu"):
        engine = ["parallel.zero.engine=deepspeed", "parallel.zero.stage=2", f"parallel.zero.offload.optimizer={place}"]
        plans[place] = planned(capsys, *engine, world=2, device="h100")
        run(CONFIG, [*TINY, *engine], 2, hardware("h100", None, None, None, None))
        text = capsys.readouterr().out
        assert "unknown: the deepspeed engine needs real tensors" in text
        assert "without activations and gathered parameters" in text
        assert ("of host memory" in text) == (place == "cpu")
    here, there = (plans[place]["memory_at_rest_bytes"] for place in ("none", "cpu"))
    count = plans["none"]["parameters"]
    # Two states and a copy in float32 of each rank's half, and its gradients.
    assert here["total"] - there["total"] == pytest.approx((2 + 1 + 1) * 4 * count / 2, rel=1e-3)
    # On the CPU there is also a staging buffer for updated parameters.
    assert plans["cpu"]["memory_offloaded_bytes"] == {
        "cpu": pytest.approx((2 + 1 + 2) * 2 * count, rel=1e-3),
        "nvme": 0,
    }
    between = (here["total"] + there["total"]) / 2e9
    for place, fits in (("none", False), ("cpu", None)):
        engine = ["parallel.zero.engine=deepspeed", "parallel.zero.stage=2", f"parallel.zero.offload.optimizer={place}"]
        run(CONFIG, [*TINY, *engine], 2, hardware("h100", between, None, None, None), as_json=True)
        printed = json.loads(capsys.readouterr().out)
        assert printed["fits"] is fits
        if not fits:
            assert all("parallel.zero.offload.optimizer=cpu" in one["fix"] for one in printed["problems"])


@pytest.mark.parametrize(
    "name", ["h100", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("h200", "a100")), "cpu"]
)
def test_every_figure_of_a_device_says_where_it_is_from(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    device = planned(capsys, device=name)["device"]
    figures = {key for key, value in device.items() if type(value) in (int, float)}
    # Of a machine's own memory nothing is taken off.
    unsaid = figures - device["sources"].keys()
    assert unsaid == (set() if name != "cpu" else {"runtime", "communicator", "slack", "reach"})
    run(CONFIG, TINY, 1, hardware(name, 7.0, None, None, None), as_json=True)
    assert json.loads(capsys.readouterr().out)["device"]["sources"]["memory"] == "given on the command line"


def test_a_check_tells_the_launcher_what_a_plan_does(capsys: pytest.CaptureFixture[str]) -> None:
    check(CONFIG, TINY, 1, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed.items() <= planned(capsys).items()
    assert printed.keys() == {"world", "problems", "run_dir", "config", "files", "plugins"}
    with pytest.raises(ConfigError, match="3"):
        check(CONFIG, [*TINY, "parallel.mesh.tp=3"], 1, as_json=True)
    mixed = CliRunner().invoke(wrapped(), [str(CONFIG), "--check", "--device", "h100"])
    assert isinstance(mixed.exception, ConfigError)


@pytest.mark.long
def test_members_are_what_each_would_be_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lists = [["run.seed=1"], ["run.seed=2", "model.width=64"]]
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    words = [str(CONFIG), *TINY, "--world", "2", "--members"]
    done = CliRunner().invoke(wrapped(), [*words, str(tmp_path / "lists.json"), "--check"])
    alone = []
    for more in lists:
        check(CONFIG, [*TINY, *more], 2, as_json=True)
        alone.append(json.loads(capsys.readouterr().out))
    assert json.loads(done.stdout) == alone
    done = CliRunner().invoke(wrapped(), [*words, "-", "--memory", "1e-3"], input=json.dumps(lists))
    assert [one["fits"] for one in json.loads(done.stdout)] == [False, False]


def test_all_that_is_wrong_with_members_is_printed_and_with_which() -> None:
    lists = [["run.seed=1"], ["parallel.mesh.tp=3"], ["train.steps=0"], ["parallel.mesh.tp=3", "run.seed=2"]]
    with pytest.raises(ConfigError) as refused:
        members(CONFIG, TINY, json.dumps(lists), 2, None)
    said = str(refused.value).splitlines()
    assert any("(with parallel.mesh.tp=3 and 1 more)" in line for line in said)
    assert any("train.steps" in line and "(with train.steps=0)" in line for line in said)
    with pytest.raises(ConfigError) as refused:
        members(CONFIG, [*TINY, "model.widht=3"], json.dumps(lists[:1]), 2, None)
    assert "(with" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_what_is_no_list_of_overrides_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--members"):
        members(CONFIG, TINY, text, 2, None)


def test_every_key_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    text = Path("docs/how-to/plan.md").read_text()
    missing = [key for key in planned(capsys, device="h100") if f"`{key}`" not in text]
    assert not missing, missing


@pytest.mark.parametrize("ending", PICTURES)
@pytest.mark.sampled(2)
def test_a_schedule_is_drawn(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"schedule{ending}"
    run(CONFIG, [*TINY, "parallel.mesh.pp=2"], 2, hardware(None, None, None, None, None), draw=file)
    assert file.stat().st_size > 1000
    assert "bubble" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("h200x", None, None, None, None), "Take one of"),
        ((None, None, 8, None, None), "--device h100"),
        (("h100", -1.0, None, None, None), "must be greater than 0"),
    ],
)
def test_hardware_that_cannot_be_is_refused(options: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run(CONFIG, TINY, 1, hardware(*options))
    assert words in str(refused.value)


@pytest.mark.parametrize(("name", "words"), [("a.txt", ".svg"), ("a.png", "parallel.mesh.pp")])
def test_a_picture_that_cannot_be_is_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        run(CONFIG, TINY, 1, hardware(None, None, None, None, None), draw=tmp_path / name)
    assert words in str(refused.value)


def test_help_is_there() -> None:
    assert "--device" in CliRunner().invoke(wrapped(), ["--help"], env={"COLUMNS": "200"}).output

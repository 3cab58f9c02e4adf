"""`xscale check-part` on parts of a user: honest ones pass, each cheat is named in words, and a run refuses it too."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from xscale.commands.check_part import check_part
from xscale.conformance.families import FAMILIES
from xscale.conformance.run import SUITES, checks_for
from xscale.core.compose import compose
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.nn.attention.core import CORES
from xscale.recipe import read_and_check

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/new-attention.md"
EXAMPLE = re.findall(r'```python title="mine.py"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
"""The core of the documentation."""
LEAK = ("allowed / allowed.sum(-1, keepdim=True)", "(allowed + 1) / (allowed + 1).sum(-1, keepdim=True)")
CHEATS = {
    "reads the future": (*LEAK, "the future does not leak: tokens before 1 know those from it on, in evaluation"),
    "no multiply_adds": (
        "def multiply_adds",
        "def additions",
        "its cost is what it says: the part does not define `multiply_adds`",
    ),
    "another shape": (
        "return (weights @ v)",
        "return (weights @ v)[:, :, 1:]",
        "the future does not leak: `out.shape == q.shape` does not hold",
    ),
    "mixes documents": (
        "allowed = mask.allowed",
        "allowed = torch.ones(q.shape[2], k.shape[2]).tril(mask.offset)[None, None] if self.causal else None",
        "packed documents stay apart: a document sees the one before it",
    ),
    "raises": ("allowed.sum(-1", "alowed.sum(-1", "the future does not leak: NameError at "),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to start in; what a test registers is gone after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(CORES, "_entries", dict(CORES._entries))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if name.startswith("mine"):
            del sys.modules[name]


def write(folder: Path, name: str, change: tuple[str, str] | None = None) -> Path:
    file = folder / f"{name}.py"
    assert change is None or change[0] in EXAMPLE
    file.write_text(EXAMPLE.replace(*change) if change else EXAMPLE, encoding="utf-8")
    return file


def test_each_family_has_its_checks() -> None:
    assert set(SUITES) == set(FAMILIES)
    assert all(checks_for(name) for name in FAMILIES)
    assert all(any(check.at_start for check in checks_for(name)) for name in FAMILIES)


def test_the_example_of_the_documentation_passes_to_the_letter(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, "mine_honest")
    assert check_part("mine_honest.py", []) == 0
    printed = capsys.readouterr().out
    assert "  ok     the future does not leak\n" in printed
    assert re.search(r"core 'uniform': (\d+) of \1 checks pass", printed), printed
    assert "FAILS" not in printed


def test_a_cheat_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, sentence = CHEATS["reads the future"]
    write(folder, "mine_leaky", (old, new))
    assert check_part("mine_leaky.py", ["uniform"]) == 1
    printed = capsys.readouterr().out
    assert f"  FAILS  {sentence}\n" in printed
    assert "  ok     it looks both ways\n" in printed


@pytest.mark.parametrize("name", CHEATS)
def test_a_run_refuses_a_cheat_in_a_sentence(name: str, folder: Path) -> None:
    old, new, sentence = CHEATS[name]
    module = f"mine_{name.replace(' ', '_')}"
    write(folder, module, (old, new))
    with pytest.raises(ConfigError) as refused:
        read_and_check(compose(ROOT / "configs/run/quickstart.yaml", [f"plugins=[{module}]"]))
    (problem,) = refused.value.problems
    assert problem.what.startswith(f"core 'uniform' breaks a promise, {sentence}")
    assert f"xscale check-part {module}" in problem.advice


def test_the_command_that_a_refusal_prints_finds_the_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the command was started above the config."""
    (folder / "configs").mkdir()
    write(folder / "configs", "mine_below", LEAK)
    (folder / "configs/mine.yaml").write_text("use: [run/bytes]\nplugins: [mine_below]\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_and_check(compose(folder / "configs/mine.yaml", []))
    assert "`xscale check-part configs/mine_below.py` runs" in str(refused.value)


def test_a_module_beside_the_config_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the command starts elsewhere; and one that is nowhere is a sentence that says where to put it."""
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    write(folder, "mine_beside")
    config = folder / "mine.yaml"
    text = "use: [{}]\nplugins: [mine_beside]\nmodel: {{stack: {{block: {{mixer: {{core: uniform}}}}}}}}\n"
    config.write_text(text.format(ROOT / "configs/run/quickstart.yaml"), encoding="utf-8")
    recipe, _ = read_and_check(compose(config, []))
    assert recipe.plugins == ("mine_beside",)
    with pytest.raises(ConfigError, match=r"put mine_nowhere\.py beside the config"):
        read_and_check(compose(config, ["plugins=[mine_nowhere]"]))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.py"], "there is no such file"),
        (["json"], "no part is registered"),
        (["no_such_module_here"], "cannot be imported"),
        (["mine_named.py", "unifrom"], "Did you mean 'uniform'"),
        (["json.py"], "Give the file another name"),
        (["my-part.py"], "its name is no name of a module"),
        (["mine_broken.py"], "cannot be imported: "),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_is_a_sentence(words: list[str], sentence: str, folder: Path) -> None:
    write(folder, "mine_named")
    for name in ("json.py", "my-part.py"):
        (folder / name).touch()
    (folder / "mine_broken.py").write_text("import nothing_of_that_name\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check_part(words[0], words[1:])


def test_assertions_that_are_left_out_are_said(folder: Path) -> None:
    """Without them each check would pass."""
    write(folder, "mine_fast", LEAK)
    done = subprocess.run(
        [sys.executable, "-O", "-m", "xscale", "check-part", "mine_fast.py"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))},
    )
    assert done.returncode == 2
    assert "Start Python without -O" in done.stderr


def test_a_file_of_a_package_is_checked_under_its_full_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its package has registered it already."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert check_part(str(ROOT / "xscale/nn/position/learned.py"), []) == EXIT_DONE
    assert "position 'learned'" in capsys.readouterr().out
    copy = tmp_path / "xscale/nn/position/learned.py"
    copy.parent.mkdir(parents=True)
    for folder in (tmp_path / "xscale", tmp_path / "xscale/nn", copy.parent):
        (folder / "__init__.py").touch()
    copy.touch()
    with pytest.raises(ConfigError, match=r"Python reads .xscale\.nn\.position\.learned. from another place"):
        check_part(str(copy), [])

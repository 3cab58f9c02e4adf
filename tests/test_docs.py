"""README and documentation say what is true: their commands run, their tables and generated pages are the code's."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.combinations import markdown as combinations
from xscale.commands.show.catalogue import ids
from xscale.commands.show.list_parts import markdown
from xscale.parallel.steps import STEPS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "docs/tutorial.md", *sorted((ROOT / "docs").rglob("*/*.md"))]
SHORT = [
    "train.steps=2",
    "train.eval_every=0",
    "train.sample.prompts=[]",
    "train.batch_size=2",
    "train.micro_batch_size=1",
    "schedule.warmup_steps=0",
    "data.sequence_length=64",
    "data.workers=1",
]
"""Overrides that make a command take seconds."""
CONFIG = r"(?:configs/(?:run|compare|ladder)/|\bmy_)\S+\.yaml"
"""A run's config in a command: one of xscale's, or one that `xscale init` wrote."""


def commands(page: Path) -> list[str]:
    """The lines of the page's `sh` blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def titled_blocks(page: Path) -> dict[str, str]:
    """The page's blocks that are whole files: the file's name -> its text."""
    blocks = re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', page.read_text(encoding="utf-8"), re.DOTALL)
    return dict(blocks)


def section(name: str) -> str:
    """The text between the README's marks of that name."""
    match = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", README, re.DOTALL)
    assert match, name
    return match[1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder from which the documented commands can be started."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("configs", "docs", "xscale"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", folder)
    return folder


def start(command: str, folder: Path, tools: Path = Path(sys.executable).parent) -> subprocess.CompletedProcess[str]:
    """Run a documented line in `folder`, with the programs of `tools` first: this Python's, or those of another."""
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    # The folder's own sources are the data of some commands, and compiled files are no text.
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def shortened(command: str, text: str = "xscale/core, xscale/nn") -> str:
    """The same command with fewer and smaller steps, on the files of `text`; overrides of the command itself win."""
    if " bench moe" in command:
        return f"{command} --width 64 --tokens 128 --rounds 1"
    if " bench decode" in command:
        return f"{command} --width 64 --depth 1 --tokens 4 --rounds 1"
    if " bench parallel" in command:
        return f"{command} --width 64 --length 64 --rounds 1"
    if command.startswith("xscale plan configs/run/") and "quickstart" not in command:
        return command
    if not re.search(CONFIG, command) or "--print-config" in command or " init " in command:
        return command
    words = list(SHORT)
    own = "data.source" in command or "my_table" in command
    source = "" if own else f" 'data.source={{kind: text, paths: [{text}]}}'"
    small = "" if " compare " in command else " data.tokenizer.vocabulary=1024"
    if " bench " in command and " bench start" not in command:
        words.append("--steps=1")
    if "finetune" in command or "_of_classes" in command:
        # Its texts have labels, and length and tokenizer are those of the run that it begins with.
        source, small, words = "", "", [word for word in words if "sequence_length" not in word]
    if " ladder " in command:
        tokens = "sed -i 's/^tokens:.*/tokens: [640, 1280, 2560]/' configs/ladder/bytes.yaml"
        return f"{tokens} && {command}{source} {' '.join(word for word in words if 'steps' not in word)}"
    if " compare " in command:
        words = [*(word for word in words if "eval_every" not in word), "train.eval_every=1", "--seed=0", "--steps=1"]
    return re.sub(CONFIG, lambda match: f"{match[0]}{source}{small} {' '.join(words)}", command)


def test_make_and_ci_run_the_commands_of_the_readme() -> None:
    """The make commands are too long for a test within themselves: the CI script runs them."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    made = {command for page in PAGES for command in commands(page) if command.startswith("make ")}
    for command in made:
        assert re.search(rf"^{re.escape(command)}( |$)", script, re.MULTILINE), command
    assert {"make train", "make test"} <= made


FIRST = (ROOT / "README.md",)
"""Pages that a new user types from."""


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[] if page in FIRST else [pytest.mark.nightly])
        for page in PAGES
    ],
)
def test_the_commands_of_a_page_run(checkout: Path, page: Path) -> None:
    """Runs the commands in the page's order, since some commands use what others made, with the page's files there."""
    for name, text in titled_blocks(page).items():
        if not name.startswith("configs/"):
            (checkout / name).write_text(text, encoding="utf-8")
    for command in commands(page):
        if command.startswith(("make ", "source ")):
            continue
        done = start(shortened(command), checkout)
        assert done.returncode == 0, f"{shortened(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def python_blocks(page: Path) -> list[str]:
    """The page's blocks of Python that are no files."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


WITH_PYTHON = [page for page in PAGES if page.parent.name == "how-to" and python_blocks(page)]
"""Other pages quote the code."""
BY_DOWNLOAD = ("lm_eval",)
"""Packages whose functions download: of a block that imports them, what it imports of xscale is imported."""


def program_of(page: Path) -> str:
    """The page's blocks in order as one program, its recipes shortened."""
    lines = []
    for block in python_blocks(page):
        if any(f"import {package}" in block for package in BY_DOWNLOAD):
            compile(block, str(page), "exec")
            block = "\n".join(re.findall(r"^from xscale.* import .*$", block, re.MULTILINE))
        lines.append(block)
    short = [*SHORT, "data.source={kind: text, paths: [xscale/core, xscale/nn]}"]
    return re.sub(r'\["train\.steps=\d+"', repr(short)[:-1], "\n".join(lines))


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(checkout: Path, page: Path) -> None:
    """Run as one program, block after block, as a reader copies them."""
    (checkout / "blocks.py").write_text(program_of(page), encoding="utf-8")
    done = start("python blocks.py", checkout)
    assert done.returncode == 0, done.stderr[-4000:]


def test_pages_with_python_are_found() -> None:
    """Negative control."""
    assert {page.name for page in WITH_PYTHON} >= {"python.md", "new-attention.md", "evaluate.md"}
    assert "train.batch_size=2" in program_of(ROOT / "docs/how-to/python.md")


def test_the_home_page_leads_to_every_page() -> None:
    """And to no page that is there after `make docs` alone."""
    home = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([\w/.-]+\.md)", home)}
    assert linked == {page for page in (ROOT / "docs").rglob("*.md") if page.name != "index.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_to_a_page_of_the_repository(page: Path) -> None:
    """A page that is made with the site alone (`make docs`) is a dead link for a reader of the repository."""
    links = re.findall(r"\]\(([\w/.-]+\.md)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_config_that_a_page_shows_is_the_file(page: Path) -> None:
    for name, text in titled_blocks(page).items():
        if name.startswith("configs/"):
            assert (ROOT / name).read_text(encoding="utf-8").endswith(text), name


def test_there_are_commands_to_run() -> None:
    """Negative control of the test above: it would pass over pages without commands."""
    counts = {page.name: len(commands(page)) for page in PAGES}
    assert counts["README.md"] >= 5
    assert counts["tutorial.md"] >= 10
    assert sum(counts.values()) >= 35


@pytest.mark.nightly
def test_a_command_that_is_wrong_is_seen(checkout: Path) -> None:
    """Negative control."""
    assert start("xscale train configs/run/quickstart.yaml modle.width=3", checkout).returncode == 2


def test_the_table_of_parts_is_the_codes() -> None:
    assert section("parts") == markdown(), "run: python -m tests.test_docs"


def test_the_steps_of_a_plan_are_the_codes() -> None:
    page = (ROOT / "docs/explanation/three-moves.md").read_text(encoding="utf-8")
    match = re.search(r"<!-- steps -->\n(.*?)\.\n<!-- /steps -->", page, re.DOTALL)
    assert match
    assert " ".join(match[1].split()).split(", ") == [step.name for step in STEPS]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.long
def test_every_reason_of_the_table_of_combinations_is_referred_to() -> None:
    table = combinations()
    numbers = {int(number) for number in re.findall(r"\((\d+)\)", table.split("\n\n")[0])}
    assert numbers == {int(number) for number in re.findall(r"^(\d+)\. ", table, re.MULTILINE)}
    assert numbers


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs/index.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {ROOT / name for name in re.findall(r"`((?:xscale|configs|kernels|launch|tests)(?:/[\w.]+)*)`", text)}
    if page.parent == ROOT:
        named |= {ROOT / name for name in re.findall(r"\]\(([\w/.-]+)\)", text)}
    # uniform.py is the example that a reader adds.
    assert [path for path in named if not path.exists() and path.name != "uniform.py"] == []


def hooks() -> ModuleType:
    """docs/hooks.py, which generates the reference pages."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_the_reference_has_every_key_part_and_command() -> None:
    pages = hooks().pages()
    config, parts, command = (pages[f"reference/{name}.md"] for name in ("config", "parts", "commands"))
    for key in ("train.batch_size", "parallel.mesh.dp_shard", "checkpoint.every_steps", "train.sample.prompts"):
        assert f"`{key}`" in config
    for part in re.findall(r"`(\w+)`", "\n".join(line.split("|")[2] for line in markdown().splitlines()[2:])):
        assert re.search(rf"^### \w+: {part}$", parts, re.MULTILINE), part
    for name in ("xscale train", "xscale checkpoint verify", "xscale bench moe", "xscale data prepare"):
        assert f"## {name}\n" in command
    for id in ids():
        assert f"\n| `{id}` | " in pages["reference/xformers.md"], id
    # Every key has its sentence: no row of a table ends in an empty cell.
    assert not re.findall(r"^\| `.*\|  \|$", config + parts, re.MULTILINE)


@pytest.mark.nightly
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Strict: a page outside of the navigation, or a link that leads nowhere, is an error."""
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(
        [*mkdocs, "-d", str(tmp_path / "site")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parallel.mesh.dp_shard" in (tmp_path / "site/reference/config/index.html").read_text(encoding="utf-8")


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    """Negative control: the strict build fails."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[nowhere](nowhere.md)", encoding="utf-8")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    small = {key: settings[key] for key in ("site_name", "strict", "validation")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(small), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", str(tmp_path / "mkdocs.yml")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode != 0
    assert "nowhere.md" in done.stdout + done.stderr


if __name__ == "__main__":
    marked = f"<!-- parts -->\n{markdown()}<!-- /parts -->"
    text = re.sub(r"<!-- parts -->\n.*?<!-- /parts -->", lambda _: marked, README, flags=re.DOTALL)
    (ROOT / "README.md").write_text(text, encoding="utf-8")

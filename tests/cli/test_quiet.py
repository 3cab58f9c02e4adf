"""Messages of libraries stay away from the terminal; errors, the user's own code and what was asked for do not."""

import logging
import sys
import sysconfig
import warnings
from pathlib import Path

import pytest

from tests.cli.test_every_command import noise_in, type_command
from xscale.cli.terminal.quiet import LibraryLogger, is_of_library, silent_libraries, without_libraries
from xscale.core.errors import NoticeWarning

INSTALLED = f"{sysconfig.get_paths()['purelib']}/torchao/__init__.py"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (INSTALLED, True),
        (warnings.__file__, True),
        ("<frozen importlib._bootstrap>", True),
        (str(ROOT / "xscale/train/loop.py"), True),
        (str(ROOT / "kernels/xscale_kernels/select.py"), True),
        ("/home/me/xscale/mine.py", False),
        ("mine.py", False),
    ],
)
def test_whose_message_it_is(file: str, expected: bool) -> None:
    assert is_of_library(file) is expected


@pytest.mark.parametrize(
    ("name", "level", "file", "printed"),
    [
        ("torchao", logging.WARNING, INSTALLED, False),
        ("torchao", logging.ERROR, INSTALLED, True),
        ("mine", logging.WARNING, "mine.py", True),
        ("xscale.checkpoint", logging.WARNING, str(ROOT / "xscale/checkpoint/retention.py"), True),
    ],
)
def test_which_log_lines_are_handed_on(
    name: str, level: int, file: str, printed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = LibraryLogger(name)
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.handle(logger.makeRecord(name, level, file, 1, "Failed to load", (), None))
    assert bool(capsys.readouterr().err) is printed


def test_loggers_are_silent_within_and_as_before_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    before = logging.getLoggerClass()
    with silent_libraries():
        assert isinstance(logging.getLogger("of_a_library"), LibraryLogger)
    assert logging.getLoggerClass() is before
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    with silent_libraries():
        assert logging.getLoggerClass() is before


@pytest.mark.parametrize(("file", "shown"), [(INSTALLED, 0), ("mine.py", 1)])
def test_a_warning_of_a_library_is_left_out(file: str, shown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    show = without_libraries(lambda message, *_, **__: printed.append(str(message)))
    show("deprecated", FutureWarning, file, 3)
    assert len(printed) == shown
    monkeypatch.setattr(sys, "warnoptions", ["default"])
    show("deprecated", FutureWarning, file, 3)
    assert len(printed) == shown + 1


PLUGIN = """
import logging, warnings
logging.getLogger("installed").warning("Failed to load what nobody asked for")
warnings.warn("this is deprecated", FutureWarning)
"""


def test_a_plugin_speaks_and_a_package_that_it_imports_does_not(tmp_path: Path) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "installed.py").write_text(PLUGIN, encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        f"import sys\nsys.path.append({str(package)!r})\nimport installed\n" + PLUGIN.replace("Failed", "Mine: failed"),
        encoding="utf-8",
    )
    (tmp_path / "run.yaml").write_text(f"use: [{ROOT / 'configs/run/bytes.yaml'}]\nplugins: [mine]\n", encoding="utf-8")
    done = type_command(["train", "run.yaml", "train.steps=-1"], tmp_path)
    assert "Mine: failed to load" in done.stderr
    assert "mine.py:" in done.stderr
    assert "Failed to load" not in done.stderr
    assert done.stderr.count("deprecated") == 2, "the warning and its line of mine.py"


def test_a_notice_of_ours_is_no_warning_of_a_library() -> None:
    assert not issubclass(NoticeWarning, FutureWarning | DeprecationWarning)


@pytest.mark.parametrize(
    "line",
    [
        "Failed to load /usr/lib/python3/dist-packages/torchao/_C.so: Could not load this library",
        "W1128 17:18:07.459000 27373 torch/utils/_pytree.py:630] <enum 'KernelPreference'> is an Enum subclass",
        "[W1128 17:18:07.459 socket.cpp:767] [c10d] The client socket cannot be initialized",
        "/usr/lib/python3.11/site-packages/torch/x.py:3: FutureWarning: is deprecated",
        "Loading weights: 100%|##########| 12/12",
        "[2026-11-28 17:18:07,459] [INFO] [real_accelerator.py:254:get_accelerator] Setting ds_accelerator to cpu",
        "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    ],
)
def test_noise_is_seen(line: str) -> None:
    """Negative control."""
    assert noise_in(f"xscale: one\n{line}\n") == [line]


@pytest.mark.parametrize("text", ["xscale: warning: the newest checkpoint is damaged", "step 3: loss 5.2 (100 %)", ""])
def test_what_we_say_is_no_noise(text: str) -> None:
    assert noise_in(text) == []

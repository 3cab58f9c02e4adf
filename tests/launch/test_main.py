"""The launcher's command line itself."""

import pytest

from xscale_launch.main import main, verbs


def test_no_verb_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {verb} " in said for verb in verbs())


def test_an_unknown_verb_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lokal", "x.yaml"]) == 2
    assert "unknown verb 'lokal'; did you mean local?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_tells_its_options(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: xscale launch {verb}")
    assert "--xscale" not in said


def test_options_may_stand_anywhere(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    config = tmp_path / "x.yaml"  # type: ignore[operator]
    config.write_text("")
    words = ["local", "--dry-run", str(config), "train.steps=3", "--processes", "2", "run.dir=/nowhere"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.count("train.steps=3 run.dir=/nowhere") == 2

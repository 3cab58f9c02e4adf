"""Files and output of the launcher: for this user alone, without secrets, and in its own folder."""

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from xscale_launch import files
from xscale_launch.files import (
    check_line,
    check_variable,
    masked,
    open_append,
    remove_file,
    remove_folder,
    write_private,
)
from xscale_launch.nodes.devices import address_to_listen_on
from xscale_launch.profile import Container, Profile, load
from xscale_launch.slurm import script
from xscale_launch.slurm.job import Job, check_job
from xscale_launch.status import LaunchError

SECRETS = {"WANDB_API_KEY": "k3y", "HF_TOKEN": "t0ken", "DB_PASSWORD": "pa55", "MY_SECRET": "s3cret", "X_AUTH": "4uth"}


def job(tmp_path: Path, **changes: object) -> Job:
    profile = Profile(**{"time": "1:00:00", **changes})  # type: ignore[arg-type]
    return Job("run", tmp_path / "run", tmp_path, profile, "python3", ("python3", "-m", "xscale", "train"))


def test_a_script_is_for_this_user_alone(tmp_path: Path) -> None:
    """Also where another one was readable before, whatever the umask."""
    path = tmp_path / "job.sbatch"
    path.write_text("before")
    path.chmod(0o644)
    umask = os.umask(0)
    try:
        write_private(path, "secret")
    finally:
        os.umask(umask)
    assert path.read_text() == "secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_secrets_of_a_profile_are_not_shown(tmp_path: Path) -> None:
    ours = job(tmp_path, environment={**SECRETS, "NCCL_DEBUG": "WARN"})
    shown, submitted = script.render(ours, shown=True), script.render(ours)
    for name, value in SECRETS.items():
        assert value not in shown
        assert f"export {name}='{files.MASK}'" in shown
        assert f"export {name}={value}" in submitted
    assert "export NCCL_DEBUG=WARN" in shown
    assert masked({"PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_messages_on_a_profile_show_no_values_of_a_table(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"clusters.{suffix}"
    wrong = {"toml": 'a = {memory = {HF_TOKEN = "t0ken"}}', "yaml": "a: {memory: {HF_TOKEN: t0ken}}"}
    broken = {"toml": 'HF_TOKEN = "t0ken', "yaml": "a: {environment: {HF_TOKEN: 't0ken}}"}
    lists = {"toml": 'a = {environment = ["t0ken"]}', "yaml": "a: {environment: [t0ken]}"}
    for text in (wrong[suffix], broken[suffix], lists[suffix]):
        path.write_text(text)
        with pytest.raises(LaunchError) as refused:
            load(path, "a")
        assert "t0ken" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "A B", "A=1; touch touched; B", "A$(touch touched)", "1A", "A\nB"])
@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_a_name_of_a_profile_that_is_no_variable_is_refused(tmp_path: Path, suffix: str, name: str) -> None:
    """The script exports it as it is written."""
    path = tmp_path / f"clusters.{suffix}"
    text = {"toml": f"a = {{environment = {{{json.dumps(name)} = '1'}}}}", "yaml": None}[suffix]
    path.write_text(text or json.dumps({"a": {"environment": {name: "1"}}}))
    with pytest.raises(LaunchError, match=r"a\.environment: .* cannot name an environment variable"):
        load(path, "a")


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\0b", "a\x1bb", "a\u2028b", 'a"b', "a'b", "a\\b"])
def test_a_text_that_changes_other_lines_of_the_script_is_refused(tmp_path: Path, text: str) -> None:
    for name in ("partition", "account", "qos", "constraint", "reservation", "memory", "interface", "python"):
        with pytest.raises(LaunchError, match=name):
            check_job(job(tmp_path, **{name: text}))
    for name in ("run", "folder", "name"):
        changed = {"run": tmp_path / text, "folder": tmp_path / text, "name": text}[name]
        with pytest.raises(LaunchError, match="contains a"):
            check_job(argparse.Namespace(**{**vars(job(tmp_path)), name: changed}))  # type: ignore[arg-type]
    if not text.isprintable():
        for changes in ({"options": (text,)}, {"modules": (text,)}, {"container": Container(image=text)}):
            with pytest.raises(LaunchError):
                check_job(job(tmp_path, **changes))
        with pytest.raises(LaunchError):
            check_line("it", text)
    with pytest.raises(LaunchError, match="is not the name of a node"):
        check_job(job(tmp_path, exclude=(text,)))
    with pytest.raises(LaunchError, match="cannot name an environment variable"):
        check_variable("here", text)


def test_what_sbatch_and_the_shell_interpret_is_quoted(tmp_path: Path) -> None:
    """A run folder with every character that may be in one, and values and modules that are commands."""
    name = "100%j %% $(touch touched) `touch touched`; touch touched & #!*?[a]{b}~"
    evil = "x; touch touched $(touch touched) '\""
    ours = check_job(job(tmp_path / name, environment={"A": evil}, modules=(evil,)))
    lines = script.render(ours).splitlines()
    (output,) = (line for line in lines if line.startswith("#SBATCH --output="))
    assert output.replace("%%", "") == output.replace("%", "").replace("/j.log", "/%j.log")
    (run,) = (line for line in lines if line.startswith("run="))
    (export,) = (line for line in lines if line.startswith("export A="))
    (module,) = (line for line in lines if line.startswith("module load "))
    program = f'module() {{ echo "$2"; }}\n{run}\n{export}\n{module}\necho "$run"\necho "$A"\n'
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [evil, str(ours.run), evil]
    assert shlex.quote(str(ours.run)) in run
    # The commands that a user may copy from the head of the script.
    (hint,) = (line for line in lines if line.startswith("# Written by"))
    assert shlex.quote(str(ours.run)) in hint
    assert shlex.quote(str(ours.script)) in hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "/a", "a/b", "a\0"])
def test_nothing_outside_its_folder_is_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    for remove in (remove_file, remove_folder):
        with pytest.raises(ValueError, match="is not the name of a file"):
            remove(tmp_path / "folder", name)


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").touch()
    for remove in (remove_file, remove_folder):
        (tmp_path / "link").symlink_to("other")
        remove(tmp_path, "link")
        assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "other" / "precious").exists()


def test_where_the_head_node_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """At an address of its own; a name may be another address on another machine. Other faults are not hidden."""
    assert address_to_listen_on("127.0.0.2") == "127.0.0.2"
    for name in ("localhost", "192.0.2.1", "no such name", "", "127.0.0.1/8"):
        assert address_to_listen_on(name) == ""
    monkeypatch.setattr(socket.socket, "bind", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(PermissionError):
        address_to_listen_on("127.0.0.2")


@pytest.mark.parametrize("interface", ["lo", "none0", "lo; touch touched", "a,b"])
def test_the_rendezvous_is_at_the_address_of_the_interface(tmp_path: Path, interface: str) -> None:
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (package iproute2)")
    text = script.render(job(tmp_path, interface=interface))
    begin = text.index("MASTER_ADDR=$(")
    lines = text[begin : text.index("MASTER_PORT=", begin)]
    program = f'scontrol() {{ echo head; }}\nSLURM_JOB_NODELIST=head\n{lines}\necho "$MASTER_ADDR"\n'
    done = subprocess.run(["bash", "-uc", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == ("127.0.0.1\n" if interface == "lo" else "head\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "folder"])
def test_nothing_but_a_file_is_appended_to(tmp_path: Path, kind: str) -> None:
    """A run folder may come from somebody else."""
    (tmp_path / "yours").write_text("yours")
    path = tmp_path / "launch" / "jobs.jsonl"
    path.parent.mkdir()
    make = {
        "link": lambda: path.symlink_to(tmp_path / "yours"),
        "dangling link": lambda: path.symlink_to(tmp_path / "new"),
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    make[kind]()
    with pytest.raises(LaunchError, match=r"jobs\.jsonl is .*: remove it, or choose another run\.dir"):
        open_append(path)
    assert (tmp_path / "yours").read_text() == "yours"
    assert not (tmp_path / "new").exists()
    with open_append(tmp_path / "other" / "jobs.jsonl") as file:
        file.write(b"a")

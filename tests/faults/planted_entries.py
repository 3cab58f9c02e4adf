"""Entries that may stand in the place of a file or folder that a run writes: each kind makes one at `path`.

`outside` is a folder with a `file` and a `folder` that nobody may change.
"""

import os
import socket
import stat
from pathlib import Path

import pytest


def link_to_file(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "file")


def link_to_folder(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "folder")


def dangling_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "new")


def fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, outside: Path) -> None:
    path.mkdir()


def file(path: Path, outside: Path) -> None:
    path.write_text("this is something else\n")


def unix_socket(path: Path, outside: Path) -> None:
    # A path of a socket has at most 107 bytes.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError as error:
        pytest.skip(f"a device needs root: {error}")


KINDS = (link_to_file, link_to_folder, dangling_link, fifo, folder, file, unix_socket, device)

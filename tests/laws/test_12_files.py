"""Law 12: what is read runs nothing; one file each decodes JSON, reads YAML, removes, opens and prints."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.laws.bent import unbent
from tests.laws.tree import ROOT, File, dotted, files, meaning, plant

UNPICKLER = "xscale/checkpoint/index.py"
"""The restricted unpickler."""
REMOVAL = ("xscale/core/files/file_safety.py", "launch/xscale_launch/files.py")
"""xscale's removal, and that of the launcher, which runs without xscale."""
DECODER = ("xscale/core/files/file_safety.py", "launch/xscale_launch/typed_json.py")
"""xscale's decoder of JSON, and the launcher's: json itself raises RecursionError for nesting, which few catch."""
YAML_FILES = ("xscale/core/yaml_reader.py", "xscale/core/yaml_writer.py")
"""The reader of YAML and the writer of what it reads: PyYAML's own loaders recurse, expand aliases without end, and
read the types of YAML 1.1."""
YAML_WRITERS = {"yaml.safe_dump"}
UNPICKLES = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "pickle._Unpickler",
    "numpy.load",
    "numpy.fromfile",
    "torch.package",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.load_all",
    "yaml.unsafe_load_all",
    "yaml.full_load_all",
}
"""Calls that run what a file names, or would for some argument; YAML by `yaml.safe_load` or a safe loader alone."""
UNPICKLING_MODULES = {"marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "cPickle", "_pickle"}
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "yaml.BaseLoader", "yaml.CBaseLoader"}
RUN_PACKAGES = (
    "xscale/checkpoint/",
    "xscale/observe/",
    "xscale/run/",
    "xscale/step/",
    "xscale/distill/",
    "xscale/generate/",
    "xscale/evaluate/",
    "xscale/train/",
    "xscale/watchdog/",
    "xscale/core/files/atomic_write.py",
    "xscale/core/files/file_lock.py",
    "xscale/commands/study/train_runs.py",
    "xscale/data/corpus/stored_tokenizer.py",
    "launch/xscale_launch/",
)
"""Code that reads and writes run folders: by `xscale.core.files.run_files`.

It follows no link and waits for no FIFO."""
OPENERS = ("launch/xscale_launch/files.py", "xscale/core/files/run_files.py", "xscale/core/files/file_safety.py")
"""The launcher runs without xscale, and opens files of a run by its own functions of the same kind."""
OPENS = {
    "open",
    "io.open",
    "io.FileIO",
    "os.open",
    "os.fdopen",
    "os.mkfifo",
    "os.mknod",
    "os.symlink",
    "os.link",
    "gzip.open",
    "gzip.GzipFile",
    "bz2.open",
    "lzma.open",
    "codecs.open",
    "tarfile.open",
    "zipfile.ZipFile",
    "shutil.copy",
    "shutil.copy2",
    "shutil.copyfile",
    "shutil.copytree",
    "shutil.move",
    "sqlite3.connect",
    "numpy.memmap",
    "numpy.save",
    "numpy.savez",
    "numpy.savetxt",
    "torch.save",
    "safetensors.torch.save_file",
    "safetensors.safe_open",
}
OPENING_METHODS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "symlink_to", "hardlink_to"}
LIBRARIES_METHODS = {"save_pretrained", "from_pretrained", "export_chrome_trace", "tofile"}
"""Methods of libraries that open a file by its name."""
FOLLOWING = {"open_regular", "read_regular"}
"""Functions for the files that a user names, which may be links."""
PRINTER = "launch/xscale_launch/command.py"
"""The file that prints for the launcher: text may be from a run folder, a log or a node, and a terminal obeys none."""
PRINTS = {"print", "sys.stdout.write", "sys.stderr.write"}
REMOVES = {"shutil.rmtree", "os.remove", "os.unlink", "os.rmdir", "os.removedirs"}
REMOVING_METHODS = {"unlink", "rmdir", "rmtree"}


def unpicklers(root: Path) -> dict[str, str]:
    return {file.at(node, what): what for file in files(root) for node, what in unpicklers_of(file)}


def unpicklers_of(file: File) -> Iterator[tuple[ast.AST, str]]:
    known = meaning(file)
    for node in file.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node, module) for module in modules if module.split(".")[0] in UNPICKLING_MODULES)
        if isinstance(node, ast.Call):
            if (called := full_name(node.func, known)) == "torch.load" and not is_weights_only(node):
                yield node, "torch.load without weights_only=True"
            elif called == "yaml.load" and not is_safe(node, file, known):
                yield node, "yaml.load without a safe loader"
            elif any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                yield node, "allow_pickle"
        name = full_name(node, known) if isinstance(node, ast.Attribute | ast.Name) else ""
        if name in UNPICKLES and (file.path, name) != (UNPICKLER, "pickle._Unpickler"):
            yield node, name


def full_name(node: ast.AST, known: dict[str, str]) -> str:
    """`loads` -> `pickle.loads`, after `from pickle import loads`."""
    first, _, rest = dotted(node).partition(".")
    return ".".join(filter(None, [known.get(first, first), rest]))


def is_weights_only(call: ast.Call) -> bool:
    return any(
        keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


def is_safe(call: ast.Call, file: File, known: dict[str, str]) -> bool:
    """Whether the loader is a safe one, or a class of the file that is derived from a safe one."""
    bases = {
        node.name: {full_name(base, known) for base in node.bases}
        for node in file.nodes
        if isinstance(node, ast.ClassDef)
    }
    loaders = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "Loader")]
    names = {full_name(loader, known) for loader in loaders}
    return bool(names) and all(name in SAFE_LOADERS or bases.get(name, set()) & SAFE_LOADERS for name in names)


def decoders(root: Path) -> dict[str, str]:
    """Uses of json's decoder in the packages."""
    others = [file for file in files(root, ("xscale", "launch")) if file.path not in DECODER and "json" in file.text]
    return {file.at(node, what): what for file in others for node, what in decoders_of(file)}


def decoders_of(file: File) -> Iterator[tuple[ast.AST, str]]:
    known = meaning(file)
    for node in file.nodes:
        name = full_name(node, known) if isinstance(node, ast.Attribute | ast.Name) else ""
        if name in ("json.load", "json.loads", "json.JSONDecoder"):
            yield node, name


def yaml_readers(root: Path) -> dict[str, str]:
    others = [file for file in files(root, ("xscale", "launch")) if file.path not in YAML_FILES and "yaml" in file.text]
    return {file.at(node, what): what for file in others for node, what in yaml_readers_of(file)}


def yaml_readers_of(file: File) -> Iterator[tuple[ast.AST, str]]:
    known = meaning(file)
    for node in file.nodes:
        name = full_name(node, known) if isinstance(node, ast.Attribute | ast.Name) else ""
        if name.startswith("yaml.") and name not in YAML_WRITERS and not name.endswith(("Error", "error")):
            yield node, name


def openers(root: Path) -> dict[str, str]:
    """Ways to open a file other than by `core.files.run_files` or the launcher's.

    Outside of the packages of run folders the functions for files that a user names are free.
    """
    others = [file for file in files(root) if file.path not in OPENERS]
    return {
        file.at(node, what): what
        for file in others
        for node, what in openers_of(file)
        if what not in FOLLOWING or file.path.startswith(RUN_PACKAGES)
    }


def openers_of(file: File) -> Iterator[tuple[ast.AST, str]]:
    known = meaning(file)
    for node in file.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = full_name(node.func, known)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in OPENS:
            yield node, name
        elif method in OPENING_METHODS | LIBRARIES_METHODS:
            yield node, f".{method}"
        elif name.rpartition(".")[2] in FOLLOWING:
            yield node, name.rpartition(".")[2]


def printers(root: Path) -> dict[str, str]:
    """Ways in which the launcher prints other than by `write` and `say`."""
    others = [file for file in files(root, ("launch",)) if file.path != PRINTER]
    return {
        file.at(node, name): name
        for file in others
        for node in file.nodes
        if isinstance(node, ast.Call) and (name := full_name(node.func, meaning(file))) in PRINTS
    }


def removals(root: Path) -> dict[str, str]:
    others = [file for file in files(root) if file.path not in REMOVAL]
    return {file.at(node, what): what for file in others for node, what in removals_of(file)}


def removals_of(file: File) -> Iterator[tuple[ast.AST, str]]:
    known = meaning(file)
    for node in file.nodes:
        name = full_name(node, known) if isinstance(node, ast.Attribute | ast.Name) else ""
        method = node.attr if isinstance(node, ast.Attribute) else ""
        if name in REMOVES or method in REMOVING_METHODS:
            yield node, name if name in REMOVES else f".{method}"


def test_nothing_that_is_read_is_unpickled() -> None:
    assert unbent("no unpickler", unpicklers(ROOT)) == []


def test_json_is_decoded_in_one_place() -> None:
    assert unbent("one decoder", decoders(ROOT)) == []


@pytest.mark.parametrize("text", ["import json\njson.loads(text)", "from json import load as read\nread(file)"])
def test_a_decoder_is_found(tmp_path: Path, text: str) -> None:
    assert decoders(plant(tmp_path, xscale__bad=text))


def test_yaml_is_read_in_one_place() -> None:
    assert unbent("one reader of YAML", yaml_readers(ROOT)) == []


@pytest.mark.parametrize("text", ["import yaml\nyaml.safe_load(text)", "from yaml import parse\nparse(text)"])
def test_a_reader_of_yaml_is_found(tmp_path: Path, text: str) -> None:
    assert yaml_readers(plant(tmp_path, xscale__bad=text))


def test_files_of_a_run_are_opened_in_one_way() -> None:
    assert unbent("one opener", openers(ROOT)) == []


@pytest.mark.parametrize(
    "text",
    [
        "open('a')",
        "path.open('w')",
        "path.read_text()",
        "path.write_bytes(b'')",
        "path.touch()",
        "import os\nos.open('a', 0)",
        "from io import FileIO\nFileIO('a')",
        "import shutil\nshutil.copyfile('a', 'b')",
        "import torch\ntorch.save(x, 'a')",
        "model.save_pretrained('a')",
        "import numpy as np\nnp.memmap('a')",
    ],
)
def test_an_opener_is_found(tmp_path: Path, text: str) -> None:
    """Wherever it is planted."""
    for number, place in enumerate(("xscale__observe__bad", "xscale__nn__bad", "launch__xscale_launch__bad")):
        assert openers(plant(tmp_path / str(number), **{place: text}))
    assert openers(plant(tmp_path / "kernels", kernels__xscale_kernels__bad=text))


@pytest.mark.parametrize(
    "text",
    [
        "from xscale.core.files.file_safety import read_regular\nread_regular(path)",
        "from xscale.core import file_safety\nfile_safety.open_regular(path)",
    ],
)
def test_an_opener_that_follows_links_is_found(tmp_path: Path, text: str) -> None:
    """In code that reads run folders; elsewhere it is for files that a user names."""
    assert openers(plant(tmp_path, xscale__observe__bad=text))
    assert openers(plant(tmp_path / "launcher", launch__xscale_launch__bad=text))
    assert not openers(plant(tmp_path / "elsewhere", xscale__convert__bad=text))


def test_the_launcher_prints_in_one_way() -> None:
    assert unbent("one printer", printers(ROOT)) == []


@pytest.mark.parametrize(
    "text", ["print('a')", "import sys\nsys.stderr.write('a')", "from sys import stdout\nstdout.write('a')"]
)
def test_a_printer_is_found(tmp_path: Path, text: str) -> None:
    assert printers(plant(tmp_path, launch__xscale_launch__bad=text))


def test_files_are_removed_in_one_place() -> None:
    assert unbent("one removal", removals(ROOT)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\npickle.loads(b'')",
        "from pickle import load as read\nread(file)",
        "import pickle\nclass A(pickle.Unpickler): pass",
        "import torch\ntorch.load('a')",
        "import torch\ntorch.load('a', weights_only=False)",
        "import torch\ntorch.load('a', weights_only=flag)",
        "import numpy as np\nnp.load('a')",
        "import numpy as np\nnp.savez('a', x, allow_pickle=True)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml\nyaml.load(text)",
        "from yaml import unsafe_load\nunsafe_load(text)",
        "import shelve",
        "from marshal import loads",
    ],
)
def test_an_unpickler_is_found(tmp_path: Path, text: str) -> None:
    assert unpicklers(plant(tmp_path, xscale__bad=text))


@pytest.mark.parametrize(
    "text",
    [
        "import shutil\nshutil.rmtree('a')",
        "from shutil import rmtree\nrmtree('a')",
        "import os\nos.remove('a')",
        "path.unlink()",
        "(folder / name).unlink(missing_ok=True)",
        "path.rmdir()",
        "remove = __import__('os')\nfrom os import unlink\nx = unlink",
    ],
)
def test_a_removal_is_found(tmp_path: Path, text: str) -> None:
    assert removals(plant(tmp_path, xscale__bad=text))


def test_what_is_safe_passes(tmp_path: Path) -> None:
    text = (
        "import torch, yaml, pickle, json\nclass L(yaml.SafeLoader): pass\ntorch.load('a', weights_only=True)\n"
        "yaml.safe_load(t)\nyaml.load(t, Loader=L)\npickle.dumps(t)\njson.dumps(t)"
    )
    assert not unpicklers(plant(tmp_path, xscale__good=text))
    assert not decoders(plant(tmp_path / "again", xscale__good=text))

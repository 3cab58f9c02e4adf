"""`xscale check-part`: hold the parts of a module against the checks that the parts of xscale pass."""

import sys
from pathlib import Path

from xscale.conformance.run import Verdict, parts_of, verdicts
from xscale.core.errors import EXIT_DONE, EXIT_FAULT, ConfigError, nearest
from xscale.core.plugins import import_plugins


def check_part(module: str, names: list[str]) -> int:
    """Check the parts that a file or module registers, or those of the given names; print a line for each check.

    Exit status 0: all checks pass; 1: one fails. ConfigError where there is no such module or part.
    """
    if not __debug__:
        raise ConfigError(
            "",
            "Python leaves out assertions (-O), which the checks are",
            "Start Python without -O.",
        )
    parts = parts_of([_imported(module)])
    if not parts:
        what = "no part is registered by this module"
        raise ConfigError(
            module, what, 'Register it, such as `@CORES.register("mine", traits=...)`.'
        )
    known = [entry.name for _, entry in parts]
    for name in names:
        if name not in known:
            raise ConfigError(
                name, f"{module} registers no part of that name", nearest(name, known)
            )
    chosen = [(family, entry) for family, entry in parts if not names or entry.name in names]
    failed = 0
    for family, entry in chosen:
        results = []
        print(f"{family} '{entry.name}': {entry.summary}", flush=True)
        for verdict in verdicts(family, entry):
            print(_line(verdict), flush=True)
            results.append(verdict)
        broken = sum(verdict.reason is not None for verdict in results)
        failed += broken
        print(
            f"{family} '{entry.name}': {len(results) - broken} of {len(results)} checks pass\n",
            flush=True,
        )
    return EXIT_FAULT if failed else EXIT_DONE


FEW = 8
"""At most so many files are listed."""


def _line(verdict: Verdict) -> str:
    if verdict.reason is None:
        return f"  ok     {verdict.check.sentence}"
    return f"  FAILS  {verdict.check.sentence}: {verdict.reason}"


def _imported(module: str) -> str:
    """Import a file, or a module by its name, and return the name of the module."""
    file = Path(module)
    if file.is_dir() and not (file / "__init__.py").is_file():
        files = sorted(inner.name for inner in file.glob("*.py"))
        fix = (
            f"Give one of its files: {', '.join(files[:FEW])}." if files else "Give a Python file."
        )
        raise ConfigError(module, "this is a folder, and no module", fix)
    if file.suffix != ".py" and not file.is_file():
        if problems := import_plugins([module]):
            raise ConfigError(problems)
        return module
    if not file.is_file():
        raise ConfigError(
            module, "there is no such file", "Give a Python file, or the name of a module."
        )
    if not file.stem.isidentifier():
        raise ConfigError(
            module,
            "its name is no name of a module",
            "Rename it with letters, digits and underscores.",
        )
    packages = _packages(file)
    if packages:
        return _of_package(file, packages)
    if file.stem in sys.modules:
        what = (
            f"a module '{file.stem}' is part of Python or of a package, and would be read instead"
        )
        raise ConfigError(module, what, "Give the file another name.")
    # First on the path, so that it is this file that is read.
    sys.path.insert(0, str(file.absolute().parent))
    if problems := import_plugins([file.stem]):
        raise ConfigError(problems)
    return file.stem


def _packages(file: Path) -> list[Path]:
    """Return the folders of the packages that a file is in, the innermost first."""
    packages = []
    for folder in file.absolute().parents:
        if not (folder / "__init__.py").is_file():
            break
        packages.append(folder)
    return packages


def _of_package(file: Path, packages: list[Path]) -> str:
    """Import a file of a package under its full name: the package may have registered its parts already."""
    module = ".".join([*(folder.name for folder in reversed(packages)), file.stem])
    sys.path.insert(0, str(packages[-1].parent))
    if problems := import_plugins([module]):
        raise ConfigError(problems)
    imported = sys.modules[module].__file__
    if imported is None or not file.samefile(imported):
        what = f"Python reads '{module}' from another place, {imported}"
        raise ConfigError(str(file), what, f"Start the command from {packages[-1].parent}.")
    return module

"""Generate the reference pages of the documentation from the code when mkdocs builds the site."""

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site (called by mkdocs)."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Path below docs/ -> Markdown text of each generated page."""
    from tests.combinations import markdown as combinations

    kernels = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    return {
        "reference/config.md": config_page(),
        "reference/parts.md": parts_page(),
        "reference/xformers.md": xformers_page(),
        "reference/commands.md": commands_page(),
        "reference/combinations.md": COMBINATIONS + combinations(),
        "reference/roles.md": roles_page(),
        # Links to the operators' own pages lead to files beside the code.
        "reference/kernels.md": _without_relative_links(kernels),
    }


COMBINATIONS = """# What combines with what

The answers of the checks, each axis with degree 2. A number refers to the reason below the table. A combination that is
not possible is refused, with an alternative, before a process group is created.

"""


ROLES = """# Roles of seams

A class gives each of its seams a role, `seams = {"norm_all_heads": Role.NORM_OVER_HEADS}`; an engine does at a seam
what its table says of the role, and asks for no class. A kind of parallelism that is not listed under a role leaves its
seams as they are. `Role` is in `xscale.nn.roles`.

"""


def roles_page() -> str:
    """Each role: what it is, the seams that have it, and what each kind of parallelism does there."""
    import xscale.recipe  # noqa: F401  (every part is imported)
    from xscale.nn.module import Module
    from xscale.nn.roles import Role
    from xscale.parallel.context.table import CONTEXT
    from xscale.parallel.expert import EXPERT
    from xscale.parallel.pipeline.stage import AFTER_FIRST, BEFORE_LAST
    from xscale.parallel.tensor.sequence import SEQUENCE
    from xscale.parallel.tensor.table import TENSOR

    tables = {
        "Tensor parallelism": TENSOR,
        "Sequence parallelism": SEQUENCE,
        "Context parallelism": CONTEXT,
        "Expert parallelism": EXPERT,
        "Pipeline stages but the last": BEFORE_LAST,
        "Pipeline stages but the first": AFTER_FIRST,
    }
    owners: dict[Role, set[str]] = {}
    classes = [Module]
    for owner in classes:
        classes += owner.__subclasses__()
        if owner.__module__.startswith("xscale."):
            for seam, role in vars(owner).get("seams", {}).items():
                if role is not None:
                    owners.setdefault(role, set()).add(f"`{owner.__name__}.{seam}`")
    lines = []
    for role in Role:
        lines += [f"## {role.name}", "", f"{role.value[0].upper()}{role.value[1:]}.", ""]
        for name, table in tables.items():
            if role in table:
                lines.append(f"- {name}: {' '.join(inspect.getdoc(table[role]).split())}")
        lines += ["", f"Seams: {', '.join(sorted(owners[role]))}.", ""]
    return ROLES + "\n".join(lines)


def config_page() -> str:
    """Every key of a recipe with its type, default and sentence."""
    from xscale.commands.show.explain import config_keys

    keys = config_keys()
    lines = [
        "# Config keys",
        "",
        "Keys of a run's config, by section. `xscale explain KEY` prints the same, and `xscale train CONFIG "
        "--print-config` the resolved values and where each came from. A key that takes a *part* is chosen by `kind`; "
        "the keys of each part are listed under [Parts](parts.md).",
        "",
        "An override sets a key by its path, `train.steps=20`; that of an entry of a list by its index, "
        "`model.stack.rules[0].every=2`, or of all entries that have it, `model.stack.rules[*].every=2`; and that of "
        "every part of a kind by the kind, `moe.capacity_factor=2.0`. `xscale explain KEY RECIPE` prints where a "
        "recipe has the key.",
        "",
    ]
    for section in keys.children(keys.root):
        family = keys.family(section)
        lines += [f"## `{section.path}`", "", _escape(section.sentence), ""]
        if family is not None:
            lines += [f"A part of the family [`{family}`](parts.md#{family}).", ""]
        elif rows := list(_rows(section)):
            lines += [*TABLE, *rows, ""]
    return "\n".join(lines)


def parts_page() -> str:
    """Every family, its traits, and each part with its paper, traits and keys."""
    from xscale.commands.show.explain import config_keys
    from xscale.conformance.families import families
    from xscale.core.config_keys.keys import Key, value_text

    keys = config_keys()
    lines = [
        "# Parts",
        "",
        "`xscale list FAMILY` prints the same. A trait is a promise that a test checks.",
        "",
    ]
    for name, family in families().items():
        lines += [f"## {name}", "", "| trait | meaning |", "|---|---|"]
        meanings = _trait_sentences(family.traits)
        lines += [
            f"| `{field.name}` | {meanings.get(field.name, '')} |"
            for field in dataclasses.fields(family.traits)
        ]
        lines.append("")
        for entry in family:
            lines += [f"### {name}: {entry.name}", "", _escape(entry.summary), ""]
            traits = dataclasses.asdict(entry.traits)
            lines += [
                ", ".join(f"`{key}={value_text(value)}`" for key, value in traits.items()),
                "",
            ]
            lines += [
                f"- Differs from the paper: {_escape(sentence)}" for sentence in entry.deviations
            ]
            if entry.deviations:
                lines.append("")
            if rows := list(_rows(Key("", keys.parts(name)[entry.name]))):
                lines += [*TABLE, *rows, ""]
    return "\n".join(lines)


def xformers_page() -> str:
    """Every variant of the catalogue, by kind: its status, directions, paper and deviations."""
    from xscale.commands.show.catalogue import rows

    table = rows()
    counts = {
        status: sum(row.status == status for row in table)
        for status in ("works", "partly", "missing")
    }
    lines = [
        "# Transformer variants",
        "",
        f"{len(table)} variants: {', '.join(f'{count} {status}' for status, count in counts.items())}. `xscale list "
        "xformers` prints the same, and `xscale list NAME` one of them. A variant that works, or works partly, has the "
        "recipe `configs/xformer/<id>.yaml`: `xscale train bigbird` trains it as it stands, on the source code of "
        "Python's standard library. `xscale train bigbird --print-config` shows every key.",
        "",
        "The directions are the models in which a variant loads: a decoder (C), an encoder (B), and the decoder of an "
        "encoder-decoder, which attends to the source (X). [Variants and objectives](objectives.md) says which trains "
        "with which objective.",
        "",
    ]
    for kind in dict.fromkeys(row.kind for row in table):
        lines += [
            f"## {kind}",
            "",
            "| id | status | directions | mechanism and paper | differs |",
            "|---|---|---|---|---|",
        ]
        for row in table:
            if row.kind == kind:
                letters = {"C": row.causal, "B": row.bidirectional, "X": row.cross}
                directions = " ".join(letter for letter, able in letters.items() if able)
                differs = [*([f"Absent: {row.why}"] if row.why else []), *row.deviations]
                cells = (
                    f"{_escape(row.summary)}<br>{_escape(row.paper)}",
                    "<br>".join(map(_escape, differs)),
                )
                lines.append(
                    f"| `{row.id}` | {row.status} | {directions} | {cells[0]} | {cells[1]} |"
                )
        lines.append("")
    return "\n".join(lines)


def commands_page() -> str:
    """The help of every command."""
    import typer

    from xscale.cli.main import app

    lines = [
        "# Commands",
        "",
        "Exit status: 0 done, 2 the user's mistake, 75 stopped on purpose and resumable, anything else a fault.",
        "",
    ]
    root = typer.main.get_command(app)
    for path, command in _commands(root, ("xscale",)):
        lines += [f"## {' '.join(path)}", "", _escape(" ".join((command.help or "").split())), ""]
        rows = []
        for parameter in command.params:
            names = (
                ", ".join(f"`{name}`" for name in parameter.opts)
                if parameter.param_type_name == "option"
                else (f"`{(parameter.metavar or parameter.name or '').upper()}`")
            )
            if "--help" not in names:
                rows.append(f"| {names} | {_escape(getattr(parameter, 'help', '') or '')} |")
        if rows:
            lines += ["| argument | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in children.items():
        yield from _commands(child, (*path, name))


TABLE = ["| key | type | default | meaning |", "|---|---|---|---|"]


def _rows(above: Any) -> Iterator[str]:
    """A row of the table for each key below a section, and for those of the sections in it."""
    from xscale.commands.show.explain import config_keys
    from xscale.core.config_keys.keys import value_text

    keys = config_keys()
    for key in keys.children(above):
        family = keys.family(key)
        if key.type == "section":
            yield from _rows(key)
            continue
        kind = f"part [`{family}`](parts.md#{family})" if family else f"`{_escape(key.type)}`"
        default = f"`{_escape(value_text(key.node['default']))}`" if key.has_default else ""
        yield f"| `{key.path.removesuffix('[]')}` | {kind} | {default} | {_escape(key.sentence)} |"


def _trait_sentences(traits: type) -> dict[str, str]:
    """Field of a traits dataclass -> the string literal below it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(traits))).body[0]
    assert isinstance(body, ast.ClassDef)
    pairs = zip(body.body, body.body[1:], strict=False)
    return {
        line.target.id: " ".join(str(after.value.value).split())
        for line, after in pairs
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def _escape(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _without_relative_links(text: str) -> str:
    import re

    return re.sub(r"\[([^\]]+)\]\((?!http)[^)]+\)", r"`\1`", text)

"""Law 11: the field's words, one word for one thing, results named after what they hold: checked for identifiers."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from tests.laws.tree import CODE, ROOT, File, files, plant, words

_ODD = (
    "again alike apart arranged at_rest audience beating behind beside bias_at biases_at bigger_first "
    "chosen_by cut_along deal deals dealt door doors doubled evened evenness forced gone_on held "
    "here_or_there joined judge judged keeping_products lay lay_out look_up meeting met multiply_by "
    "noise_of of_whole outside_of piece pieces place_in_whole played rest_of rests said seen_by settle "
    "settles share shared_out shares_met sight spread_drop spread_join stretch take_over told unevenly "
    "unevenness whole_or_part work_out"
)
ODD = frozenset(_ODD.split())
"""Names for which the field has another word. No function, class, attribute or file has one of these names."""
FIELD = {
    "settle": "update_state, wait, conclude",
    "gone_on": "resume",
    "held": "state_tensors",
    "at_rest": "local_parameters",
    "door": "param_hook",
    "share": "fraction, probability, shard",
    "piece": "shard, slice, chunk",
    "lay": "shard_like",
    "sight": "attention mask",
}
"""The field's words for some of them."""
TOKENIZER = "the tokenizers' own word for a unit of their vocabulary"
EXCUSED: dict[str, str] = {
    "xscale/data/tokenizer/byte.py: piece": TOKENIZER,
    "xscale/data/tokenizer/huggingface.py: piece": TOKENIZER,
    "xscale/data/tokenizer/sentencepiece.py: piece": TOKENIZER,
    "xscale/data/tokenizer/tokenizer.py: piece": TOKENIZER,
}
"""`path: name` -> the reason for the name. This table only shrinks: an entry that excuses nothing fails."""
_VAGUE = "asked each found given here made mine much often one others ours own place rest theirs told whole wide"
VAGUE = frozenset(_VAGUE.split())
"""Names that do not say what they hold. No local variable and no parameter has one of these names; no exceptions."""
DEFINED_TWICE = 0
"""Number of public class names that two modules define. It only falls."""
SHORT_LINES = 25
ROLES = frozenset({"libraries"})
"""Files of an operator's folder, one for each kind of implementation."""
SHORT: dict[str, str] = {
    "kernels/xscale_kernels/rows.py": "the CPU kernels' block size, which several operators read",
    "xscale/commands/json_schema.py": "a command",
    "xscale/core/version.py": "packages that may not import the interface of xscale read it",
    "xscale/generate/exit_policy.py": "generation asks for it, and the curves of evaluation",
    "xscale/nn/axes.py": "parameters and random numbers both name axes",
    "xscale/nn/mixer/local_mixer.py": "the base class of several mixers",
    "xscale/nn/compiling/eager.py": "attention and mixtures share it, and it must not import the compiler",
}
"""Files under 25 lines that are not a part, an `__init__` or an entry point, each with the reason for a file."""


def odd_names(root: Path) -> dict[str, str]:
    """Definitions (not uses) of names on the list, and files called so."""
    violations = {}
    for file in files(root):
        for part in file.parts[1:]:
            if part in ODD:
                violations[f"{file.path}: {part}"] = instead(part)
        for node in file.nodes:
            for name in defined(node):
                if snake(name) in ODD:
                    violations[f"{file.path}: {name}"] = instead(snake(name))
    return violations


def defined(node: ast.AST) -> list[str]:
    """Functions, classes and attributes that the node defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name.strip("_")]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.attr.strip("_") for target in targets if isinstance(target, ast.Attribute)]


def snake(name: str) -> str:
    return "_".join(words(name))


def instead(name: str) -> str:
    return f"'{name}' is not the field's word" + (f": {FIELD[name]}" if name in FIELD else "")


def vague_names(root: Path) -> list[str]:
    """Local variables and parameters with a name on the list."""
    return [
        file.at(node, f"'{name}': name it after what it holds")
        for file in files(root)
        for node, name in bindings(file)
        if name.strip("_") in VAGUE
    ]


def docstrings_without_subject(root: Path) -> list[str]:
    """Docstrings, those of attributes too, that begin with a word that stands for their subject."""
    return [
        file.at(node, f"'{node.value.value[:30]}...' begins with neither a verb nor a noun")
        for file in files(root, (*CODE, "tests"))
        for node in file.nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if node.value.value.split(maxsplit=1)[:1] in (["As"], ["Of"], ["What"])
    ]


def bindings(file: File) -> Iterator[tuple[ast.AST, str]]:
    """Names that the file binds to values, in loops, comprehensions and patterns too, except fields of classes."""
    lines = [line for node in file.nodes if isinstance(node, ast.ClassDef) for line in node.body]
    fields = {id(line.target) for line in lines if isinstance(line, ast.AnnAssign)}
    for node in file.nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                if id(node) not in fields:
                    yield node, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node, name


def unexcused(violations: dict[str, str], excused: dict[str, str]) -> list[str]:
    broken = [f"{place}: {what}" for place, what in violations.items() if place not in excused]
    idle = [
        f"{place}: excused, and there is nothing to excuse: take the entry out" for place in excused.keys() - violations
    ]
    return sorted(broken + idle)


def defined_twice(root: Path) -> dict[str, list[str]]:
    """Public top-level class names that several modules define, without those of private modules' own."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in files(root):
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(file.path)
    return {name: paths for name, paths in sorted(places.items()) if len(paths) > 1}


def short_files(root: Path) -> dict[str, str]:
    """Files that are too short to be found for their own sake."""
    violations = {}
    for file in files(root):
        lines = len(file.text.splitlines())
        name, of_operator = file.parts[-1], file.parts[0] == "kernels" and len(file.parts) == 4
        if name in ("__init__", "__main__") or (of_operator and name in ROLES) or registers(file.tree):
            continue
        if lines < SHORT_LINES:
            violations[file.path] = f"{lines} lines: merge it into where it is used, or say why not"
    return violations


def registers(tree: ast.Module) -> bool:
    """Whether the file is a part: a class of it, or a function that makes one, is registered in a family."""
    return any(
        isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Attribute)
        and decorator.func.attr == "register"
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        for decorator in node.decorator_list
    )


def test_names_are_the_fields() -> None:
    assert unexcused(odd_names(ROOT), EXCUSED) == []


def test_results_are_named_after_what_they_hold() -> None:
    assert vague_names(ROOT) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    found = x\n    return found",
        "def f(*, given=1): ...",
        "def f(x, *rest): ...",
        "kernel = lambda ours: ours",
        "names = [one.name for one in []]",
        "def f(x):\n    for _, place in x: ...",
        "def f(x):\n    if (whole := x): ...",
        "def f(x):\n    with x as (a, here): ...",
        "try: ...\nexcept ValueError as told: ...",
        "def f(x):\n    match x:\n        case [1, *others]: ...",
    ],
)
def test_a_vague_name_is_seen(tmp_path: Path, text: str) -> None:
    assert len(vague_names(plant(tmp_path, kernels__xscale_kernels__bad=text))) == 1


def test_fields_and_longer_names_pass(tmp_path: Path) -> None:
    text = "class A:\n    given: int\ndef f(x):\n    own_rows = x.rest\n    return f(place=own_rows)"
    assert vague_names(plant(tmp_path, xscale__nn__good=text)) == []


def test_docstrings_begin_with_their_subject() -> None:
    assert docstrings_without_subject(ROOT) == []


@pytest.mark.parametrize(
    "text", ['"""What it is."""', 'def f():\n    """As\n    g."""', 'class A:\n    x: int\n    """Of A."""']
)
def test_a_docstring_without_subject_is_seen(tmp_path: Path, text: str) -> None:
    assert len(docstrings_without_subject(plant(tmp_path, launch__xscale_launch__bad=text))) == 1


def test_few_names_are_defined_twice() -> None:
    twice = defined_twice(ROOT)
    assert len(twice) <= DEFINED_TWICE, twice
    assert len(twice) == DEFINED_TWICE, f"only {len(twice)} are left: lower DEFINED_TWICE"


def test_short_files_have_a_reason() -> None:
    assert unexcused(short_files(ROOT), SHORT) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("xscale__train__bad", "def settle(model): ..."),
        ("xscale__train__bad", "def _gone_on(): ..."),
        ("xscale__parallel__bad", "class AtRest: ..."),
        ("xscale__parallel__bad", "def apply(module):\n    module.door = None"),
        ("xscale__nn__bad", "class A:\n    def __init__(self):\n        self.share: float = 0.1"),
        ("launch__xscale_launch__held", "x = 1"),
        ("kernels__xscale_kernels__piece__op", "x = 1"),
    ],
)
def test_an_odd_name_is_seen(tmp_path: Path, path: str, text: str) -> None:
    assert odd_names(plant(tmp_path, **{path: text}))


def test_good_names_and_uses_of_others_pass(tmp_path: Path) -> None:
    text = "def share_of_voice(): ...\ndef f(held):\n    fraction = held.share\n    return fraction"
    assert odd_names(plant(tmp_path, xscale__nn__good=text)) == {}


def test_an_idle_excuse_fails(tmp_path: Path) -> None:
    violations = odd_names(plant(tmp_path, xscale__nn__bad="def settle(): ..."))
    assert unexcused(violations, {"xscale/nn/bad.py: settle": "soon"}) == []
    assert unexcused({}, {"xscale/nn/bad.py: settle": "soon"}) != []


def test_a_name_in_two_modules_is_seen(tmp_path: Path) -> None:
    plant(tmp_path, xscale__nn__a="class Plan: ...\nclass _Own: ...", launch__xscale_launch__b="class Plan: ...")
    plant(tmp_path, xscale__nn__c="class _Own: ...\nclass Other: ...")
    assert list(defined_twice(tmp_path)) == ["Plan"]


def test_a_short_file_is_seen(tmp_path: Path) -> None:
    part = "@CORES.register('a')\nclass A: ..."
    plant(tmp_path, xscale__nn__a="x = 1", xscale__nn__part=part, xscale__nn__long="x = 1\n" * 25)
    assert list(short_files(tmp_path)) == ["xscale/nn/a.py"]


INSTALL = re.compile(r"""pip install (?:-e )?(?:'([^']+)'|"([^"]+)"|([\w.-]+))""")
"""Requirement that a message or page tells the reader to install."""


def unknown_packages(root: Path) -> list[str]:
    """Requirements that the reader is told to install, without those of pyproject.toml and, in the documentation, the
    extras of the checkout: a message also reaches who installed a wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = [item.partition(";")[0].strip() for item in (*project["dependencies"], *chain(*extras.values()))]
    packages = {*listed, *(re.split("[<>=]", item)[0] for item in listed), "."}
    known = {".py": packages, ".md": {*packages, *(f".[{extra}]" for extra in extras)}}
    paths = [root / file.path for file in files(root)] + sorted(root.glob("docs/**/*.md"))
    return [
        f"{path.relative_to(root)}: {match[0]}"
        for path in paths
        for match in INSTALL.finditer(path.read_text(encoding="utf-8"))
        if next(filter(None, match.groups())) not in known[path.suffix]
    ]


def test_messages_name_packages_that_an_index_has() -> None:
    assert unknown_packages(ROOT) == []


@pytest.mark.parametrize("name", ["'xscale[mpi]'", "mpi5py", "'torch>=99'", "-e '.[mpy]'", "-e '.[hub]'"])
def test_a_package_that_no_index_has_is_seen(tmp_path: Path, name: str) -> None:
    assert unknown_packages(plant(tmp_path, xscale__nn__a=f'x = """pip install {name}"""')) != []


def counts_without_number(root: Path) -> list[str]:
    """Messages that leave singular and plural to the reader: a value, then `document(s)`."""
    return [
        file.at(node, part.value.strip())
        for file in files(root)
        for node in file.nodes
        if isinstance(node, ast.JoinedStr)
        for part in node.values[1:]
        if isinstance(part, ast.Constant) and re.match(r" [a-z ]+\((s|es)\)", part.value)
    ]


def test_a_message_says_one_or_several() -> None:
    """`xscale.core.errors.counted` writes both."""
    assert counts_without_number(ROOT) == []


def test_a_count_of_either_number_is_seen(tmp_path: Path) -> None:
    assert counts_without_number(plant(tmp_path, xscale__nn__a='x = f"{n} document(s) left"')) != []
    assert counts_without_number(plant(tmp_path, xscale__nn__a='x = f"{n} to exp(s + 1)"; y = f"squash(s)"')) == []

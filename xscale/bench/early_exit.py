"""Quality against blocks of the rows with exits, halting and gates on labels and pairs: a table for the documentation.

`python -m xscale.bench.early_exit` trains each row, or those that are named, and prints the table; `--write` writes it
into docs/how-to/early-exit.md. The models are a width of 64, so that it takes minutes on one core. The words to tag are
those of Python's standard library: a word is a keyword, a name, a number, a string, a comment or an operator, as its
`tokenize` says. For pairs the kinds of a line's words are its translation.
"""

import io
import json
import keyword
import sys
import sysconfig
import tempfile
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/how-to/early-exit.md"
FIRST, LAST = "<!-- table: first line -->", "<!-- table: last line -->"
STEPS = 200
SEQUENCES = 256
"""Validation sequences of each point."""
SMALL: dict[str, Any] = {"block": {"ffn": {"hidden": 128}}}
"""Blocks that train in seconds."""
TAGS = ("keyword", "name", "number", "string", "comment", "operator")
MAX_POINTS = 4
"""Thresholds of a row in the table, beside that at which all blocks are computed."""


@dataclass(frozen=True, eq=False)
class MeasuredRow:
    """A row of the catalogue on a task that its paper is about, or one like it."""

    recipe: str
    task: str
    """Targets of the row's predictions."""
    use: tuple[str, ...]
    """Configs that are laid over the row's."""
    overrides: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Sections of the recipe."""
    curve: str = "exits"
    """Cost that is varied: exits, budgets, or nothing with halting, where it is learned."""
    stacks: tuple[str, ...] = ("stack",)
    steps: int = STEPS
    tagged: str | None = None
    """Kind of source that reads the tagged words: labelled or pairs; None: the row has its own data."""

    def sections(self, folder: Path, steps: int) -> dict[str, Any]:
        """Return the recipe as data: what lies in `folder` is its own."""
        return {
            "use": [f"xformer/{self.recipe}", *self.use],
            "run": {"dir": str(folder / self.recipe), "device": "cpu"},
            **self.changes,
            "model": {"width": 64, **dict.fromkeys(self.stacks, SMALL)},
            "train": {"steps": steps, "batch_size": 16, "micro_batch_size": 16, "eval_every": 0},
        }


CLASSES: dict[str, Any] = {
    "objective": {"kind": "classify", "classes": 12, "dense": True},
    "data": {"sequence_length": 48, "cross_documents": False, "tokenizer": {"vocabulary": 1024}},
}
LABELLED = ("data/stdlib_labelled", "objective/classify")
ROWS = (
    MeasuredRow("deebert", "packages of functions", LABELLED, changes=CLASSES, steps=1000),
    MeasuredRow("pabee", "packages of functions", LABELLED, changes=CLASSES),
    MeasuredRow("sun-2021-ensemble-exit", "packages of functions", LABELLED, changes=CLASSES),
    MeasuredRow(
        "li-2021-token-early-exit",
        "kinds of words",
        ("objective/tag",),
        changes={"objective": {"kind": "tag", "classes": len(TAGS)}},
        tagged="labelled",
    ),
    MeasuredRow(
        "act", "packages of functions", LABELLED, ("objective.pool=last",), CLASSES, curve="halting"
    ),
    MeasuredRow(
        "cct",
        "kinds of words, as pairs",
        ("objective/seq2seq",),
        curve="budgets",
        stacks=("encoder", "decoder"),
        steps=2500,
        tagged="pairs",
    ),
)


def recipe_of(row: MeasuredRow, folder: Path, steps: int) -> Any:
    """Return the recipe of a row, whose data and run lie in `folder`."""
    import xscale

    sections = row.sections(folder, steps)
    if row.tagged is not None:
        source: dict[str, Any] = {
            "kind": row.tagged,
            "paths": [str(write_tags(folder / "tags.jsonl"))],
        }
        lengths = {"max_target_length": 32} if row.tagged == "pairs" else {}
        if row.tagged == "labelled":
            source |= {"labels": "tags", "classes": list(TAGS)}
        sections["data"] = {
            "source": source,
            "sequence_length": 48,
            **lengths,
            "cross_documents": False,
            "validation": 0.1,
            "tokenizer": {"vocabulary": 1024},
        }
    sections["data"] = {**sections["data"], "folder": str(folder / "data" / row.recipe)}
    return xscale.load_recipe(sections, overrides=list(row.overrides))


def tagged_lines(source: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the words of each line of Python and their tags, of lines with at least four words."""
    words: list[str] = []
    tags: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = {
            tokenize.NAME: "keyword" if keyword.iskeyword(token.string) else "name",
            tokenize.NUMBER: "number",
            tokenize.STRING: "string",
            tokenize.COMMENT: "comment",
            tokenize.OP: "operator",
        }.get(token.type)
        if kind is not None:
            # A word has no spaces.
            words.append("_".join(token.string.split())[:24])
            tags.append(kind)
        if token.type == tokenize.NEWLINE:
            if len(words) >= 4:
                yield words, tags
            words, tags = [], []


def write_tags(file: Path, modules: int = 40) -> Path:
    """Write the tagged lines of some modules of the standard library as JSON lines, each as words and as a pair."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as out:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-m]*.py"))[:modules]:
            for words, tags in tagged_lines(path.read_text(encoding="utf-8")):
                pair = {"source": " ".join(words), "target": " ".join(tags)}
                print(json.dumps({"text": words, "label": tags, **pair}), file=out)
    return file


def points_of(row: MeasuredRow, folder: Path, steps: int = STEPS) -> list[dict[str, Any]]:
    """Train a row and evaluate it: points with `setting`, `blocks` and `accuracy`, from few blocks to all."""
    import xscale
    from xscale.core.files.file_safety import decode_json
    from xscale.core.files.run_files import read_run_file
    from xscale.evaluate.evaluate_run import budget_curve_of_run, evaluate_run, exit_curve_of_run

    recipe = recipe_of(row, folder, steps)
    assert xscale.train(recipe) == 0
    run = Path(recipe.run.dir)
    if row.curve == "exits":
        points = [
            {"setting": point["threshold"], **point} for point in exit_curve_of_run(run, SEQUENCES)
        ]
        return spaced(sorted(points, key=lambda point: point["blocks"]))
    if row.curve == "budgets":
        return [
            {"setting": point["budget"], "blocks": point["computed"], **point}
            for point in budget_curve_of_run(run, SEQUENCES)
        ]
    lines = [decode_json(line) for line in read_run_file(run / "metrics.jsonl").splitlines()]
    halted = next(
        line["stack.halting/steps"] for line in reversed(lines) if "stack.halting/steps" in line
    )
    depth = recipe.model.stack.depth
    return [
        {
            "setting": "learned",
            "blocks": halted / depth,
            "accuracy": evaluate_run(run, SEQUENCES)["accuracy"],
        }
    ]


def spaced(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last of the points, and before it at most `MAX_POINTS` of different numbers of blocks."""
    distinct = list({round(point["blocks"], 2): point for point in points[:-1]}.values())
    chosen = (
        [distinct[number * len(distinct) // MAX_POINTS] for number in range(MAX_POINTS)]
        if distinct
        else []
    )
    return [*{id(point): point for point in chosen}.values(), points[-1]]


def table(rows: Mapping[MeasuredRow, Sequence[Mapping[str, Any]]]) -> str:
    """Return the points of all rows as a table in Markdown."""
    lines = [
        "| row | predicts | threshold or budget | blocks | accuracy |",
        "|---|---|--:|--:|--:|",
    ]
    for row, points in rows.items():
        for number, point in enumerate(points):
            setting = point["setting"]
            text = (
                "none"
                if setting is None
                else setting
                if isinstance(setting, str)
                else f"{setting:.3g}"
            )
            names = (f"`{row.recipe}`", row.task) if number == 0 else ("", "")
            lines.append(
                f"| {names[0]} | {names[1]} | {text} | {point['blocks']:.0%} | {point['accuracy']:.1%} |"
            )
    return "\n".join(lines)


def write(text: str, page: Path = PAGE) -> None:
    """Put the table between its marks in the page; it keeps the lines of rows that are not in the table."""
    before, old = page.read_text(encoding="utf-8").split(FIRST)
    old, after = old.split(LAST)
    merged = {**lines_of_rows(old), **lines_of_rows(text)}
    names = [row.recipe for row in ROWS if row.recipe in merged]
    lines = [*text.splitlines()[:2], *[line for name in names for line in merged[name]]]
    page.write_text("\n".join([before + FIRST, *lines, LAST + after]), encoding="utf-8")


def lines_of_rows(text: str) -> dict[str, list[str]]:
    """Return the lines of a table by the row that they belong to."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            rows[line.split("`")[1]] = []
        if rows and line.startswith("|"):
            rows[list(rows)[-1]].append(line)
    return rows


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if word != "--write"]
    rows = [row for row in ROWS if not names or row.recipe in names]
    with tempfile.TemporaryDirectory() as temporary:
        measured = table({row: points_of(row, Path(temporary), row.steps) for row in rows})
    print(measured)
    if "--write" in sys.argv[1:]:
        write(measured)

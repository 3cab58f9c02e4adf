"""`xscale plot pattern`: plot attention layouts in the terminal or to a file."""

from pathlib import Path

from xscale.commands.show.recipes import YAML, config_file, recipe_named
from xscale.core.config import Config, decode
from xscale.core.errors import ConfigError
from xscale.core.yaml_reader import parse
from xscale.nn.pattern.pattern import PATTERNS, Layout, Pattern, PatternSlot, pattern_layout
from xscale.observe.report.layout_text import caption, distinct_heads, save, text

IMAGE_SUFFIXES = (".png", ".svg", ".pdf")


class _Chosen(Config):
    pattern: PatternSlot
    """The pattern to plot."""


def plot(
    pattern_or_config: str,
    overrides: list[str],
    out: Path | None,
    *,
    tokens: int,
    heads: int,
    both: bool,
    layers: int,
    block: int,
) -> None:
    """Plot the layouts of a pattern, or of each attention layer of a run's config, in the terminal or to `out`."""
    for name, value in (
        ("--tokens", tokens),
        ("--heads", heads),
        ("--layers", layers),
        ("--block", block),
    ):
        if value < 1:
            raise ConfigError(name, f"must be at least 1, got {value}")
    if out is not None and out.suffix not in IMAGE_SUFFIXES:
        raise ConfigError(
            "--out",
            f"unknown format '{out.suffix or out.name}'",
            f"Use {', '.join(IMAGE_SUFFIXES)}.",
        )
    if pattern_or_config.endswith(YAML) or _names_recipe(pattern_or_config):
        layouts = _of_run(config_file(pattern_or_config), overrides, tokens)
    else:
        layouts = _of_pattern(pattern_or_config, overrides, tokens, heads, both, layers, block)
    if out is None:
        for name, layout in layouts.items():
            for picture, group in distinct_heads(layout):
                print(f"{name}: {caption(picture, group, len(layout))}\n{text(picture)}\n")
        return
    save(layouts, out)
    print(out)


def _names_recipe(word: str) -> bool:
    """Whether the word is a recipe's or a variant's name, and no pattern's, which comes first."""
    if word in PATTERNS.names():
        return False
    try:
        recipe_named(word)
    except ConfigError:
        return False
    return True


def _of_pattern(
    kind: str, overrides: list[str], tokens: int, heads: int, both: bool, layers: int, block: int
) -> dict[str, Layout]:
    config = decode(_Chosen, {"pattern": {"kind": kind, **dict(map(_setting, overrides))}}).pattern
    part: type[Pattern] = PATTERNS.of(config).part
    traits = PATTERNS.of(config).traits
    if problems := part.check(config, None, kind):
        raise ConfigError(problems)
    causal = traits.causal and not (both and traits.bidirectional)
    if both and not traits.bidirectional:
        can = ", ".join(PATTERNS.able(bidirectional=True))
        raise ConfigError(
            "--both", f"pattern '{kind}' has no bidirectional layout", f"These have one: {can}."
        )
    drawn = [pattern_layout(config, tokens, heads, causal, layer, block) for layer in range(layers)]
    return {
        kind if layers == 1 else f"{kind}, layer {layer}": layout
        for layer, layout in enumerate(drawn)
    }


def _setting(override: str) -> tuple[str, object]:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(override, "a setting must be key=value", "For example window=5.")
    return key, parse(value, f"override {override}")


def _of_run(file: Path, overrides: list[str], tokens: int) -> dict[str, Layout]:
    from xscale.recipe import read
    from xscale.run.run_facts import attention_layouts
    from xscale.settings.settings import build_on_meta

    recipe, _ = read(file, overrides)
    if problems := recipe.check():
        raise ConfigError(problems)
    layouts: dict[str, Layout] = attention_layouts(build_on_meta(recipe, 64), tokens)
    if not layouts:
        what = "no attention layer of this model has a block layout"
        raise ConfigError(str(file), what, "Only the core block_sparse has one.")
    return layouts

"""The JSON schema of a recipe; `python -m xscale.commands.json_schema --write` updates configs/recipe.schema.json."""

import json
import sys
from pathlib import Path

FILE = Path(__file__).parents[2] / "configs/recipe.schema.json"


def text() -> str:
    """Return the content of the schema file."""
    from xscale.core.config_keys.schema import json_schema
    from xscale.recipe import Recipe

    schema = json_schema(Recipe, "A run of xscale, or a part of one")
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text(), encoding="utf-8")
    else:
        print(text(), end="")

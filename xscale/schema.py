"""The JSON schema of a recipe: `python -m xscale.schema > configs/recipe.schema.json`; a test holds the file to it."""

import json


def text() -> str:
    """The schema as the file holds it."""
    from xscale.core.schema import json_schema
    from xscale.recipe import Recipe

    schema = json_schema(Recipe, "A run of xscale, or a part of one")
    return json.dumps(schema, indent=1, ensure_ascii=False, sort_keys=False) + "\n"


if __name__ == "__main__":
    print(text(), end="")

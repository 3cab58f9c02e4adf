"""Values that a config key accepts, made up from its JSON schema: examples in messages must work as typed."""

from typing import Any

from xscale.core.config_keys.keys import FAMILY, ConfigKeys, Key

TEXT = "VALUE"
"""Stands for a text."""


def example(keys: ConfigKeys, key: Key) -> Any:
    """Return the key's default if it has one that is not null or empty; otherwise a value of its type."""
    default = key.node.get("default")
    return example_of(keys, key.node) if default in (None, "", [], {}) else default


def example_of(keys: ConfigKeys, node: dict[str, Any]) -> Any:
    """Return a value of the type that a JSON schema describes, not null if there is another; its first example.

    A field has `examples` where a rule that the schema does not have refuses some values of the type.
    """
    if examples := node.get("examples"):
        return examples[0]
    reference = str(node.get("$ref", ""))
    if reference.startswith(FAMILY):
        return next(iter(keys.parts(reference.removeprefix(FAMILY))))
    if reference or "properties" in node:
        required = [
            child
            for child in keys.children(Key("", node))
            if not child.has_default and _is_leaf(keys, child)
        ]
        return {child.name: example_of(keys, child.node) for child in required}
    if "anyOf" in node:
        return example_of(
            keys, next(branch for branch in node["anyOf"] if branch.get("type") != "null")
        )
    if "const" in node:
        return node["const"]
    if "enum" in node:
        return node["enum"][0]
    kind = node.get("type")
    if kind == "array":
        items = [example_of(keys, item) for item in node.get("prefixItems", [])]
        return items or [example_of(keys, node.get("items", {}))] * max(1, node.get("minItems", 0))
    if kind in ("integer", "number"):
        return _number(node, integral=kind == "integer")
    if kind == "object":
        values = node.get("additionalProperties")
        return {"NAME": example_of(keys, values) if isinstance(values, dict) else TEXT}
    return {"boolean": True, "string": TEXT, "null": None}.get(str(kind), TEXT)


def _is_leaf(keys: ConfigKeys, key: Key) -> bool:
    return keys.family(key) is None and not keys.children(key)


def _number(node: dict[str, Any], *, integral: bool) -> int | float:
    """A number within the bounds: halfway between two, 1 beyond an excluded one, else the bound itself."""
    low = node.get("minimum", node.get("exclusiveMinimum"))
    high = node.get("maximum", node.get("exclusiveMaximum"))
    if integral:
        step = int(node.get("multipleOf", 1))
        least = 1 if low is None else int(low) + ("minimum" not in node)
        return (
            -(-least // step) * step if high is None else min(-(-least // step) * step, int(high))
        )
    if low is not None and high is not None:
        return float(low + high) / 2
    if low is not None:
        return float(max(low, 1) if "minimum" in node else low + 1)
    return 1.0 if high is None else float(min(high, 1) if "maximum" in node else high - 1)

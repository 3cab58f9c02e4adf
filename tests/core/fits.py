"""A small judge of JSON schemas: the keywords that ours use, and an error for any other."""

from typing import Any

SAID = {"title", "description", "default", "examples", "$schema", "$defs", "format", "x-renamed"}
"""Keywords that refuse nothing."""
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def fits(value: Any, node: Any, root: Any = None) -> bool:
    """Whether `value` is what the schema `node` describes."""
    root = node if root is None else root
    return all(_holds(key, rule, value, node, root) for key, rule in node.items() if key not in SAID)


def _holds(key: str, rule: Any, value: Any, node: Any, root: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match key:
        case "$ref":
            return fits(value, root["$defs"][rule.removeprefix("#/$defs/")], root)
        case "anyOf":
            return any(fits(value, one, root) for one in rule)
        case "enum" | "const":
            return value in (rule if key == "enum" else [rule])
        case "type":
            wanted = [rule] if isinstance(rule, str) else rule
            kinds = tuple(kind for one in wanted for kind in TYPES[one])
            return isinstance(value, kinds) and (not isinstance(value, bool) or "boolean" in wanted)
        case "properties":
            return not isinstance(value, dict) or all(
                fits(value[k], one, root) for k, one in rule.items() if k in value
            )
        case "additionalProperties" if rule is False:
            return not isinstance(value, dict) or set(value) <= set(node.get("properties", {}))
        case "additionalProperties" if rule is True:
            return True
        case "additionalProperties" if isinstance(rule, dict):
            return all(fits(value[k], rule, root) for k in set(value) - set(node.get("properties", {})))
        case "required":
            return not isinstance(value, dict) or set(rule) <= set(value)
        case "items":
            return not isinstance(value, list | tuple) or all(fits(one, rule, root) for one in value)
        case "minItems" | "maxItems":
            return not isinstance(value, list) or (len(value) >= rule if key == "minItems" else len(value) <= rule)
        case "minimum" | "exclusiveMinimum":
            return not number or (value >= rule if key == "minimum" else value > rule)
        case "maximum" | "exclusiveMaximum":
            return not number or (value <= rule if key == "maximum" else value < rule)
        case "multipleOf":
            return not number or value % rule == 0
        case "minLength":
            return not isinstance(value, str) or len(value) >= rule
    raise AssertionError(f"this judge does not know '{key}': teach it")

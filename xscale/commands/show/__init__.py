"""Commands that show what there is: parts, recipes, keys, patterns."""

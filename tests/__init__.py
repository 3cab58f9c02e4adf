"""The mirror of the tree, plus laws/ and conformance/. A package, so that worker processes import tests by name."""

"""Fused operators, one folder each; import an operator from its folder, so that nothing is loaded that is not used."""

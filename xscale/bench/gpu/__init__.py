"""Everything that needs one GPU, measured in one command of a few minutes: `xscale bench gpu`."""

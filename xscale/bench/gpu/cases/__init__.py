"""The cases of each job of `xscale bench gpu`: a module has `cases(context)`, which computes nothing."""

"""Pipeline parallelism (Huang et al. 2019): ranks share the depth, and micro-batches pass through their stages.

`build.apply`, `check.check`, `estimate.estimate`; this file imports nothing, so that a check loads no engine.
"""

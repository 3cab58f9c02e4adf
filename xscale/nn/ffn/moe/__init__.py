"""Mixtures of experts: routers, permutation by expert, dispatch, and the experts' stacked weights."""

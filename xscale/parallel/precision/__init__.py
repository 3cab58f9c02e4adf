"""Precision: master and compute dtypes, float8 products, loss scaling."""

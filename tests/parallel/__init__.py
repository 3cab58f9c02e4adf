"""Tests of xscale.parallel."""

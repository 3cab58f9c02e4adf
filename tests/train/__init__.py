"""Tests of xscale.train."""

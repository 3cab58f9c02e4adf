"""The version of xscale, for those who may not import its interface."""

__version__ = "0.1.0"

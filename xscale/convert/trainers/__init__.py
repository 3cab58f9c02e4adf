"""Configs of other trainers: a table of keys for each, their files read as data, and the recipe that they give."""

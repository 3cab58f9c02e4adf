"""Checkpoints: named tensors with global shapes, any layout to any layout, whole or not there at all.

`saving.save`, `loading.restore`, `loading.load`, `search.newest`; this file imports nothing, so that a command that
only looks at folders does not load torch.
"""

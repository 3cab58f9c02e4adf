"""The engine: steps that shard a single-device model, guard its regions and substitute at its seams."""

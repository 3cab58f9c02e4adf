"""Commands on data: prepare it and print its statistics."""

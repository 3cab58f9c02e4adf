"""Ring attention and the tiles that it computes."""

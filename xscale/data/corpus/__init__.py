"""From files to prepared data: listing, tokenising in shards, merging, verifying, counting."""

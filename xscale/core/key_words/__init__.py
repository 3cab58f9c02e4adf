"""Names of keys in earlier versions of xscale and in other trainers, and what they are called here."""

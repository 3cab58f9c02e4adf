"""Commands that train several runs and compare them."""

"""Command-line mains, run from a checkout: `python scripts/NAME.py --help`."""

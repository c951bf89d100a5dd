"""Pages back to numbers."""

"""Everything that recomputes a claim."""

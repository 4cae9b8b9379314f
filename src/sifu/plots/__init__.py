"""Every figure: one style, shared panels, and drawing functions that take plain data."""

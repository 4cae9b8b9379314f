"""The common style of all figures, and their drawing helpers."""

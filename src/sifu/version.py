"""The version of the package and the number of its format, in one place."""

__version__ = "0.2.0"

FORMAT = 1
"""Number of the format of runs, certificates, heads, backups and exports."""
OTHER_FORMAT = "another version of sifu wrote it, and this version reads only what it wrote itself"

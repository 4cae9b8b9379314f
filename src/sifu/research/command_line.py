"""Options, output and exit codes of `sifu`, for commands of other packages."""

from sifu.cli.main import run_app
from sifu.cli.options import DataOption, DeviceOption, Format, FormatOption, PrecisionOption, tell
from sifu.cli.output import ShownBar, duration, err, out, print_json, table

__all__ = [
    "DataOption",
    "DeviceOption",
    "Format",
    "FormatOption",
    "PrecisionOption",
    "ShownBar",
    "duration",
    "err",
    "out",
    "print_json",
    "run_app",
    "table",
    "tell",
]

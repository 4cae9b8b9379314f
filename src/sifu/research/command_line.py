"""Options, output and exit codes of `sifu`, for commands of other packages."""

from sifu.cli.main import run_app
from sifu.cli.options import DataOption, DeviceOption, FormatOption, PrecisionOption
from sifu.cli.output import Format, ShownBar, duration, err, out, print_json, table, tell

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

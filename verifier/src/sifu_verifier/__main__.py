"""Entry point of `python -m sifu_verifier`."""

from __future__ import annotations

import sys

from sifu_verifier.command import main

sys.exit(main())

"""Setup of the suite: Triton's interpreter where there is no GPU, and properties that repeat."""

import suite_setup  # noqa: F401  before anything of ours is imported

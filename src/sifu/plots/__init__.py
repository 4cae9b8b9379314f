"""Common style and drawing helpers of all figures."""

"""Exported models: files with a description, loading them again, and ONNX."""

"""Exported models: files with a description, loading, and ONNX."""

"""The one lowered form of a fold, and its runtimes: torch, numpy, ONNX, C99, files."""

"""ONNX runtime: a recipe as a graph of ONNX nodes, and as a checked file."""

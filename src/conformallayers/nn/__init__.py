"""Modules users put into a model: layers, activations, branches, the container."""

"""Experiments: data, figures and measurements. They need the extra ``experiments``."""

"""Publish networks on the Hugging Face Hub, with a model card."""

from .card import model_card
from .mixin import Published, config_of

__all__ = ["Published", "config_of", "model_card"]

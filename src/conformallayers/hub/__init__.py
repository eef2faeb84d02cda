"""Publish networks on the Hugging Face Hub, with a model card."""

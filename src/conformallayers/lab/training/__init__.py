"""Train networks, checkpoint and resume runs, evaluate them."""

"""Any model as one graph: capture, frozen copies, shapes, bounds and α."""

"""Convert plain CNNs: read the graph, choose the rectifiers that stay, assemble the twin."""

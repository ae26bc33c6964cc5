"""Ready-made graphs, each with its schedule."""

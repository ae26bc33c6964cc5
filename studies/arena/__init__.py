"""The arena: pcnet beside filters of other packages, on the same data and with the same information."""

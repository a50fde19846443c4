"""How a model leaves the house: exported to one file, or scoring large files row by row."""

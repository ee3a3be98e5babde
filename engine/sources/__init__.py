"""Where models come from: the catalogue, the hub, the package index, this disk."""

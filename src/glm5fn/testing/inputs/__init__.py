"""Input makers per operation: named gate regimes, packed lengths, awkward keys. All take a seed and return CPU
tensors."""

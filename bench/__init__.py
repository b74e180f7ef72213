"""Side-by-side benchmarks: upstream alone, and upstream with the health layer."""

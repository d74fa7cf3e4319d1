"""The benchmarks own arithmetic."""

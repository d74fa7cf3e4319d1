"""Which samples make up every global batch, and which rank computes them.

In: `sample_costs`, buckets, a spec. Out: rows of sample numbers.
"""

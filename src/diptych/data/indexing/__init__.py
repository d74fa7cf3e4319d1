"""Raw rows as a checked index.

In: raw samples. Out: `sample_index` and `quarantine`.
"""

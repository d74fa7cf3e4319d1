"""Shards: written, listed, read at random, shown to other loaders.

In: `sample_index` and raw samples. Out: tars with an index each, the manifest, a reader.
"""

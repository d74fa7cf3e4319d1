"""Image files as pixels and patches.

In: a file's bytes. Out: what its header says, pixels, patches, or patches kept from before.
"""

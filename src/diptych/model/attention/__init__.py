"""Attention: which token may see which, in the form that a kernel takes, and the kernel itself.

A model, the ids and segments of a micro-batch flow in; masks and keywords for the model's body flow
out. Which kernel is to run is decided in `shape/attention.py`, and the model only told so.
"""

"""Families' arithmetic, no torch.

Sizes and image settings flow in; grids, tokens, positions, parameter tables and FLOPs flow out.
"""

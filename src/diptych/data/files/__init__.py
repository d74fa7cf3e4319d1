"""Local folders and URLs by one interface.

In: a root and a path below it. Out: bytes, or an error that says what to do.
"""

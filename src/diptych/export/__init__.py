"""A run in, a Hugging Face folder out, and the proof that it computes what was trained.

`write` makes the release and `card` its README; `verify` has `reload` run the release in a fresh
process and `trained` run the checkpoint, and compares the two.
"""

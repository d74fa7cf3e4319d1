"""A run spec and batches in; a trained model, its step log and its checkpoints out.

`compose` makes the run spec on the driver and knows no torch; the rest runs on the ranks. The loop
gets its parts as arguments: it knows neither the launcher nor what becomes of its records.
"""

"""From raw samples to micro-batches.

In: annotation files and images as a person has them. Out: `sample_index`, `quarantine`, `buckets`,
`shards`, `manifest`, `processor`, `sample_costs`, and the batches that ranks read from them. Knows
nothing of models, layouts or of the training loop.
"""

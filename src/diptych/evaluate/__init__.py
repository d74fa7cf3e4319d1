"""Score what ships: a release and the held-out shards in; scores and predictions out.

`tasks` makes questions of the held-out samples, `generate` answers them in fresh processes with
nothing but the release, `intervals` turns right and wrong into a mean with its interval, `score` is
the node that joins them.
"""

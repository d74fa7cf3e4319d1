"""The planner, no torch.

A model_shape, a cluster and sample_costs flow in; ranked layouts with their predicted bytes and
seconds flow out.
"""

"""A module and a layout in, the module spread over ranks out; checkpoints by full parameter name.

Knows no model: families name their sharding units, `parallel` applies them.
"""

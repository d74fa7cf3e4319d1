"""In: a run, its plan, parity, scores and data. Out: figures, examples, lineage, summary, report.

Knows how things are shown; computes nothing that was not measured elsewhere. No torch.
"""

"""One folder per pipeline, in the flow's order: prepare, plan, train, export, evaluate, report.

Wiring only: which function takes which entries of the catalog and makes which. The functions are
in the folders named in the imports; the catalog (`conf/base/catalog.yml`) says where entries lie.
"""

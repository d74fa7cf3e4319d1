"""Numbers of a run in, files and consoles out; it cannot stop training and knows no torch."""

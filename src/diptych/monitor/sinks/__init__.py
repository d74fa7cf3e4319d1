"""Where metrics go beside the step log: each sink in a thread of its own, none stops a run."""

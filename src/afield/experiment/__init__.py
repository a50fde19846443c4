"""From a config to a run folder: training, evaluation, many runs at once, and the suites of the paper."""

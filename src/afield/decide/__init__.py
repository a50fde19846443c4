"""What to do with an answer: policies, thresholds and prediction sets, each with its guarantee."""

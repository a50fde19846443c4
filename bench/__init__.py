"""Measurements that are too long for a test: each module says what it measures and writes its record to results/."""

"""Speed: what the uncertainty costs, as ratios of two things timed in one run.

    make bench                        all measures, about 15 minutes; then the tables in docs/speed.md and README.md
    python -m bench.speed NAME ...    some of them
    python -m bench.speed --missing   those that have no record in bench/results

A ratio is the median over pairs of timings, ours and the other's in turn, each time in the other order: this machine is
shared, and only what happens side by side can be compared. Peers are optional (bench/requirements-peers.txt); a measure
whose peer is not installed says so and is left out.
"""

"""Faults by the thousand: `make torture` injects them and counts what becomes of them.

    python -m bench.torture --seconds 600                       every kind, then the table
    python -m bench.torture --kinds bits --seed 0 --only 1234   one fault again, with its traceback

A fault is decided by its kind, its number and the seed, and so can be played again. Each kind is one file.
"""

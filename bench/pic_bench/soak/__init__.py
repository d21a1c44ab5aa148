"""A server under far too much load and many faults, for minutes: nothing may be lost, leaked, stale or different."""

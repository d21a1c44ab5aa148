"""The live audit: some spliced requests are computed again in full, and what differs is watched."""

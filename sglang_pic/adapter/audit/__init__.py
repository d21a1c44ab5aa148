"""The live audit computes some spliced requests again in full and watches how far the first token differs."""

"""The live audit computes some requests on spliced rows again in full and watches how far the first token differs."""

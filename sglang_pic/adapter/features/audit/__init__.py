"""The live audit: computes some requests on spliced rows again in full, and compares their first tokens."""

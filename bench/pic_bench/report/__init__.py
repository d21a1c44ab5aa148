"""Reports of runs: tables and pages made from a run's folder alone."""

"""Reports of runs: tables, pictures and pages made from a run's folder alone."""

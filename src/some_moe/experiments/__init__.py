"""Every published run, every study and every baseline, as a named run."""

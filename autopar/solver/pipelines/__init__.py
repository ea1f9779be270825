"""Pipelines before their stages are planned: cuts, bounds of steps, mixtures of stage plans."""

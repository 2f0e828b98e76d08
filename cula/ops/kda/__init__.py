"""KDA: problem, reference, stages."""

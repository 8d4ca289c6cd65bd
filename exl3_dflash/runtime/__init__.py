"""Generation: the engine interface, the reference engine, sampling, statistics and streaming text."""

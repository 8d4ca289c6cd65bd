"""DFlash drafters: config dialects, checkpoints, and the torch model."""

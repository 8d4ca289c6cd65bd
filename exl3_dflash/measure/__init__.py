"""Measurement: teacher-forced fidelity of drafters and its statistics (definitions: docs in each module)."""

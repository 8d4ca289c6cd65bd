"""Tests; a package so that helpers are imported as `tests.tiny_models` whatever else is installed."""

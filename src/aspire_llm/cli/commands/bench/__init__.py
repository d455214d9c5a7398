"""Measure speed, acceptance and equality of outputs."""

"""Measure how drafting behaves on a model: the numbers, and plots of them."""

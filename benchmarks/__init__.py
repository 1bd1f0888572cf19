"""Benchmarks. ``python -m benchmarks [NAME] [--quick]`` runs them and writes ``benchmarks/results/NAME.json``.

A benchmark is a module with ``run(quick: bool) -> dict``, which measures and returns plain data. Things that are compared are
measured in the same run, in turns, and reported as medians and ratios: absolute times differ between machines and minutes.
"""

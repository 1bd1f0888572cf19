"""Benchmarks. ``python -m benchmarks [NAME] [--quick]`` runs them and writes ``benchmarks/results/NAME.json``.

A benchmark is a module with ``run(quick: bool) -> dict``: it measures, and returns plain data. What is compared is measured in
the same run, turn about, and reported as medians and ratios: absolute times differ between machines and between minutes.
"""

"""What planners and authors of connectors, tiers and policies work with: replay, simulation, conformance, vLLM's scheduler."""

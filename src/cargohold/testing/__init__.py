"""What authors of connectors, tiers, policies and engines test with: simulation, conformance suites, the bridge to vLLM."""

"""vLLM's own scheduler under the simulation.

The scheduler, its block pool and the connector are the real ones; the model, the links, the tiers, time and all faults are
simulated. ``cargohold simulate --engine vllm`` runs it.

    configuration  a scenario's engine as vLLM sees it
    requests       vLLM's requests and events, its scheduler and its pool, as clients and oracles see them
    worker         one rank: a fingerprint model, called as vLLM's model runner calls one
    engine         all of it with any connector of vLLM's interface, stepped as vLLM's engine core does
    adapter        our connector over simulated tiers: what is seen of it, and done to it, beyond any other
    late_blocks    blocks that the connector learns of late, or never
    oracles        nothing remembers what is over
    recipe         scenarios, what surrounds their engines, and runs
    others         connectors of others in the place of ours
"""

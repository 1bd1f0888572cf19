"""vLLM's own scheduler under the simulation.

The scheduler, its block pool and our adapter are the real ones; the model, the links, the tiers, time and all faults are
simulated. ``cargohold simulate --engine vllm`` runs it.

    configuration  a scenario's engine as vLLM is told of it
    connector      the adapter over simulated tiers, in virtual time
    batch          what a worker keeps of the requests it computes
    published      KV events as vLLM publishes them
    runner         the fingerprint model in vLLM's order of things
    worker         one rank: a fingerprint model and the adapter's worker side
    requests       requests as vLLM has them, and as far as their clients know
    reports        what workers report, as vLLM carries it and as the simulation reads it
    repeatable     vLLM's schedulers, the same in every process
    views          vLLM's scheduler and pool, as the oracles look at an engine
    engine         all of it, stepped as vLLM's engine core does
    oracles        what must hold in vLLM and in the adapter
    recipe         which scenarios, and what surrounds them
    surroundings   what vLLM reads from them, and says to them
"""

"""Others' connectors under the simulation: any class of vLLM's interface, between vLLM's scheduler and simulated workers.

Scheduler side, managers, policies and reports are the connector's own code. Only copies that need CUDA are simulated.

    plan     which connector, with which options; and which cannot be played, and why
    world    what surrounds it
    copies   simulated copies in the place of those with CUDA
    files    simulated threads for tiers on files
    oracles  nothing stands still, and nothing goes on for ever
    events   what connectors announce against what they hold
    recipe   scenarios and runs
    report   a failure as a table of steps, and as a script that stands alone
"""

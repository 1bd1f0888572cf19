"""The same connectors inside vLLM.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "CargoholdConnector", "kv_role": "kv_both",
                                            "kv_connector_extra_config": {"host_bytes": "8GiB"}}'

Nothing here decides what is kept or loaded: the adapter translates between vLLM's V1 connector interface and the contract in
``cargohold.protocol``. Only the modules of this package import vLLM, and nothing outside imports them: vLLM does, through the
entry point in ``plugin``.

    plugin       registers the connector's short name
    command      refuses wrong options on the command line of vLLM's server
    compat       the one place that imports names from vLLM; the tested versions, and whether this one is like them
    settings     options
    layout       vLLM's KV cache and model as our layout, or why they cannot be served
    engine_view  vLLM's block pool, requests and steps as the contract shows them
    deferrals    how long requests wait for an answer, resets of the prefix cache, room for another load
    explanations what a request is told of its way through the cache
    scheduler    scheduler side
    regions      the paged KV's tensors as plain bytes
    worker       worker side; what travels between scheduler and workers, and which part of the model each worker holds
    start        what the log says at start of what should be set otherwise
    metrics      counters for vLLM's log and its Prometheus endpoint; KV events
    connector    the class that vLLM instantiates
    server       ``vllm serve`` as a child process, for demos and benchmarks
"""

from typing import Final

OLDEST: Final = (0, 28)
NEWEST: Final = (0, 32)
"""The versions between which this adapter is tested. They stand here because this module alone imports nothing of vLLM."""

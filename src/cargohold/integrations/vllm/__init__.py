"""The same connectors inside vLLM.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "CargoholdConnector", "kv_role": "kv_both",
                                            "kv_connector_extra_config": {"host_bytes": "8GiB"}}'

Nothing here decides what is kept or loaded: the adapter translates between vLLM's V1 connector interface and the contract in
``cargohold.protocol``. Only the modules of this package import vLLM, and nothing outside imports them: vLLM does, through the
entry point in ``plugin``.

    plugin        registers the connector's short name
    command       refuses wrong options on the command line of vLLM's server
    compat        the one place that imports names from vLLM; the tested versions, and whether this one is like them
    settings      options
    connector     the class that vLLM instantiates
    groups        vLLM's KV-cache groups as ours, or why they cannot be served
    layout        vLLM's KV cache as our layout, or why it cannot be served
    identity      which model's KV it is: whatever changes its bytes besides tokens
    pool_view     vLLM's block pool and block tables, as the contract shows them
    request_view  vLLM's requests and steps, as the contract shows them
    scheduler     scheduler side
    loads         loads of its requests: waiting for an answer, room, what became of them
    adapters      LoRA adapters by content: keys cover their weights
    resets        resets of vLLM's prefix cache: of which weights is what is kept?
    records       what is known of one request, in one place
    metrics       counters for vLLM's log and its Prometheus endpoint; KV events
    worker        worker side; what travels between scheduler and workers, and which part of the model each worker holds
    regions       the paged KV's tensors as plain bytes
    weights       what a worker's model holds, as a fingerprint
    start         what the log says at start of what should be set otherwise
    server        ``vllm serve`` as a child process, for demos and benchmarks
"""

from typing import Final

OLDEST: Final = (0, 28)
NEWEST: Final = (0, 33)
"""The versions between which this adapter is tested. They stand here because this module alone imports nothing of vLLM."""
